"""Weight: one named tensor as it lies in the file, with its format and shape."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ops.quants import FORMATS, BlockFormat
from runtime.models.gguf import GGUFFile
from runtime.models.mapped_file import U8

F32 = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Weight:
    """A tensor's bytes.

    shape  GGUF order: shape[0] values are contiguous (a row), shape[1] rows a matrix, ...
    mapped the bytes are the file's own pages
    data   u8[..., shape[1], row_bytes], a read-only view of the file's map (F64 alone is converted
           to F32 and owned); slow dimensions first, so data[e] is the matrix of expert e
    """

    name: str
    format: BlockFormat
    shape: tuple[int, ...]
    data: U8
    mapped: bool = False

    @property
    def n_bytes(self) -> int:
        return self.data.nbytes

    @property
    def row_bytes(self) -> int:
        n_bytes: int = self.data.shape[-1]
        return n_bytes

    @property
    def address(self) -> int:
        """Where the first byte lies; valid while the model is open."""
        address: int = self.data.ctypes.data
        return address

    def to_f32(self) -> F32:
        """All values, f32[..., shape[1], shape[0]]: for vectors and tests, not for matrices."""
        return self.format.dequantize_rows(self.data)


def weight_of(file: GGUFFile, name: str) -> Weight:
    """The tensor `name` of an open file.  Raises: KeyError when there is none."""
    tensor = file.tensors[name]
    data = file.data(name).reshape(*reversed(tensor.shape[1:]), tensor.row_bytes)
    if tensor.format.name != "F64":
        return Weight(name, tensor.format, tensor.shape, data, mapped=True)
    values = np.ascontiguousarray(tensor.format.dequantize_rows(data))
    return Weight(name, FORMATS["F32"], tensor.shape, values.view(np.uint8))
