"""The feed-forward blocks of layers as launches: dense blocks, routers and experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ops.exchange import FORECAST_TOKENS
from ops.gpu import router as router_kernel
from ops.gpu.expert import ADDRESSES
from ops.gpu.mailbox import NO_FORECAST, Forecast
from ops.gpu.router import route, route_block
from runtime.engine.gpu.dense_launches import add_dense_down, takes_dense_down
from runtime.engine.gpu.expert_launches import (
    PHASE,
    GateUp,
    Routed,
    add_activation,
    add_experts,
    by_slot,
)
from runtime.engine.gpu.experts import choices_shape, moe_layers
from runtime.engine.gpu.fetch_launches import begin_fetches
from runtime.engine.gpu.matrix_launches import (
    Output,
    Product,
    add_products,
    joined,
    want_inputs,
)
from runtime.engine.gpu.plan_parts import DeviceRows, PlanParts
from runtime.models.linear import Linear
from runtime.models.spec import DenseSpec, FeedForward, MoeSpec, RouterScore

SCORES = {
    RouterScore.SOFTMAX: router_kernel.SOFTMAX,
    RouterScore.SIGMOID: router_kernel.SIGMOID,
    RouterScore.SOFTMAX_SELECTED: router_kernel.SOFTMAX_SELECTED,
}
FLOATS = 4
"""Rows of f32 values begin at multiples of so many: 16-byte loads."""


@dataclass(frozen=True)
class RouterRows:
    """Addresses of a router's f32 rows, `stride` values apart, and of what lies in them.

    gate      the logit of the shared expert's gate; 0: it has none
    forecast  what the next router makes of this layer's input
    """

    logits: int
    stride: int
    gate: int
    forecast: Forecast


class FeedForwardLaunches:
    """Adds the launches of feed-forward blocks to a plan; layers alike share their places."""

    def __init__(self, parts: PlanParts, table_stride: int) -> None:
        """table_stride: bytes of the table of experts from a layer to the next."""
        self._parts = parts
        self._moe_layers = [index for index, _ in moe_layers(parts.model.spec)]
        self._tables = [parts.memory.table + layer * table_stride for layer in self._moe_layers]

    def begin(self) -> None:
        """Have the first experts on their way, behind the table's changes."""
        begin_fetches(self._parts, self._tables)

    def prepare(self, block: FeedForward, x: DeviceRows) -> None:
        """Ask x, the normalised rows, for the forms that the first products need."""
        want_inputs(self._parts, block.input_linears, x)

    def add(self, layer: int, block: FeedForward, x: DeviceRows) -> Mapping[str, int]:
        """Add the block; what the next norm adds to the residual stream, see `add_norm`."""
        if isinstance(block, DenseSpec):
            return {"delta": self._dense(f"{layer}.dense", block, x)}
        return self._moe(layer, block, x)

    def _dense(self, name: str, block: DenseSpec, x: DeviceRows) -> int:
        """Address of f32[n_tokens, n_embd]."""
        parts, n_ff = self._parts, block.n_ff
        rows = self._gate_up(name, block, x)
        if takes_dense_down(parts, block):
            return self._dense_down(name, block, rows)
        kind = parts.format_of(block.down.weight).activation
        hidden = DeviceRows(parts.room, f"hidden {n_ff}", parts.n_tokens, n_ff, PHASE)
        add_activation(parts, f"{name}.activate", block, kind, rows, hidden, 1)
        products, n_out = (Product(block.down),), block.down.n_out
        out = Output(self._dense_out(n_out), n_out)
        add_products(
            parts, f"{name}.down", products, hidden, out, parts.token_count, parts.n_tokens
        )
        return out.address

    def _gate_up(self, name: str, block: DenseSpec, x: DeviceRows, *, late: bool = False) -> GateUp:
        """The products gate and up; late: see `add_products`."""
        parts, n_ff = self._parts, block.n_ff
        stride = -(-2 * n_ff // FLOATS) * FLOATS
        at = parts.room.place(f"gate up {stride}", 4 * parts.n_tokens * stride, PHASE)
        out, n = Output(at, stride), parts.n_tokens
        products = joined(block.gate_up)
        add_products(parts, f"{name}.gate_up", products, x, out, parts.token_count, n, late=late)
        return GateUp(at, at + 4 * n_ff, stride)

    def _dense_down(self, name: str, block: DenseSpec, rows: GateUp, *, late: bool = False) -> int:
        """The rest of a block by one launch; late: see `add_dense_down`."""
        result = self._dense_out(block.down.n_out)
        add_dense_down(self._parts, f"{name}.down", block, rows, result, late=late)
        return result

    def _dense_out(self, n_out: int) -> int:
        return self._parts.room.place(f"dense out {n_out}", 4 * self._parts.n_tokens * n_out)

    def _moe(self, layer: int, block: MoeSpec, x: DeviceRows) -> Mapping[str, int]:
        parts, shared, name = self._parts, block.shared, f"{layer}.shared"
        logits = self._router(layer, block, x)
        pending: dict[str, int] = {}
        # Of few tokens the shared expert's launches run beside the router's, which do not fill a
        # GPU: each needs what the launch before its predecessor made.
        beside = shared is not None and takes_dense_down(parts, shared.dense)
        if shared is not None and beside:
            rows = self._gate_up(name, shared.dense, x, late=True)
        routed = self._route(layer, block, logits)
        if shared is not None and beside:
            pending["shared"] = self._dense_down(name, shared.dense, rows, late=True)
        pending |= {"weights": routed.weights, "n_used": block.n_used}
        pending |= add_experts(parts, layer, block, x, routed)
        if shared is not None and not beside:
            pending["shared"] = self._dense(name, shared.dense, x)
        if shared is not None and shared.gate is not None:
            pending["shared_weights"] = routed.shared_weights
        return pending

    def _router(self, layer: int, block: MoeSpec, x: DeviceRows) -> RouterRows:
        """The router's product, and those with the shared expert's gate and the router ahead."""
        parts, n, router = self._parts, self._parts.n_tokens, block.router
        gate = block.shared.gate if block.shared is not None else None
        gate_at = -(-block.n_expert // FLOATS) * FLOATS
        ahead_at = gate_at + (0 if gate is None else FLOATS)
        ahead = self._router_ahead(self._moe_layers.index(layer), router.linear)
        n_ahead = 0 if ahead is None else -(-ahead.n_out // FLOATS) * FLOATS
        stride = ahead_at + n_ahead
        logits = parts.room.place(f"router logits {stride}", 4 * n * stride)
        products = [Product(router.linear)] + ([] if gate is None else [Product(gate, gate_at)])
        products += [] if ahead is None else [Product(ahead, ahead_at)]
        out = Output(logits, stride)
        add_products(parts, f"{layer}.router", products, x, out, parts.token_count, n)
        return RouterRows(
            logits,
            stride,
            gate=0 if gate is None else logits + 4 * gate_at,
            forecast=NO_FORECAST
            if ahead is None
            else Forecast(logits + 4 * ahead_at, 4 * stride, 4 * ((n - 1) * stride + n_ahead)),
        )

    def _route(self, layer: int, block: MoeSpec, rows: RouterRows) -> Routed:
        """The router's choice."""
        parts, router = self._parts, block.router
        n, n_slots = parts.n_tokens, parts.n_tokens * block.n_used
        number = self._moe_layers.index(layer)
        routed = Routed(
            layer=number,
            choices=choices_place(parts) + 4 * number * n * choices_shape(parts.model.spec, n)[2],
            weights=parts.room.place("expert weights", 4 * n_slots),
            experts=parts.room.place("experts", 8 * ADDRESSES * n_slots),
            shared_weights=parts.room.place("shared weights", 4 * n),
            tables=self._tables,
            forecast=rows.forecast,
        )
        parts.plan.add(
            f"{layer}.route",
            route(route_block(block.n_expert), overlapped=parts.overlapped),
            (n,),
            {
                "logits": rows.logits,
                "logits_stride": rows.stride,
                "count": parts.token_count,
                "bias": parts.weights.vector(router.selection_bias),
                "n_expert": block.n_expert,
                "n_used": block.n_used,
                "score": SCORES[router.score],
                "n_groups": router.n_groups,
                "n_groups_used": router.n_groups_used,
                "renormalise": router.renormalise,
                "scale": router.scale,
                "table": self._tables[number],
                "in_place": int(by_slot(parts, block)),
                "shared_logits": rows.gate,
                "shared_stride": rows.stride,
                "choices": routed.choices,
                "weights": routed.weights,
                "experts": routed.experts,
                "shared_weights": routed.shared_weights,
            },
            overlapped=parts.overlapped,
        )
        return routed

    def _router_ahead(self, number: int, router: Linear) -> Linear | None:
        """The next MoE layer's router, if the CPU is to know what it makes of this layer's input;
        it must be alike, so that both are one launch."""
        parts, behind = self._parts, self._moe_layers[number + 1 :]
        if parts.mailboxes is None or parts.n_tokens > FORECAST_TOKENS or not behind:
            return None
        block = parts.model.spec.layers[behind[0]].feed_forward
        if not isinstance(block, MoeSpec):
            return None
        ahead = block.router.linear
        formats = {parts.format_of(linear.weight).name for linear in (router, ahead)}
        return ahead if len(formats) == 1 and ahead.n_in == router.n_in else None


def choices_place(parts: PlanParts) -> int:
    """Address of the choices of all layers, see `choices_shape`; the bytes are a multiple of 16."""
    return parts.room.place("choices", choices_bytes(parts))


def choices_bytes(parts: PlanParts) -> int:
    """Bytes of them."""
    n_layers, n_tokens, n_used = choices_shape(parts.model.spec, parts.n_tokens)
    return -(-4 * n_layers * n_tokens * n_used // 16) * 16
