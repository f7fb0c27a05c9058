"""HostExperts: the routed experts where they lie in host memory, pinned if that is possible.

Pinned experts can be copied to the GPU beside its work, and read by kernels in place. The pages are
those of the model's file. They are registered in the background: an expert counts as pinned as soon
as all of its bytes are, and until then the CPU computes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ops.quants import BlockFormat
from runtime.cuda.device import Device
from runtime.cuda.memory import slot_bytes
from runtime.experts.host_memory import HostMemory
from runtime.experts.pinned_pages import I64, Bools, PinnedPages, Span
from runtime.experts.pinning import Pinning, pieces, pinnable
from runtime.models.linear import Linear
from runtime.models.spec import MoeSpec
from runtime.models.weights import Weight

logger = logging.getLogger(__name__)

NOT_ASKED_FOR = "not asked for"
Part = tuple[int, int, int]
"""(offset in an expert's slot, host address, bytes)"""


@dataclass(frozen=True)
class Matrix:
    """The matrix of every expert in one stack: the first one's address, and bytes to the next.

    host      for kernels too, where it is pinned
    n_bytes   of one matrix
    offset    where it lies in an expert's slot
    """

    host: int
    stride: int
    n_bytes: int
    offset: int


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
    """Where the experts of a layer lie."""

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
        self.layers = tuple(layer_experts(weights, layer) for layer in layers)
        self._matrices = [  # found quicker than by their names
            [(part.offset, part.host, part.stride, part.n_bytes) for part in layer.matrices]
            for layer in self.layers
        ]
        self._starts, self._ends = _edges(self.layers)
        self._pages = PinnedPages()
        self._pinning: Pinning | None = None
        self._refused: str | None = NOT_ASKED_FOR
        self.pinned_experts: Bools = np.zeros(self._starts.shape[:2], np.bool_)
        """bool[n_layers, n_expert]: a new array whenever more are; no array ever changes."""
        self.undivided_experts: Bools = self.pinned_experts
        """The same for those of which every matrix lies in one registration: the driver takes it
        as one copy."""
        self._wants_all = False

    @property
    def n_bytes(self) -> int:
        """Of all experts."""
        return int((self._ends - self._starts).sum())

    @property
    def n_pinned_bytes(self) -> int:
        """Of whole pages."""
        return self._pages.n_bytes

    @property
    def pins_all(self) -> bool:
        """Whether every expert is pinned or, as far as is known now, will be."""
        return self._wants_all and self._pinning is not None and self._pinning.why is None

    @property
    def pinned(self) -> bool:
        """Whether every expert is pinned now."""
        return self._pinning is not None and self._pinning.ended and self.pins_all

    @property
    def is_pinning(self) -> bool:
        """Whether more may become pinned by itself."""
        return self._pinning is not None and not self._pinning.ended

    def wait(self, seconds: float) -> None:
        """Wait for the end of pinning, at most so long."""
        if self._pinning is not None:
            self._pinning.wait(seconds)

    @property
    def why_not_pinned(self) -> str | None:
        """None: every expert is pinned, or it is under way."""
        if self._pinning is None or self._refused is not None:
            return self._refused
        return self._pinning.why

    def is_pinned(self, layer: int, expert: int) -> bool:
        return self.pinned_experts.item(layer, expert)

    def parts(self, layer: int, expert: int) -> list[Part]:
        """What the expert's slot consists of: its matrices, wherever they are."""
        return [
            (offset, first + expert * stride, n_bytes)
            for offset, first, stride, n_bytes in self._matrices[layer]
        ]

    def copies(self, layer: int, expert: int) -> list[Part]:
        """What the slot consists of, in copies that the driver takes.

        Raises: EngineBug for an expert that is not pinned.
        """
        parts = self.parts(layer, expert)
        if self.undivided_experts.item(layer, expert):
            return parts
        return [
            (offset + start - first, start, n_bytes)
            for offset, first, size in parts
            for start, n_bytes in self._pages.cut(first, size)
        ]

    def pin(
        self,
        device: Device,
        uses: NDArray[np.integer[Any]] | None = None,
        *,
        memory: HostMemory | None = None,
        wait: float | None = None,
        tell: Callable[[str], object] = logger.warning,
    ) -> None:
        """Begin to register the experts' pages, on a thread, as far as the machine's memory allows.

        uses   [n_layers, n_expert or more], earlier ones: the most used experts come first; of
               those used equally, the first of every layer, as caches begin with them
        wait   seconds to wait for the end at most; None: for the end
        tell   gets the reason where not all are pinned, from any thread
        Where it is impossible nothing is registered and `why_not_pinned` says why.
        Raises: DeviceLost.
        """
        info = device.info
        if not (info.registers_host and info.registers_read_only):
            self._refuse(f"{info.name} cannot read a file's pages in place", tell)
            return
        memory = HostMemory() if memory is None else memory
        most = pinnable(memory.read(), self.n_bytes)
        self._refused = None
        if most < self.n_bytes:
            whole, part = self.n_bytes / 2**30, most / 2**30
            self._refuse(f"of {whole:.1f} GiB of experts {part:.1f} fit the free memory", tell)
        n_layers, n_expert, _ = self._starts.shape
        heat = np.tile(np.linspace(0.5, 0.0, n_expert), (n_layers, 1))
        if uses is not None:
            heat += np.asarray(uses, np.float64)[:, :n_expert]
        starts, ends = self._starts.reshape(-1, 3), self._ends.reshape(-1, 3)
        spans = pieces(starts, ends, heat.reshape(-1), most)
        self._pinning = Pinning(device, spans, self._publish, memory, tell)
        self._wants_all = most == self.n_bytes
        if self._pinning.start():
            self._pinning.wait(wait)

    def part(self, layers: slice) -> HostPart:
        """Those of some of the layers."""
        return HostPart(self, layers)

    def describe(self) -> dict[str, object]:
        """How far pinning has come, for people."""
        done, pinning = self.n_pinned_bytes / 2**30, self._pinning
        text = f"{done:.1f} of {self.n_bytes / 2**30:.1f} GiB"
        if pinning is None or not pinning.n_bytes:
            text = "none"
        elif not pinning.ended:
            text += " so far"
        if pinning is not None and pinning.n_bytes:
            text += f", {pinning.bytes_per_second / 1e9:.1f} GB/s"
        reason = self.why_not_pinned
        return {"expert_pinned": text if reason is None else f"{text}: {reason}"}

    def close(self) -> None:
        """Unpin; no copy from the pages and no step that reads them may be in flight."""
        if self._pinning is not None:
            self._pinning.close()
        self._pages.clear()
        self.undivided_experts = self.pinned_experts = np.zeros_like(self.pinned_experts)
        self._wants_all, self._refused = False, "closed"

    def _refuse(self, why: str, tell: Callable[[str], object]) -> None:
        self._refused = why
        tell(why)

    def _publish(self, spans: list[Span]) -> None:
        self._pages.add(spans)
        undivided: Bools = np.all(self._pages.undivided(self._starts, self._ends), axis=2)
        covered: Bools = np.all(self._pages.cover(self._starts, self._ends), axis=2)
        self.undivided_experts, self.pinned_experts = undivided, covered


class HostPart:
    """Experts of some layers of `host`, which pins and unpins all of them."""

    def __init__(self, host: HostExperts, layers: slice) -> None:
        self._host, self._slice = host, layers
        self._first = layers.indices(len(host.layers))[0]
        self._whole = host.pinned_experts
        self._part = self._whole[layers]

    @property
    def layers(self) -> tuple[LayerExperts, ...]:
        return self._host.layers[self._slice]

    @property
    def pinned(self) -> bool:
        return self._host.pinned

    @property
    def pins_all(self) -> bool:
        return self._host.pins_all

    @property
    def is_pinning(self) -> bool:
        return self._host.is_pinning

    def wait(self, seconds: float) -> None:
        self._host.wait(seconds)

    @property
    def pinned_experts(self) -> Bools:
        whole = self._host.pinned_experts
        if whole is not self._whole:  # the same array as long as nothing changes
            self._whole, self._part = whole, whole[self._slice]
        return self._part

    @property
    def undivided_experts(self) -> Bools:
        return self._host.undivided_experts[self._slice]

    @property
    def why_not_pinned(self) -> str | None:
        return self._host.why_not_pinned

    def is_pinned(self, layer: int, expert: int) -> bool:
        return self._host.is_pinned(self._first + layer, expert)

    def parts(self, layer: int, expert: int) -> list[Part]:
        return self._host.parts(self._first + layer, expert)

    def copies(self, layer: int, expert: int) -> list[Part]:
        return self._host.copies(self._first + layer, expert)

    def describe(self) -> dict[str, object]:
        return self._host.describe()

    def close(self) -> None:
        """Nothing: the whole is closed by whoever opened it."""


def _edges(layers: Sequence[LayerExperts]) -> tuple[I64, I64]:
    """Where every matrix begins and ends, i64[n_layers, n_expert, 3]; equal where there is none."""
    n_expert = max((layer.n_expert for layer in layers), default=0)
    starts = np.zeros((len(layers), n_expert, 3), np.int64)
    ends = starts.copy()
    for index, layer in enumerate(layers):
        experts = np.arange(layer.n_expert)
        for column, matrix in enumerate(layer.matrices):
            first = matrix.host + experts * matrix.stride
            starts[index, : layer.n_expert, column] = first
            ends[index, : layer.n_expert, column] = first + matrix.n_bytes
    return starts, ends
