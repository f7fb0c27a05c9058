"""What the planners of a step's parts share: the plan under construction and where things lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ops.arithmetic import activation_layout
from ops.gpu.kernel import format_table
from ops.gpu.mailbox import NO_FORECAST, Forecast, MailboxLaunch
from ops.quants import BlockFormat
from ops.quants.block import ActivationKind
from runtime.cuda.device import DeviceInfo
from runtime.engine.gpu.control import ControlLayout
from runtime.engine.gpu.launch_plan import Constants, LaunchPlan, Room
from runtime.engine.gpu.state_slots import GPUStates
from runtime.engine.gpu.step_shape import StepShape
from runtime.engine.gpu.weights import DeviceWeights
from runtime.errors import EngineBug
from runtime.experts.fetched_experts import Piece
from runtime.models.model import Model


@dataclass(frozen=True)
class StepMemory:
    """Addresses that all graphs share; see `ops.gpu.step_io` for what lies there.

    In the GPU's memory: control, the table of experts, the u32 words epoch and counter, words that
    are 0 between launches (`choice_launches`), and what was chosen (`sampling_launches`). With
    several GPUs the table is a part of one of all layers, from first_row on. Pinned: the ring of
    control blocks, the logits, the flags of outputs, done of this GPU and results_done of the last
    one; for each control block the choices of experts, choices_stride apart, and host_chosen, what
    was chosen. Of graphs with stamps alone: stamps, of stamps_bytes, and host_stamps, for each
    control block.
    """

    control: int = 0
    table: int = 0
    first_row: int = 0
    epoch: int = 0
    counter: int = 0
    words: int = 0
    ring: int = 0
    ring_stride: int = 0
    logits: int = 0
    flags: int = 0
    choices: int = 0
    choices_stride: int = 0
    done: int = 0
    results_done: int = 0
    chosen: int = 0
    host_chosen: int = 0
    stamps: int = 0
    stamps_bytes: int = 0
    host_stamps: int = 0


class Mailboxes(Protocol):
    """What hands missed experts to the CPU team; see `runtime.experts.exchange.Exchange`."""

    def mailbox(
        self, layer: int, n_tokens: int, forecast: Forecast = NO_FORECAST
    ) -> tuple[MailboxLaunch, dict[str, int]]: ...


@dataclass(frozen=True)
class RowSource:
    """Where CPU workers leave rows of tables, for a GPU's kernels: see `ops.gpu.take_rows`.

    words, source, stride  addresses, bytes
    most                   tokens of a step: the rows of a table lie behind so many of those before
    """

    words: int
    source: int
    stride: int
    most: int
    patience_ns: int


class Fetches(Protocol):
    """Room for one piece of the experts after another; see `runtime.experts.fetched_experts`."""

    ahead: int
    pieces: list[Piece]

    def of_layer(self, layer: int) -> list[Piece]: ...

    def buffer(self, piece: Piece) -> int: ...

    def table(self, piece: Piece) -> int: ...

    def arguments(self, piece: Piece, table: int) -> dict[str, int]: ...


@dataclass(frozen=True)
class PlanParts:
    """One plan's parts.

    mailboxes   None: no expert is missed
    rows        None: those of tables are in the control block
    fetches     None: experts are where the table says, or nowhere
    states      of sequences, where the model has any
    overlapped  kernels start while their predecessors run (compute capability 9.0 or newer)
    gpu         the one that performs it
    """

    gpu: DeviceInfo
    model: Model
    weights: DeviceWeights
    memory: StepMemory
    layout: ControlLayout
    shape: StepShape
    plan: LaunchPlan
    room: Room
    constants: Constants
    mailboxes: Mailboxes | None
    rows: RowSource | None
    fetches: Fetches | None
    states: GPUStates | None
    overlapped: bool

    @property
    def n_tokens(self) -> int:
        """Tokens that the step may have."""
        return self.shape.n_tokens

    @property
    def token_count(self) -> int:
        """Address of the number of tokens that it has."""
        return self.memory.control + self.layout.counts

    @property
    def output_count(self) -> int:
        """Address of the number of outputs."""
        return self.memory.control + self.layout.counts + 4

    @property
    def held_states(self) -> GPUStates:
        """The states of a model that has any."""
        if self.states is None:
            raise EngineBug("the model has no states")
        return self.states

    def control(self, field: str) -> int:
        """Address of a field of `ControlLayout`."""
        offset: int = getattr(self.layout, field)
        return self.memory.control + offset

    def format_of(self, weight: str) -> BlockFormat:
        return self.model.weights[weight].format

    def grid_table(self, fmt: BlockFormat) -> int:
        """Address of the format's grid; 0 where it has none."""
        table = format_table(fmt)
        return self.constants.place(table) if table.nbytes else 0


class DeviceRows:
    """Rows that one stage hands to the next, in each stored form that was asked for."""

    def __init__(self, room: Room, name: str, n_rows: int, width: int, phase: str = "") -> None:
        self._room, self._name, self._phase = room, name, phase
        self.n_rows, self.width = n_rows, width
        self._addresses: dict[ActivationKind, int] = {}

    def want(self, kind: ActivationKind) -> int:
        """The address of the rows of this kind, which whoever fills them then writes."""
        if kind not in self._addresses:
            n_bytes = self.n_rows * record_bytes(kind, self.width)
            self._addresses[kind] = self._room.place(f"{self._name} {kind}", n_bytes, self._phase)
        return self._addresses[kind]

    def lies_at(self, kind: ActivationKind, address: int) -> None:
        """The rows of this kind are at `address` already."""
        self._addresses[kind] = address

    def wanted(self, kind: ActivationKind) -> int:
        """The address, or 0 where nobody asked."""
        return self._addresses.get(kind, 0)


def record_bytes(kind: ActivationKind, n: int) -> int:
    """Bytes from one row to the next."""
    return activation_layout(kind, n)[2]


def record_fields(kind: ActivationKind, n: int) -> dict[str, int]:
    """The arguments that say how a record of n values is laid out."""
    scales_offset, sums_offset, n_bytes = activation_layout(kind, n)
    return {
        "scales_offset": scales_offset,
        "sums_offset": sums_offset,
        "record_bytes": n_bytes,
    }
