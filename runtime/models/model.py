"""Model: an open GGUF file together with its spec; nothing of it is in memory but the map."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from runtime.errors import CorruptModel, UnsupportedArchitecture
from runtime.models.architectures import ARCHITECTURES
from runtime.models.builder import SpecBuilder
from runtime.models.gguf import GGUFFile, open_gguf
from runtime.models.gguf_header import MetadataValue
from runtime.models.spec import ModelSpec
from runtime.models.weights import Weight, weight_of


def open_model(path: str | Path) -> Model:
    """Open the model at `path` (the first shard of a split one); use it in a `with` block.

    Raises: CorruptModel, UnsupportedFormat, UnsupportedArchitecture, ModelError.
    """
    file = open_gguf(path)
    try:
        return Model(file, model_spec(file))
    except BaseException:
        file.close()
        raise


def model_spec(file: GGUFFile) -> ModelSpec:
    """The spec of an open file, checked against its tensors.

    Raises: CorruptModel for contradictions, UnsupportedArchitecture listing the known ones.
    """
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise CorruptModel(file.path, "'general.architecture' is missing or not a string")
    build = ARCHITECTURES.get(architecture)
    if build is None:
        raise UnsupportedArchitecture(
            f"{file.path}: architecture '{architecture[:60]}' is not supported; the known ones are "
            f"{', '.join(ARCHITECTURES)}"
        )
    check_vocabulary(file)
    return build(SpecBuilder(file.path, architecture, file.metadata, file.tensors))


def check_vocabulary(file: GGUFFile) -> None:
    """Raises: CorruptModel when the arrays of a vocabulary contradict each other."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    for name in ("scores", "token_type"):
        key = f"tokenizer.ggml.{name}"
        values = file.metadata.get(key)
        if values is None:
            continue
        if not isinstance(tokens, list) or not isinstance(values, list):
            raise CorruptModel(file.path, f"'{key}' has no array of tokens to describe")
        if len(values) != len(tokens):
            raise CorruptModel(
                file.path, f"'{key}' has {len(values)} entries for {len(tokens)} tokens"
            )


class Model:
    """metadata, spec and weights of an open model; closes its files on leaving the `with` block."""

    def __init__(self, file: GGUFFile, spec: ModelSpec) -> None:
        self.file = file
        self.spec = spec
        self.weights: Mapping[str, Weight] = _Weights(file)

    @property
    def path(self) -> Path:
        return self.file.path

    @property
    def metadata(self) -> dict[str, MetadataValue]:
        return self.file.metadata

    def close(self) -> None:
        """Close the files; views of weights stay readable until they are dropped."""
        self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Weights(Mapping[str, Weight]):
    """The weights by name, each made when it is first asked for."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._made: dict[str, Weight] = {}

    def __getitem__(self, name: str) -> Weight:
        if name not in self._made:
            self._made[name] = weight_of(self._file, name)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._file.tensors)

    def __len__(self) -> int:
        return len(self._file.tensors)
