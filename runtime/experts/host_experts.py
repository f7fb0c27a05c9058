"""HostExperts: the routed experts where they lie in host memory, pinned if that is possible.

Pinned experts can be copied to the GPU beside its work, and read by kernels in place. The pages are
those of the model's file: whole tensors are registered, neighbours in one piece, since no page may
be in two.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ops.quants import BlockFormat
from runtime.cuda.device import Device
from runtime.cuda.memory import RegisteredMemory, slot_bytes
from runtime.errors import DeviceLost, PinningFailed
from runtime.models.linear import Linear
from runtime.models.spec import MoeSpec
from runtime.models.weights import Weight

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Matrix:
    """The matrix of every expert in one stack: the first one's address, and bytes to the next.

    n_bytes   of one matrix
    address   the first one's address for kernels; 0: they cannot read it
    offset    where it lies in an expert's slot
    """

    host: int
    stride: int
    n_bytes: int
    offset: int
    address: int = 0


@dataclass(frozen=True)
class LayerExperts:
    """gate, up and down of a layer's experts, and their formats."""

    n_expert: int
    matrices: tuple[Matrix, Matrix, Matrix]
    formats: tuple[BlockFormat, BlockFormat, BlockFormat]

    @property
    def slot_bytes(self) -> int:
        """What an expert takes on the GPU."""
        last = self.matrices[-1]
        return last.offset + slot_bytes(last.n_bytes)


def layer_experts(weights: Mapping[str, Weight], layer: MoeSpec) -> LayerExperts:
    """Where the experts of a layer lie; kernels cannot read them yet."""

    def part(linear: Linear, first_row: int, n_rows: int, offset: int) -> Matrix:
        weight = weights[linear.weight]
        stride = linear.n_out * weight.row_bytes
        host = weight.address + first_row * weight.row_bytes
        return Matrix(host, stride, n_rows * weight.row_bytes, offset)

    gate, up = layer.gate_up[0], layer.gate_up[-1]
    first_up_row = layer.n_ff if up is gate else 0
    gates = part(gate, 0, layer.n_ff, 0)
    ups = part(up, first_up_row, layer.n_ff, slot_bytes(gates.n_bytes))
    downs = part(layer.down, 0, layer.down.n_out, ups.offset + slot_bytes(ups.n_bytes))
    formats = [weights[linear.weight].format for linear in (gate, up, layer.down)]
    return LayerExperts(layer.n_expert, (gates, ups, downs), (formats[0], formats[1], formats[2]))


class HostExperts:
    """The experts of `layers`, pinned by `pin`.  The weights outlive it."""

    def __init__(self, weights: Mapping[str, Weight], layers: Sequence[MoeSpec]) -> None:
        self._weights, self._specs = weights, tuple(layers)
        self.layers = tuple(layer_experts(weights, layer) for layer in layers)
        self._pieces: list[RegisteredMemory] = []
        self.why_not_pinned: str | None = "not asked for"
        """None: pinned."""

    @property
    def n_bytes(self) -> int:
        """Of all experts."""
        return sum(end - start for start, end in self._ranges())

    @property
    def pinned(self) -> bool:
        return self.why_not_pinned is None

    def pin(self, device: Device, pinned: Callable[[int], object] = int) -> None:
        """Register all experts' pages; `pinned` gets the bytes of each piece.  Blocks for long.

        Where that is impossible nothing is registered and `why_not_pinned` says why.
        Raises: DeviceLost; whatever `pinned` raises.
        """
        info = device.info
        if not (info.registers_host and info.registers_read_only):
            self.why_not_pinned = f"{info.name} cannot read a file's pages in place"
            return
        try:
            for start, end in self._ranges():
                pages = bytes_at(start, end - start)
                self._pieces.append(RegisteredMemory(device, pages, "experts", read_only=True))
                pinned(end - start)
        except DeviceLost:
            raise
        except PinningFailed as error:
            self.why_not_pinned = str(error)
            self._release()
            return
        except BaseException:
            self._release()
            raise
        self.why_not_pinned = None
        self.layers = tuple(self._addressed(layer) for layer in self.layers)

    def part(self, layers: slice) -> HostPart:
        """Those of some of the layers."""
        return HostPart(self, layers)

    def close(self) -> None:
        """Unpin; no copy from the pages and no step that reads them may be in flight."""
        self._release()
        self.why_not_pinned = "closed"

    def _release(self) -> None:
        while self._pieces:
            self._pieces.pop().close()

    def _ranges(self) -> list[tuple[int, int]]:
        """[start, end) of whole pages with experts, joined where they touch, in order."""
        page = mmap.PAGESIZE
        names = {linear.weight for layer in self._specs for linear in layer.expert_linears}
        spans = []
        for name in names:
            weight = self._weights[name]
            end = weight.address + weight.n_bytes
            spans.append((weight.address // page * page, -(-end // page) * page))
        joined: list[tuple[int, int]] = []
        for start, end in sorted(spans):
            if joined and start <= joined[-1][1]:
                joined[-1] = joined[-1][0], max(end, joined[-1][1])
            else:
                joined.append((start, end))
        return joined

    def _addressed(self, layer: LayerExperts) -> LayerExperts:
        first, second, third = (self._mapped(matrix) for matrix in layer.matrices)
        return replace(layer, matrices=(first, second, third))

    def _mapped(self, matrix: Matrix) -> Matrix:
        starts = [piece.host for piece in self._pieces]
        piece = self._pieces[bisect_right(starts, matrix.host) - 1]
        address = piece.address + matrix.host - piece.host
        return Matrix(matrix.host, matrix.stride, matrix.n_bytes, matrix.offset, address)


class HostPart:
    """Experts of some layers of `host`, which pins and unpins all of them."""

    def __init__(self, host: HostExperts, layers: slice) -> None:
        self._host, self._slice = host, layers

    @property
    def layers(self) -> tuple[LayerExperts, ...]:
        return self._host.layers[self._slice]

    @property
    def pinned(self) -> bool:
        return self._host.pinned

    @property
    def why_not_pinned(self) -> str | None:
        return self._host.why_not_pinned

    def close(self) -> None:
        """Nothing: the whole is closed by whoever opened it."""


def bytes_at(address: int, n_bytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Memory that belongs to someone else, as an array."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * n_bytes).from_address(address))
