"""Where routed experts are: the table that kernels look addresses up in, and who fills it.

The table is u64[n_layers, n_expert, 4]: the addresses of an expert's gate, up and down matrix for
kernels (0: not on the GPU), and a spare. Rows of layers without experts stay 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ops.gpu.expert import ADDRESSES
from runtime.cuda.device import Device
from runtime.cuda.memory import DeviceBuffer, slot_bytes
from runtime.engine.gpu.control import NO_DELTAS, Deltas
from runtime.engine.gpu.plan_parts import Fetches
from runtime.engine.gpu.transfer import Refused, transfer_all, transfer_of
from runtime.experts.totals import ExpertTotals, StepUse
from runtime.models.model import Model
from runtime.models.spec import Linear, ModelSpec, MoeSpec
from runtime.profiling.record import Span

U64 = NDArray[np.uint64]
I8 = NDArray[np.int8]
I32 = NDArray[np.int32]


class StepExperts(Protocol):
    """What the executor asks of whatever holds the experts."""

    @property
    def may_fetch(self) -> bool:
        """Whether steps may fetch what they miss: experts are pinned in the background, and until
        then prompts are performed in parts that the CPU serves."""
        ...

    def before_step(self) -> Deltas:
        """Changes of the table that the next step begins with, good until the next call; called
        once a step."""
        ...

    def while_running(self) -> None:
        """A step runs, and the loop waits for it: time for whatever no step waits for.  Once a
        step, or once for two where the loop never waited."""
        ...

    def after_step(self, choices: I32, *, fetched: bool = False) -> tuple[StepUse, ...]:
        """The step has ended, well or not; `choices` i32[n_moe_layers, n_tokens, n_used] are the
        experts that it used, of no token if that is not known; it `fetched` what it missed.  What
        served them, for each GPU where that changes."""
        ...

    def totals(self) -> ExpertTotals | None:
        """Who served the experts so far; None where they are all on the GPU."""
        ...

    def take_spans(self) -> list[Span]:
        """When the links carried experts since the last call."""
        ...

    def describe(self) -> dict[str, object]: ...


class ExpertStore(StepExperts, Protocol):
    """What holds the experts of one GPU.

    is_complete  every expert is on the GPU, now and always: nothing is missed, nothing changes
    max_deltas   changes of the table that one step may bring
    n_bytes      of the GPU's memory that it holds
    """

    is_complete: bool
    max_deltas: int

    @property
    def fetches(self) -> Fetches | None:
        """Room for what long prompts use and the GPU does not hold; None: the CPU computes it."""
        ...

    @property
    def n_bytes(self) -> int: ...

    def load(self, moved: Callable[[int], None]) -> Refused:
        """Move what the GPU begins with there; `moved` gets the bytes of each piece."""
        ...

    def table(self) -> U64:
        """The table before the first step."""
        ...

    def show(self, kinds: I8) -> None:
        """Keep i8[n_layers, n_expert] up to date: 0 for the experts that the next step has the CPU
        compute."""
        ...

    def close(self) -> None: ...


def choices_shape(spec: ModelSpec, n_tokens: int) -> tuple[int, int, int]:
    """How the choices of a step of so many tokens lie: layers, tokens, experts a token."""
    used = [block.n_used for _, block in spec.moe_layers]
    return len(used), n_tokens, max(used, default=0)


def empty_table(spec: ModelSpec) -> U64:
    """The table with no expert on the GPU."""
    return np.zeros((len(spec.layers), max(spec.n_expert_max, 1), ADDRESSES), np.uint64)


@dataclass(frozen=True)
class ExpertParts:
    """Where one expert's matrices begin inside its stacks, in bytes a stack and expert.

    gate, up, down  (name of the stack, bytes from one expert to the next, bytes to skip)
    """

    gate: tuple[str, int, int]
    up: tuple[str, int, int]
    down: tuple[str, int, int]


def expert_parts(model: Model, block: MoeSpec) -> ExpertParts:
    """The parts of a block; gate and up may lie in one stack."""

    def part(linear: Linear, skipped_rows: int = 0) -> tuple[str, int, int]:
        row_bytes = model.weights[linear.weight].row_bytes
        return linear.weight, linear.n_out * row_bytes, skipped_rows * row_bytes

    gate, up = block.gate_up[0], block.gate_up[-1]
    return ExpertParts(part(gate), part(up, 0 if up is not gate else block.n_ff), part(block.down))


class ResidentExperts:
    """All experts on the GPU: each stack lies there as it lies in the file."""

    is_complete = True
    max_deltas = 0
    fetches = None
    may_fetch = False

    def __init__(self, device: Device, model: Model) -> None:
        """Allocates; `load` fills.  Raises: OutOfDeviceMemory, CudaError."""
        self._model = model
        self._offsets: dict[str, int] = {}
        end = 0
        for _, block in model.spec.moe_layers:
            for linear in block.expert_linears:
                self._offsets[linear.weight] = end
                end += slot_bytes(model.weights[linear.weight].n_bytes)
        self.n_bytes = end
        self._buffer = DeviceBuffer(device, max(end, 1), "experts")

    def load(self, moved: Callable[[int], None]) -> Refused:
        """Move everything to the GPU; see `WeightMemory.load`."""
        transfers = [
            transfer_of(self._buffer.address + offset, self._model.weights[name])
            for name, offset in self._offsets.items()
        ]
        return transfer_all(self._buffer.device, transfers, moved)

    def table(self) -> U64:
        table = empty_table(self._model.spec)
        for layer, block in self._model.spec.moe_layers:
            parts = expert_parts(self._model, block)
            experts = np.arange(block.n_expert, dtype=np.uint64)
            for column, part in enumerate((parts.gate, parts.up, parts.down)):
                name, stride, skipped = part
                first = self._buffer.address + self._offsets[name] + skipped
                table[layer, : block.n_expert, column] = first + experts * np.uint64(stride)
        return table

    def show(self, kinds: I8) -> None:
        """The CPU computes none of them: nothing changes."""

    def before_step(self) -> Deltas:
        return NO_DELTAS

    def while_running(self) -> None:
        """There is nothing to move."""

    def after_step(self, choices: I32, *, fetched: bool = False) -> tuple[StepUse, ...]:
        """Nothing depends on what was used."""
        return ()

    def totals(self) -> ExpertTotals | None:
        return None

    def take_spans(self) -> list[Span]:
        return []

    def describe(self) -> dict[str, object]:
        if not self._model.spec.n_expert_max:
            return {}
        return {"experts": "all on the GPU", "expert_bytes": self.n_bytes}

    def close(self) -> None:
        self._buffer.close()


def expert_bytes(model: Model) -> int:
    """What `ResidentExperts` allocates."""
    return sum(
        slot_bytes(model.weights[linear.weight].n_bytes)
        for _, block in model.spec.moe_layers
        for linear in block.expert_linears
    )
