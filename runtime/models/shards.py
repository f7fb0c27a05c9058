"""Split models: which files belong together, and proof that they do.

The names of the other shards follow from the first one's, never from metadata: a file cannot make
us open anything but its own siblings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from runtime.errors import CorruptModel, ModelError
from runtime.models.gguf_header import Header, MetadataValue, TensorInfo

_SHARD_NAME = re.compile(r"(?P<prefix>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf")


def other_shards(path: Path, metadata: Mapping[str, MetadataValue]) -> list[Path]:
    """Paths of shards 2..count of the model whose first file is `path`; [] for a single file.

    Raises: CorruptModel when the file's metadata and name disagree, ModelError when it is a later
    shard.
    """
    count = _whole(path, metadata, "split.count", default=1)
    number = _whole(path, metadata, "split.no", default=0)
    if count <= 1 and number == 0:
        return []
    match = _SHARD_NAME.fullmatch(path.name)
    if match is None or (int(match["number"]), int(match["count"])) != (number + 1, count):
        raise CorruptModel(
            path,
            f"is shard {number + 1} of {count}, but is not named "
            f"NAME-{number + 1:05}-of-{count:05}.gguf",
        )
    names = [f"{match['prefix']}-{n:05}-of-{count:05}.gguf" for n in range(1, count + 1)]
    if number != 0:
        raise ModelError(f"{path}: is shard {number + 1} of {count}; open the first: {names[0]}")
    return [path.with_name(name) for name in names[1:]]


def merge_shards(paths: Sequence[Path], headers: Sequence[Header]) -> dict[str, TensorInfo]:
    """One tensor table of all shards.

    Raises: CorruptModel when they are not one model.
    """
    tensors = dict(headers[0].tensors)
    for number in range(1, len(headers)):
        _check_same_model(paths, headers, number)
        for name, tensor in headers[number].tensors.items():
            if name in tensors:
                raise CorruptModel(paths[number], f"tensor '{name}' is also in another shard")
            tensors[name] = tensor
    metadata = headers[0].metadata
    expected = _whole(paths[0], metadata, "split.tensors.count", default=len(tensors))
    if expected != len(tensors):
        raise CorruptModel(
            paths[0], f"'split.tensors.count' is {expected}, but there are {len(tensors)} tensors"
        )
    return tensors


def _check_same_model(paths: Sequence[Path], headers: Sequence[Header], number: int) -> None:
    """Raises: CorruptModel unless file `number` is that shard of the first file's model."""
    first, this = headers[0].metadata, headers[number].metadata
    for key, value in (("split.no", number), ("split.count", len(headers))):
        if this.get(key) != value:
            raise CorruptModel(paths[number], f"'{key}' is {this.get(key)!r}, expected {value}")
    for key in this.keys() & first.keys() - {"split.no"}:
        if this[key] != first[key]:
            raise CorruptModel(
                paths[number], f"'{key}' differs from {paths[0].name}: parts of two models"
            )


def _whole(path: Path, metadata: Mapping[str, MetadataValue], key: str, default: int) -> int:
    value = metadata.get(key, default)
    if type(value) is not int or value < 0:
        raise CorruptModel(path, f"'{key}' is {value!r}, not a whole number")
    return value
