"""What a GGUF file holds, as data for printing; files that cannot be run can still be inspected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from runtime.errors import ModelError
from runtime.models.gguf import open_gguf
from runtime.models.gguf_header import MetadataValue, TensorInfo
from runtime.models.model import model_spec
from runtime.models.sizes import ModelSizes, model_sizes
from runtime.models.spec import ModelSpec

SHOWN_CHARACTERS = 80
SHOWN_ELEMENTS = 4


@dataclass(frozen=True)
class FormatShare:
    """What one weight format takes of a file."""

    format: str
    n_tensors: int
    n_bytes: int


@dataclass(frozen=True)
class Inspection:
    """One model.

    metadata  (key, value shortened for one line) in the file's order
    formats   largest first
    spec      None when the model cannot be run, `reason` then says why
    """

    paths: tuple[Path, ...]
    n_bytes: int
    version: int
    metadata: tuple[tuple[str, str], ...]
    tensors: tuple[TensorInfo, ...]
    formats: tuple[FormatShare, ...]
    spec: ModelSpec | None
    sizes: ModelSizes | None
    reason: str


def inspect_model(path: str | Path) -> Inspection:
    """Look into the model at `path` without reading its weights.

    Raises: CorruptModel, UnsupportedFormat, ModelError when the file itself is not sound.
    """
    with open_gguf(path) as file:
        spec, reason = None, ""
        try:
            spec = model_spec(file)
        except ModelError as error:
            reason = str(error)
        return Inspection(
            paths=file.paths,
            n_bytes=file.n_bytes,
            version=file.version,
            metadata=tuple((key, shorten(value)) for key, value in file.metadata.items()),
            tensors=tuple(file.tensors.values()),
            formats=_formats(file.tensors.values()),
            spec=spec,
            sizes=model_sizes(spec, file.tensors) if spec else None,
            reason=reason,
        )


def shorten(value: MetadataValue) -> str:
    """One line of `value`: long strings and arrays are cut, and say how long they are."""
    if isinstance(value, list):
        first = ", ".join(shorten(element) for element in value[:SHOWN_ELEMENTS])
        return f"[{first}{', ...' if len(value) > SHOWN_ELEMENTS else ''}] ({len(value)})"
    text = repr(value) if isinstance(value, str) else f"{value}"
    if len(text) > SHOWN_CHARACTERS:
        return f"{text[:SHOWN_CHARACTERS]}... ({len(str(value))} characters)"
    return text


def _formats(tensors: Iterable[TensorInfo]) -> tuple[FormatShare, ...]:
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        counts[tensor.format.name] += 1
        sizes[tensor.format.name] += tensor.n_bytes
    return tuple(FormatShare(name, counts[name], n_bytes) for name, n_bytes in sizes.most_common())
