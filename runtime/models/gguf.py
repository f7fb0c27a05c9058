"""GGUFFile: an open model of one or several files, checked first and mapped afterwards."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

from runtime.errors import ModelError
from runtime.models.gguf_header import Header, MetadataValue, TensorInfo, read_header
from runtime.models.mapped_file import U8, MappedFile
from runtime.models.shards import merge_shards, other_shards


def open_gguf(path: str | Path) -> GGUFFile:
    """Open and check the model at `path` (the first shard of a split one), for a `with` block.

    Raises: CorruptModel, UnsupportedFormat, ModelError when a file cannot be opened.
    """
    return GGUFFile(Path(path))


class GGUFFile:
    """Metadata, tensor table and bytes of one model.

    metadata  keys of the first file: bool, int, float, str, or a list of one of them
    tensors   of all files, by name
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: list[MappedFile] = []
        try:
            first = self._open(path)
            self.version = first.version
            self.metadata: dict[str, MetadataValue] = first.metadata
            headers = [first, *map(self._open, other_shards(path, first.metadata))]
            self.tensors: dict[str, TensorInfo] = merge_shards(self.paths, headers)
            for file in self._files:
                file.map()
        except BaseException:
            self.close()
            raise

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files of the model, in shard order."""
        return tuple(file.path for file in self._files)

    @property
    def n_bytes(self) -> int:
        """Size of all files together."""
        return sum(file.n_bytes for file in self._files)

    def data(self, name: str) -> U8:
        """The bytes of tensor `name`, u8[n_bytes]: a read-only view of the map.

        Raises: KeyError when there is no such tensor, ModelError after `close`.
        """
        tensor = self.tensors[name]
        return self._files[tensor.part].view(tensor.offset, tensor.n_bytes)

    def map_ranges(self) -> list[tuple[Path, int, int]]:
        """(file, address, bytes) of every map, for a handler of bus errors."""
        return [(file.path, file.address, file.n_bytes) for file in self._files]

    def check_unchanged(self) -> None:
        """Raises: CorruptModel when a file has become shorter than its map."""
        for file in self._files:
            file.check_unchanged()

    def close(self) -> None:
        """Close all files; a map goes with the last view of it.  May be called again."""
        for file in self._files:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self, path: Path) -> Header:
        """Open one more file and check its header."""
        file = MappedFile(path)
        self._files.append(file)
        try:
            return read_header(file.fd, path, file.n_bytes, part=len(self._files) - 1)
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
