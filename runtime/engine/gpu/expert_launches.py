"""The products of routed experts as launches: slot by slot, or grouped by expert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ops.gpu import activate as activate_kernel
from ops.gpu.activate import ACTIVATIONS, activate
from ops.gpu.expert import expert_down, expert_gate_up
from ops.gpu.mailbox import Forecast, mailbox
from ops.gpu.router import group, group_shared_bytes
from ops.gpu.row_launch import (
    BLOCK_FORMATS,
    Multiprocessors,
    best_team,
    down_launch,
    expert_launch,
    gate_up_launch,
)
from ops.quants import BlockFormat
from ops.quants.block import ActivationKind
from runtime.engine.gpu.fetch_launches import ExpertPiece, expert_pieces
from runtime.engine.gpu.matrix_launches import GemmSize, add_gemm
from runtime.engine.gpu.plan_parts import DeviceRows, PlanParts, record_fields
from runtime.models.linear import Linear
from runtime.models.spec import Activation, DenseSpec, MoeSpec

ACTIVATION_NUMBERS = {
    Activation.SWIGLU: ACTIVATIONS.index(activate_kernel.SWIGLU),
    Activation.SWIGLU_CLAMPED: ACTIVATIONS.index(activate_kernel.SWIGLU_CLAMPED),
    Activation.SWIGLU_OAI: ACTIVATIONS.index(activate_kernel.SWIGLU_OAI),
}

GROUPED_TOKENS = 8
"""Fewer tokens have their experts slot by slot, whatever the model is."""

SLOT_TOKENS = 8
"""So many, at most, have them so where there are at least as many experts as slots. More have them
grouped, so that each expert's weights are read once.

What slots share comes from the GPU's cache. On an H200 the experts' kernels of 8 tokens took 44 us
a layer instead of 59 (Qwen3-30B-A3B, 64 slots of 128 experts), 53 instead of 64 (OLMoE, 64 of 64).
"""

PHASE = "feed-forward"
"""Of a layer: `Room.place`."""

GATE, DOWN = 0, 2
"""Columns of the table of experts; up follows gate."""

ADDRESS_SPACE = 1 << 64
"""Steps between two addresses are counted modulo this."""


@dataclass(frozen=True)
class Routed:
    """Where a layer's routing lies.  Slot s belongs to token s // n_used.

    layer    the layer's number among those with routed experts
    choices  i32[n_tokens, n_used];  weights f32[n_tokens, n_used]
    experts  u64[n_slots, 4]: the rows of the table of experts
    tables   addresses of the parts of that table of all layers with routed experts
    forecast of the next layer's routing
    """

    layer: int
    choices: int
    weights: int
    experts: int
    shared_weights: int
    tables: Sequence[int]
    forecast: Forecast


@dataclass(frozen=True)
class GateUp:
    """f32 rows, `stride` values apart, at two addresses."""

    gate: int
    up: int
    stride: int


def add_experts(
    parts: PlanParts, layer: int, block: MoeSpec, x: DeviceRows, routed: Routed
) -> Mapping[str, int]:
    """Add the products of the experts that are on the GPU; the norm's arguments for their sum."""
    if by_slot(parts, block):
        return _add_by_slot(parts, f"{layer}.experts", block, x, routed)
    return _add_grouped(parts, f"{layer}.experts", block, x, routed)


def by_slot(parts: PlanParts, block: MoeSpec) -> bool:
    """Whether every token's experts are looked up in `Routed.experts`, not in the table."""
    linears = (block.gate_up[0], block.gate_up[-1], block.down)
    formats = [parts.format_of(linear.weight) for linear in linears]
    n_tokens, n_slots = parts.n_tokens, parts.n_tokens * block.n_used
    few = n_tokens < GROUPED_TOKENS or (n_tokens <= SLOT_TOKENS and n_slots <= block.n_expert)
    return few and parts.fetches is None and are_slot_formats(formats)


def are_slot_formats(formats: Sequence[BlockFormat]) -> bool:
    """Whether experts whose gate, up and down have these formats can be read slot by slot."""
    gate, up, _ = formats
    return gate is up and {fmt.name for fmt in formats} <= set(BLOCK_FORMATS)


def add_activation(
    parts: PlanParts,
    name: str,
    block: DenseSpec | MoeSpec,
    kind: ActivationKind,
    rows: GateUp,
    hidden: DeviceRows,
    per_token: int,
    span: tuple[int, int] | None = None,
) -> None:
    """hidden = activation(gate, up), `per_token` rows a token; or of the rows of a span alone: the
    addresses of the u32 number of its first, and of the first behind it."""
    n = block.n_ff
    parts.plan.add(
        name,
        activate(kind, overlapped=parts.overlapped),
        (-(-n // activate_kernel.BLOCK_VALUES), hidden.n_rows),
        {
            "gate": rows.gate,
            "up": rows.up,
            "gate_stride": rows.stride,
            "up_stride": rows.stride,
            "n": n,
            "count": parts.token_count if span is None else span[1],
            "per_token": per_token if span is None else 1,
            "first": 0 if span is None else span[0],
            "activation": ACTIVATION_NUMBERS[block.activation],
            "limit": block.activation_limit,
            "out": hidden.want(kind),
        },
        overlapped=parts.overlapped,
    )


def _add_by_slot(
    parts: PlanParts, name: str, block: MoeSpec, x: DeviceRows, routed: Routed
) -> Mapping[str, int]:
    """Every slot reads its expert's weights by itself."""
    n, n_slots, n_out = x.width, parts.n_tokens * block.n_used, block.down.n_out
    y = parts.room.place(f"expert out {n_out}", 4 * n_slots * n_out, PHASE)
    _add_mailbox(parts, name, block, x, routed, y, 0)
    gate, up = block.gate_up[0], block.gate_up[-1]
    gate_format, vector = parts.format_of(gate.weight), parts.weights.vector
    launch = gate_up_launch(gate_format, best_team(gate_format, n), overlapped=parts.overlapped)
    launch = expert_launch(launch, gate_format, n, n_slots * block.n_ff, _gpu(parts))
    h = parts.room.place(f"expert h {block.n_ff}", 4 * n_slots * block.n_ff)
    parts.plan.add(
        f"{name}.gate_up",
        expert_gate_up(gate_format, launch),
        launch.grid(block.n_ff, n_slots),
        {
            "records": x.want(gate_format.activation),
            "experts": routed.experts,
            "table": parts.grid_table(gate_format),
            "h": h,
            "choices": routed.choices,
            "gate_scales": vector(gate.scale),
            "gate_biases": vector(gate.bias),
            "up_scales": vector(up.scale),
            "up_biases": vector(up.bias),
            "n": n,
            "n_rows": block.n_ff,
            "n_used": block.n_used,
            "rounds": launch.rounds,
            "activation": ACTIVATION_NUMBERS[block.activation],
            "limit": block.activation_limit,
            **record_fields(gate_format.activation, n),
        },
        shared_bytes=launch.shared_bytes(gate_format, n),
        overlapped=parts.overlapped,
    )
    _add_slot_down(parts, name, block, routed, h, y)
    _join_mailbox(parts)
    return {"expert_out": y}


def _add_slot_down(
    parts: PlanParts, name: str, block: MoeSpec, routed: Routed, h: int, y: int
) -> None:
    """y = down h, slot by slot."""
    n_slots, n_out, vector = parts.n_tokens * block.n_used, block.down.n_out, parts.weights.vector
    fmt = parts.format_of(block.down.weight)
    launch = down_launch(fmt, best_team(fmt, block.n_ff), overlapped=parts.overlapped)
    launch = expert_launch(launch, fmt, block.n_ff, n_slots * -(-n_out // 2), _gpu(parts))
    parts.plan.add(
        f"{name}.down",
        expert_down(fmt, launch),
        launch.grid(-(-n_out // 2), n_slots),
        {
            "h": h,
            "experts": routed.experts,
            "table": parts.grid_table(fmt),
            "y": y,
            "choices": routed.choices,
            "scales": vector(block.down.scale),
            "biases": vector(block.down.bias),
            "n": block.n_ff,
            "n_rows": n_out,
            "rounds": launch.rounds,
            **record_fields(fmt.activation, block.n_ff),
        },
        shared_bytes=launch.shared_bytes(fmt, block.n_ff),
        overlapped=parts.overlapped,
    )


def _gpu(parts: PlanParts) -> Multiprocessors:
    return Multiprocessors(parts.gpu.n_multiprocessors, parts.gpu.block_shared_bytes)


def _add_grouped(
    parts: PlanParts, name: str, block: MoeSpec, x: DeviceRows, routed: Routed
) -> Mapping[str, int]:
    """Slots in the order of their experts, so that tensor cores read each expert's weights once."""
    n_ff, n_out, n_slots = block.n_ff, block.down.n_out, parts.n_tokens * block.n_used
    place = parts.room.place
    slots = place("slots", 4 * n_slots)
    slot_tokens = place("slot tokens", 4 * n_slots)
    offsets = place(f"expert offsets {block.n_expert}", 4 * (block.n_expert + 1))
    parts.plan.add(
        f"{name}.group",
        group(overlapped=parts.overlapped),
        (1,),
        {
            "choices": routed.choices,
            "count": parts.token_count,
            "n_used": block.n_used,
            "n_expert": block.n_expert,
            "offsets": offsets,
            "slots": slots,
            "slot_tokens": slot_tokens,
        },
        shared_bytes=group_shared_bytes(block.n_expert),
        overlapped=parts.overlapped,
    )
    y = place(f"expert out {n_out}", 4 * n_slots * n_out, PHASE)
    _add_mailbox(parts, name, block, x, routed, y, slots)
    step = 4 * n_slots * n_ff
    rows = place(f"expert gate up {n_ff}", 2 * step, PHASE)
    kind = parts.format_of(block.down.weight).activation
    hidden = DeviceRows(parts.room, f"expert hidden {n_ff}", n_slots, n_ff, PHASE)
    gate_up = GateUp(rows, rows + step, n_ff)
    for piece in expert_pieces(parts, routed.layer, block.n_expert, routed.tables):
        span = offsets + 4 * piece.first, offsets + 4 * (piece.first + piece.n)
        sorted_slots = {"rows": slot_tokens, "offsets": span[0], "matrices": piece.matrices}
        _add_gate_up(parts, f"{name}.gate_up", block, x, gate_up, piece, sorted_slots)
        add_activation(
            parts,
            f"{name}.activate",
            block,
            kind,
            gate_up,
            hidden,
            block.n_used,
            None if piece.is_all else span,
        )
        _add_down(parts, f"{name}.down", block, hidden, y, piece, span[0])
    _join_mailbox(parts)
    return {"expert_out": y, "slots": slots}


def _add_gate_up(
    parts: PlanParts,
    name: str,
    block: MoeSpec,
    x: DeviceRows,
    y: GateUp,
    piece: ExpertPiece,
    sorted_slots: Mapping[str, int],
) -> None:
    """Gate and up rows of a piece's experts: one launch where the formats agree."""
    vector, n_slots = parts.weights.vector, parts.n_tokens * block.n_used
    gate, up = block.gate_up[0], block.gate_up[-1]
    formats = [parts.format_of(linear.weight) for linear in (gate, up)]
    together = formats[0] is formats[1]
    for column, (linear, fmt) in enumerate(zip((gate, up), formats, strict=True)):
        n_columns = 2 if together else 1
        if together and column == 1:
            return
        add_gemm(
            parts,
            name,
            GemmSize(fmt, x.width, block.n_ff, n_slots, piece.n, n_columns, block.n_expert),
            {
                **sorted_slots,
                "records": x.want(fmt.activation),
                "column": GATE + column,
                "y": (y.gate, y.up)[column],
                "y_step": y.up - y.gate,
                "y_stride": y.stride,
                **_of_piece(parts, linear, piece),
                "bias_step": (vector(up.bias) - vector(gate.bias)) % ADDRESS_SPACE,
                "factors_step": (vector(up.scale) - vector(gate.scale)) % ADDRESS_SPACE,
            },
        )


def _add_down(
    parts: PlanParts,
    name: str,
    block: MoeSpec,
    hidden: DeviceRows,
    y: int,
    piece: ExpertPiece,
    offsets: int,
) -> None:
    """y = down hidden, of a piece's experts."""
    fmt, n_out = parts.format_of(block.down.weight), block.down.n_out
    sizes = block.n_ff, n_out, hidden.n_rows, piece.n
    add_gemm(
        parts,
        name,
        GemmSize(fmt, *sizes, of_groups=block.n_expert),
        {
            "records": hidden.want(fmt.activation),
            "offsets": offsets,
            "matrices": piece.matrices,
            "column": DOWN,
            "y": y,
            "y_stride": n_out,
            **_of_piece(parts, block.down, piece),
        },
    )


def _of_piece(parts: PlanParts, linear: Linear, piece: ExpertPiece) -> dict[str, int]:
    """Addresses of the biases and factors of a piece's experts; 0: there are none."""
    bias, factors = parts.weights.vector(linear.bias), parts.weights.vector(linear.scale)
    return {
        "bias": bias and bias + 4 * piece.first * linear.n_out,
        "factors": factors and factors + 4 * piece.first,
    }


def _add_mailbox(
    parts: PlanParts,
    name: str,
    block: MoeSpec,
    x: DeviceRows,
    routed: Routed,
    y: int,
    slots: int,
) -> None:
    """Begin a branch that gets the rows of y whose experts are not on the GPU from the CPU."""
    if parts.mailboxes is None:
        return
    launch, arguments = parts.mailboxes.mailbox(routed.layer, parts.n_tokens, routed.forecast)
    with parts.plan.side_branch():
        parts.plan.add(
            f"{name}.mailbox",
            mailbox(launch.block),
            launch.grid,
            {
                "epoch": parts.memory.epoch,
                "counts": parts.token_count,
                "experts": routed.experts,
                "choices": routed.choices,
                "records": x.want(parts.format_of(block.gate_up[0].weight).activation),
                "y": y,
                "slots": slots,
                **arguments,
            },
            shared_bytes=launch.shared_bytes,
        )


def _join_mailbox(parts: PlanParts) -> None:
    """What follows needs every row."""
    if parts.mailboxes is not None:
        parts.plan.join()
