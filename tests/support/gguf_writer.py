"""A small GGUF writer for tests: honest files, and files that lie in one chosen place."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, INT64, FLOAT64 = (
    range(13)
)
_STRUCT = {
    UINT8: "B",
    INT8: "b",
    UINT16: "H",
    INT16: "h",
    UINT32: "I",
    INT32: "i",
    FLOAT32: "f",
    BOOL: "?",
    UINT64: "Q",
    INT64: "q",
    FLOAT64: "d",
}


@dataclass(frozen=True)
class Typed:
    """A metadata value with a chosen type number, or (bytes) an already encoded one."""

    type: int
    value: Any


@dataclass(frozen=True)
class Tensor:
    """shape: GGUF order; offset: in the data section, None: after the tensor before it."""

    name: str
    shape: tuple[int, ...]
    data: bytes
    ggml_type: int = 0
    offset: int | None = None
    n_dimensions: int | None = None


def f32_tensor(name: str, values: NDArray[Any]) -> Tensor:
    """An F32 tensor from an array whose last axis is contiguous (ne0)."""
    return Tensor(name, tuple(reversed(values.shape)), values.astype("<f4").tobytes())


def gguf_bytes(
    metadata: Mapping[str, Any] | Sequence[tuple[str | bytes, Any]] = (),
    tensors: Sequence[Tensor] = (),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_tensors: int | None = None,
    n_keys: int | None = None,
    alignment: int = 32,
) -> bytes:
    """The file; counts may be overridden, metadata may be pairs so that keys can repeat."""
    pairs = list(metadata.items() if isinstance(metadata, Mapping) else metadata)
    out = bytearray(magic + struct.pack("<I", version))
    out += struct.pack("<Q", len(tensors) if n_tensors is None else n_tensors)
    out += struct.pack("<Q", len(pairs) if n_keys is None else n_keys)
    for key, value in pairs:
        out += string(key) + _typed_bytes(_typed(value))
    data = bytearray()
    for tensor in tensors:
        offset = len(data) if tensor.offset is None else tensor.offset
        out += tensor_row(tensor, offset)
        data += tensor.data
        data += bytes(-len(data) % alignment)
    if tensors:
        out += bytes(-len(out) % alignment)
        out += data[: len(data) - _padding(tensors[-1], alignment)]
    return bytes(out)


def write_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Sequence[Tensor], **options: Any
) -> Path:
    """Write `gguf_bytes` to `path` and return it."""
    path.write_bytes(gguf_bytes(metadata, tensors, **options))
    return path


def string(text: str | bytes) -> bytes:
    """A GGUF string: u64 length, then the bytes."""
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def tensor_row(tensor: Tensor, offset: int) -> bytes:
    """One row of the tensor table."""
    n_dimensions = len(tensor.shape) if tensor.n_dimensions is None else tensor.n_dimensions
    return (
        string(tensor.name)
        + struct.pack("<I", n_dimensions)
        + b"".join(struct.pack("<Q", n) for n in tensor.shape)
        + struct.pack("<IQ", tensor.ggml_type, offset)
    )


def _padding(tensor: Tensor, alignment: int) -> int:
    return -len(tensor.data) % alignment


def _typed(value: Any) -> Typed:
    """The usual type of a Python value."""
    match value:
        case Typed():
            return value
        case bool():
            return Typed(BOOL, value)
        case int():
            return Typed(UINT32 if 0 <= value < 1 << 32 else INT64, value)
        case float():
            return Typed(FLOAT32, value)
        case str():
            return Typed(STRING, value)
        case list():
            element = _typed(value[0]).type if value else UINT32
            return Typed(ARRAY, [Typed(element, item) for item in value])
    raise TypeError(f"no GGUF type for {value!r}")


def _typed_bytes(typed: Typed) -> bytes:
    return struct.pack("<I", typed.type) + _value_bytes(typed)


def _value_bytes(typed: Typed) -> bytes:
    value = typed.value
    if isinstance(value, bytes):
        return value
    if typed.type == STRING:
        return string(value)
    if typed.type == ARRAY:
        element = value[0].type if value else UINT32
        return struct.pack("<IQ", element, len(value)) + b"".join(map(_value_bytes, value))
    return struct.pack("<" + _STRUCT[typed.type], value)
