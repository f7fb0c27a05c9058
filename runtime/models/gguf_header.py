"""The header of one GGUF file: metadata and tensor table, checked against the file's own length.

Nothing is mapped here.  Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
(versions 2 and 3, little-endian).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ops.quants import BlockFormat, format_of_type
from runtime.errors import UnsupportedFormat
from runtime.models.gguf_reader import HeaderReader

MetadataValue = bool | int | float | str | list[bool] | list[int] | list[float] | list[str]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MIN_ALIGNMENT, MAX_ALIGNMENT = 8, 1 << 20
# Bounds far above every published model (vocabulary 262144, 515k merges, 2000 tensors), because an
# array element of one byte costs eight and more as a Python object.
MAX_METADATA_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_ARRAY_ELEMENTS = 1 << 22  # of all arrays together
MAX_KEY_BYTES = (1 << 16) - 1
MAX_TENSOR_NAME_BYTES = 64  # ggml's own limit
MAX_DIMENSIONS = 4

_PRINTABLE_ASCII = re.compile(rb"[!-~]+")
_UINT32, _BOOL, _STRING, _ARRAY = 4, 7, 8, 9
_NUMBERS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    _UINT32: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _BOOL: np.dtype("<u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_MIN_KEY_BYTES = 8 + 1 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies.

    shape   GGUF order: ne0, the contiguous dimension, first
    part    index of the file (shard) that holds it
    offset  bytes from the start of that file
    """

    name: str
    format: BlockFormat
    shape: tuple[int, ...]
    part: int
    offset: int
    n_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of ne0 elements."""
        return self.format.row_bytes(self.shape[0])


@dataclass(frozen=True)
class Header:
    """What one GGUF file says about itself."""

    version: int
    metadata: dict[str, MetadataValue]
    tensors: dict[str, TensorInfo]


def read_header(fd: int, path: Path, file_bytes: int, part: int = 0) -> Header:
    """The checked header of the open file `fd` of `file_bytes` bytes; `path` is for messages.

    Raises: CorruptModel with the byte position, UnsupportedFormat for unknown versions and types.
    """
    reader = HeaderReader(fd, path, file_bytes)
    version = _read_version(reader)
    n_tensors = _read_count(reader, "tensor count", MAX_TENSORS, _MIN_TENSOR_BYTES)
    n_keys = _read_count(reader, "metadata key count", MAX_METADATA_KEYS, _MIN_KEY_BYTES)
    metadata, alignment = _read_metadata(reader, n_keys)
    tensors = _read_tensor_table(reader, n_tensors, alignment, part)
    return Header(version, metadata, tensors)


def _read_version(reader: HeaderReader) -> int:
    magic = reader.raw(len(MAGIC), "magic number")
    if magic not in (MAGIC, MAGIC[::-1]):
        raise reader.corrupt(f"starts with {magic!r}: not a GGUF file", 0)
    version = reader.uint(4, "version")
    if magic == MAGIC and version in VERSIONS:
        return version
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    if magic != MAGIC or swapped in (1, *VERSIONS):
        raise UnsupportedFormat(f"{reader.path}: a big-endian file; only little-endian is read")
    known = " and ".join(map(str, VERSIONS))
    raise UnsupportedFormat(f"{reader.path}: GGUF version {version}; versions {known} are read")


def _read_count(reader: HeaderReader, what: str, most: int, min_bytes: int) -> int:
    start = reader.position
    count = reader.uint(8, what)
    if count > most:
        raise reader.corrupt(f"{what} is {count}; at most {most} are allowed", start)
    if count * min_bytes > reader.bytes_left:
        raise reader.corrupt(f"{what} is {count}: {reader.file_bytes} bytes cannot hold it", start)
    return count


def _read_metadata(reader: HeaderReader, n_keys: int) -> tuple[dict[str, MetadataValue], int]:
    """All keys and values, and the alignment of the data section."""
    metadata: dict[str, MetadataValue] = {}
    alignment = DEFAULT_ALIGNMENT
    elements_left = MAX_ARRAY_ELEMENTS
    for _ in range(n_keys):
        start = reader.position
        raw = reader.sized("metadata key", MAX_KEY_BYTES)
        if not _PRINTABLE_ASCII.fullmatch(raw):
            raise reader.corrupt(f"metadata key {raw[:40]!r} is not printable ASCII", start)
        key = raw.decode("ascii")
        if key in metadata:
            raise reader.corrupt(f"metadata key '{key}' is there twice", start)
        value_type = reader.uint(4, f"type of '{key}'")
        value = _read_value(reader, key, value_type, elements_left)
        if isinstance(value, list):
            elements_left -= len(value)
        if key == "general.alignment":
            alignment = _alignment(reader, value_type, value, start)
        metadata[key] = value
    return metadata, alignment


def _alignment(reader: HeaderReader, value_type: int, value: MetadataValue, start: int) -> int:
    if value_type != _UINT32 or not isinstance(value, int):
        raise reader.corrupt(f"'general.alignment' has value type {value_type}, not uint32", start)
    if not MIN_ALIGNMENT <= value <= MAX_ALIGNMENT or value & (value - 1):
        raise reader.corrupt(
            f"'general.alignment' is {value}; "
            f"use a power of two from {MIN_ALIGNMENT} to {MAX_ALIGNMENT}",
            start,
        )
    return value


def _read_value(
    reader: HeaderReader, key: str, value_type: int, max_elements: int
) -> MetadataValue:
    if value_type == _STRING:
        return reader.string(f"value of '{key}'")
    if value_type == _ARRAY:
        return _read_array(reader, key, max_elements)
    value: MetadataValue = _read_numbers(reader, key, value_type, 1)[0]
    return value


def _read_array(reader: HeaderReader, key: str, max_elements: int) -> list[Any]:
    start = reader.position
    element_type = reader.uint(4, f"element type of '{key}'")
    count = reader.uint(8, f"length of '{key}'")
    if element_type == _ARRAY:
        raise reader.corrupt(f"'{key}' is an array of arrays, which no model uses", start)
    min_bytes = _NUMBERS[element_type].itemsize if element_type in _NUMBERS else 8
    if count * min_bytes > reader.bytes_left:
        raise reader.corrupt(f"'{key}' has {count} elements, more than the file can hold", start)
    if count > max_elements:
        raise reader.corrupt(
            f"'{key}' has {count} elements; all arrays together may have {MAX_ARRAY_ELEMENTS}",
            start,
        )
    if element_type == _STRING:
        return reader.strings(count, f"string in '{key}'")
    return _read_numbers(reader, key, element_type, count)


def _read_numbers(reader: HeaderReader, key: str, value_type: int, count: int) -> list[Any]:
    start = reader.position
    if value_type not in _NUMBERS:
        raise reader.corrupt(f"'{key}' has the unknown value type {value_type}", start)
    values = reader.numbers(_NUMBERS[value_type], count, f"value of '{key}'")
    if value_type != _BOOL:
        return values
    if max(values, default=0) > 1:
        raise reader.corrupt(f"'{key}' has a boolean that is neither 0 nor 1", start)
    return [bool(value) for value in values]


def _read_tensor_table(
    reader: HeaderReader, n_tensors: int, alignment: int, part: int
) -> dict[str, TensorInfo]:
    """The tensors by name, with offsets from the start of the file."""
    tensors: dict[str, TensorInfo] = {}
    for _ in range(n_tensors):
        start = reader.position
        tensor = _read_tensor(reader, alignment, part)
        if tensor.name in tensors:
            raise reader.corrupt(f"tensor '{tensor.name}' is there twice", start)
        tensors[tensor.name] = tensor
    data_start = (reader.position + alignment - 1) // alignment * alignment
    for name, tensor in tensors.items():
        offset = data_start + tensor.offset
        if offset + tensor.n_bytes > reader.file_bytes:
            raise reader.corrupt(
                f"tensor '{name}' of {tensor.n_bytes} bytes runs past the file's "
                f"{reader.file_bytes} bytes: is the download complete?",
                offset,
            )
        tensors[name] = replace(tensor, offset=offset)
    _check_apart(reader, tensors)
    return tensors


def _read_tensor(reader: HeaderReader, alignment: int, part: int) -> TensorInfo:
    """One table row; the offset is still that in the data section."""
    start = reader.position
    raw = reader.sized("tensor name", MAX_TENSOR_NAME_BYTES)
    if not _PRINTABLE_ASCII.fullmatch(raw):
        raise reader.corrupt(f"tensor name {raw!r} is not printable ASCII", start)
    name = raw.decode("ascii")
    n_dimensions = reader.uint(4, f"number of dimensions of '{name}'")
    if not 1 <= n_dimensions <= MAX_DIMENSIONS:
        raise reader.corrupt(f"tensor '{name}' has {n_dimensions} dimensions; use 1 to 4", start)
    shape = tuple(reader.uint(8, f"dimension of '{name}'") for _ in range(n_dimensions))
    if min(shape) < 1:
        raise reader.corrupt(f"tensor '{name}' has the empty shape {list(shape)}", start)
    tensor_format = _format(reader, name, reader.uint(4, f"type of '{name}'"))
    offset = reader.uint(8, f"offset of '{name}'")
    if offset % alignment:
        raise reader.corrupt(
            f"tensor '{name}' starts at {offset}, not aligned to {alignment}", start
        )
    if shape[0] % tensor_format.block_elems:
        raise reader.corrupt(
            f"tensor '{name}' has rows of {shape[0]} values, not a whole number of "
            f"{tensor_format.name} blocks of {tensor_format.block_elems}",
            start,
        )
    n_bytes = tensor_format.row_bytes(shape[0]) * math.prod(shape[1:])
    return TensorInfo(name, tensor_format, shape, part, offset, n_bytes)


def _format(reader: HeaderReader, name: str, ggml_type: int) -> BlockFormat:
    try:
        return format_of_type(ggml_type)
    except LookupError as error:
        reason = error.args[0]
        raise UnsupportedFormat(f"{reader.path}: tensor '{name}': {reason}") from error


def _check_apart(reader: HeaderReader, tensors: dict[str, TensorInfo]) -> None:
    """Raises: CorruptModel when two tensors share bytes."""
    for before, after in pairwise(sorted(tensors.values(), key=lambda tensor: tensor.offset)):
        if before.offset + before.n_bytes > after.offset:
            raise reader.corrupt(
                f"tensors '{before.name}' and '{after.name}' overlap", after.offset
            )
