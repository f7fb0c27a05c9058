"""Which experts tokens use, as launches: router and choice; of few tokens the norm with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ops.exchange import FORECAST_TOKENS
from ops.gpu import router as router_kernel
from ops.gpu.choose_experts import (
    FIXED_SHARED_BYTES,
    MAX_N,
    MAX_TOKENS,
    UNIT,
    choice_launch,
    choose_experts,
)
from ops.gpu.expert import ADDRESSES
from ops.gpu.mailbox import NO_FORECAST, Forecast
from ops.gpu.router import MAX_EXPERTS, route, route_block
from ops.gpu.row_launch import is_float
from runtime.engine.gpu.dense_launches import takes_dense_down
from runtime.engine.gpu.expert_launches import Routed, by_slot
from runtime.engine.gpu.experts import choices_shape
from runtime.engine.gpu.matrix_launches import Output, Product, add_products
from runtime.engine.gpu.plan_parts import DeviceRows, PlanParts
from runtime.engine.gpu.row_launches import NormEntry
from runtime.models.linear import Linear
from runtime.models.spec import FeedForward, MoeSpec, RouterScore

SCORES = {
    RouterScore.SOFTMAX: router_kernel.SOFTMAX,
    RouterScore.SIGMOID: router_kernel.SIGMOID,
    RouterScore.SOFTMAX_SELECTED: router_kernel.SOFTMAX_SELECTED,
}
FLOATS = 4
"""Rows of f32 values begin at multiples of so many: 16-byte loads."""

WORDS_BYTES = 4 * MAX_TOKENS * (2 * MAX_EXPERTS + FLOATS)
"""Of `StepMemory.words`: a router's logits of so many tokens, its gate and a router ahead."""


@dataclass(frozen=True)
class RouterLayer:
    """A layer with routed experts.

    index   among all layers
    number  among those with routed experts
    tables  addresses of the parts of the table of experts of all of those
    ahead   the next one's router, if the CPU is to know what it makes of this layer's input
    """

    index: int
    number: int
    block: MoeSpec
    tables: Sequence[int]
    ahead: Linear | None


@dataclass(frozen=True)
class RouterRows:
    """A router's f32 rows: the logits, the shared expert's gate, and a router ahead, side by side.

    products  matrices and their first columns
    gate      column of the shared expert's gate; 0: it has none
    ahead     column of what the next router makes of this layer's input; n_ahead: how many
    """

    products: Sequence[Product]
    stride: int
    gate: int
    ahead: int
    n_ahead: int


def shared_beside(parts: PlanParts, block: MoeSpec) -> bool:
    """Whether the router's launches run beside the shared expert's.

    Of few tokens, neither fills a GPU: each needs what the launch before its predecessor made.
    Weights of the shared expert, which are more, are under way before; the router's are not.
    """
    return block.shared is not None and takes_dense_down(parts, block.shared.dense)


def chooses_with_norm(parts: PlanParts, block: FeedForward) -> bool:
    """Whether one launch has the norm, the router and the choice: of few tokens, on GPUs where the
    blocks that wait are few among all; nothing runs beside the router then."""
    if not isinstance(block, MoeSpec) or shared_beside(parts, block):
        return False
    linear, shared = block.router.linear, block.shared
    fmt, n = parts.format_of(linear.weight), linear.n_in
    if n % UNIT or n > MAX_N or not is_float(fmt):
        return False
    gates = [] if shared is None or shared.gate is None else [shared.gate]
    if any(parts.format_of(gate.weight).name != fmt.name or gate.bias for gate in gates):
        return False
    if any(matrix.scale is not None for matrix in (linear, *gates)):
        return False
    launch = choice_launch(n, block.n_expert)
    shared_bytes = FIXED_SHARED_BYTES + launch.shared_bytes(fmt, n, block.n_expert)
    fits = shared_bytes <= parts.gpu.block_shared_bytes
    return fits and parts.n_tokens <= MAX_TOKENS < parts.gpu.n_multiprocessors


def router_ahead(
    parts: PlanParts, moe_layers: Sequence[int], number: int, router: Linear
) -> Linear | None:
    """The next MoE layer's router, if the CPU is to know what it makes of this layer's input; it
    must be alike, so that both are one launch."""
    behind = moe_layers[number + 1 :]
    if parts.mailboxes is None or parts.n_tokens > FORECAST_TOKENS or not behind:
        return None
    block = parts.model.spec.layers[behind[0]].feed_forward
    if not isinstance(block, MoeSpec):
        return None
    ahead = block.router.linear
    formats = {parts.format_of(linear.weight).name for linear in (router, ahead)}
    is_alike = len(formats) == 1 and ahead.n_in == router.n_in and ahead.scale is None
    return ahead if is_alike else None


def add_router(parts: PlanParts, layer: RouterLayer, x: DeviceRows, *, late: bool = False) -> None:
    """The router's product, and those with the shared expert's gate and the router ahead; late: see
    `add_products`."""
    rows, name = _rows(layer), f"{layer.index}.router"
    out, n = Output(_logits(parts, rows), rows.stride), parts.n_tokens
    add_products(parts, name, rows.products, x, out, parts.token_count, n, late=late)


def add_route(parts: PlanParts, layer: RouterLayer, *, late: bool = False) -> Routed:
    """The choice, of what `add_router` has made; late: the launch before this one has nothing to do
    with it, so that it may run beside that."""
    rows = _rows(layer)
    routed, logits = _routed(parts, layer, rows), _logits(parts, rows)
    parts.plan.add(
        f"{layer.index}.route",
        route(route_block(layer.block.n_expert), overlapped=parts.overlapped),
        (parts.n_tokens,),
        {
            **_choice(parts, layer, routed),
            "logits": logits,
            "logits_stride": rows.stride,
            "shared_logits": logits + 4 * rows.gate if rows.gate else 0,
            "shared_stride": rows.stride,
            "late": late,
        },
        overlapped=parts.overlapped,
    )
    return routed


def add_choice(parts: PlanParts, layer: RouterLayer, x: DeviceRows, entry: NormEntry) -> Routed:
    """x, the norm of the residual, and the choice: see `chooses_with_norm`."""
    rows, linear = _rows(layer), layer.block.router.linear
    routed, fmt = _routed(parts, layer, rows), parts.format_of(linear.weight)
    launch = choice_launch(linear.n_in, layer.block.n_expert, overlapped=parts.overlapped)
    shared, ahead, weights = layer.block.shared, layer.ahead, parts.weights
    gate = None if shared is None else shared.gate
    parts.plan.add(
        f"{layer.index}.route",
        choose_experts(fmt, launch),
        launch.grid([product.linear.n_out for product in rows.products], parts.n_tokens),
        {
            **_choice(parts, layer, routed),
            "x": entry.x,
            "x_to": entry.x_to,
            "n": linear.n_in,
            "delta": entry.delta,
            "weight": parts.weights.vector(entry.norm),
            "out_f32": x.wanted("f32"),
            "q8_256": x.wanted("q8_256"),
            "q8_32": x.wanted("q8_32"),
            "eps": parts.model.spec.eps,
            "router": weights.matrix(linear.weight),
            "router_bias": weights.vector(linear.bias),
            "router_blocks": launch.blocks(linear.n_out),
            "gate": 0 if gate is None else weights.matrix(gate.weight),
            "ahead": 0 if ahead is None else weights.matrix(ahead.weight),
            "ahead_bias": 0 if ahead is None else weights.vector(ahead.bias),
            "n_ahead": 0 if ahead is None else ahead.n_out,
            "pairs": launch.pairs,
            "y": _logits(parts, rows),
            "y_stride": rows.stride,
            "words": parts.memory.words,
            "n_polled": rows.ahead,
            "gate_column": rows.gate,
            "rehearse": int(parts.overlapped),
        },
        shared_bytes=launch.shared_bytes(fmt, linear.n_in, layer.block.n_expert),
        overlapped=parts.overlapped,
    )
    return routed


def _rows(layer: RouterLayer) -> RouterRows:
    block, ahead = layer.block, layer.ahead
    gate = block.shared.gate if block.shared is not None else None
    gate_at = -(-block.n_expert // FLOATS) * FLOATS
    ahead_at = gate_at + (0 if gate is None else FLOATS)
    n_ahead = 0 if ahead is None else -(-ahead.n_out // FLOATS) * FLOATS
    products = [Product(block.router.linear)]
    products += [] if gate is None else [Product(gate, gate_at)]
    products += [] if ahead is None else [Product(ahead, ahead_at)]
    return RouterRows(
        products, ahead_at + n_ahead, 0 if gate is None else gate_at, ahead_at, n_ahead
    )


def _logits(parts: PlanParts, rows: RouterRows) -> int:
    """Address of the rows."""
    return parts.room.place(f"router logits {rows.stride}", 4 * parts.n_tokens * rows.stride)


def _routed(parts: PlanParts, layer: RouterLayer, rows: RouterRows) -> Routed:
    """Where the choice goes."""
    n, n_used, forecast = parts.n_tokens, layer.block.n_used, NO_FORECAST
    if rows.n_ahead:
        n_bytes = 4 * ((n - 1) * rows.stride + rows.n_ahead)
        forecast = Forecast(_logits(parts, rows) + 4 * rows.ahead, 4 * rows.stride, n_bytes)
    step = 4 * n * choices_shape(parts.model.spec, n)[2]
    return Routed(
        layer=layer.number,
        choices=choices_place(parts) + step * layer.number,
        weights=parts.room.place("expert weights", 4 * n * n_used),
        experts=parts.room.place("experts", 8 * ADDRESSES * n * n_used),
        shared_weights=parts.room.place("shared weights", 4 * n),
        tables=layer.tables,
        forecast=forecast,
    )


def _choice(parts: PlanParts, layer: RouterLayer, routed: Routed) -> Mapping[str, float]:
    """The arguments that `route` and `choose_experts` have in common."""
    block, router = layer.block, layer.block.router
    return {
        "count": parts.token_count,
        "bias": parts.weights.vector(router.selection_bias),
        "n_expert": block.n_expert,
        "n_used": block.n_used,
        "score": SCORES[router.score],
        "n_groups": router.n_groups,
        "n_groups_used": router.n_groups_used,
        "renormalise": router.renormalise,
        "scale": router.scale,
        "table": layer.tables[layer.number],
        "in_place": int(by_slot(parts, block)),
        "choices": routed.choices,
        "weights": routed.weights,
        "experts": routed.experts,
        "shared_weights": routed.shared_weights,
    }


def choices_place(parts: PlanParts) -> int:
    """Address of the choices of all layers, see `choices_shape`; the bytes are a multiple of 16."""
    return parts.room.place("choices", choices_bytes(parts))


def choices_bytes(parts: PlanParts) -> int:
    """Bytes of them."""
    n_layers, n_tokens, n_used = choices_shape(parts.model.spec, parts.n_tokens)
    return -(-4 * n_layers * n_tokens * n_used // 16) * 16
