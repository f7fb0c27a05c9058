"""The feed-forward blocks of layers as launches: dense blocks, routers and experts."""

from __future__ import annotations

from collections.abc import Mapping

from ops.exchange import FORECAST_TOKENS
from ops.gpu import router as router_kernel
from ops.gpu.expert import ADDRESSES
from ops.gpu.mailbox import NO_FORECAST, Forecast
from ops.gpu.router import route
from runtime.engine.gpu.expert_launches import (
    GateUp,
    Routed,
    add_activation,
    add_experts,
    by_slot,
    fetch_layer,
)
from runtime.engine.gpu.experts import choices_shape, moe_layers
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


class FeedForwardLaunches:
    """Adds the launches of feed-forward blocks to a plan; layers alike share their places."""

    def __init__(self, parts: PlanParts, table_stride: int) -> None:
        """table_stride: bytes of the table of experts from a layer to the next."""
        self._parts, self._table_stride = parts, table_stride
        self._moe_layers = [index for index, _ in moe_layers(parts.model.spec)]

    def begin(self) -> None:
        """Have the first layer's experts on their way, behind the table's changes."""
        if self._parts.fetches is not None and self._moe_layers:
            fetch_layer(self._parts, 0, self._layer_table(self._moe_layers[0]))

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
        stride = -(-2 * n_ff // FLOATS) * FLOATS
        gate_up = parts.room.place(f"gate up {stride}", 4 * parts.n_tokens * stride)
        out = Output(gate_up, stride)
        products = joined(block.gate_up)
        add_products(parts, f"{name}.gate_up", products, x, out, parts.token_count, parts.n_tokens)
        kind = parts.format_of(block.down.weight).activation
        hidden = DeviceRows(parts.room, f"hidden {n_ff}", parts.n_tokens, n_ff)
        rows = GateUp(gate_up, gate_up + 4 * n_ff, stride)
        add_activation(parts, f"{name}.activate", block, kind, rows, hidden, 1)
        n_out = block.down.n_out
        result = parts.room.place(f"dense out {n_out}", 4 * parts.n_tokens * n_out)
        add_products(
            parts,
            f"{name}.down",
            [Product(block.down)],
            hidden,
            Output(result, n_out),
            parts.token_count,
            parts.n_tokens,
        )
        return result

    def _moe(self, layer: int, block: MoeSpec, x: DeviceRows) -> Mapping[str, int]:
        parts = self._parts
        routed = self._route(layer, block, x)
        pending = {"weights": routed.weights, "n_used": block.n_used}
        pending |= add_experts(parts, layer, block, x, routed)
        if block.shared is not None:
            pending["shared"] = self._dense(f"{layer}.shared", block.shared.dense, x)
            if block.shared.gate is not None:
                pending["shared_weights"] = routed.shared_weights
        return pending

    def _route(self, layer: int, block: MoeSpec, x: DeviceRows) -> Routed:
        """The router's product and choice, the shared expert's gate with it."""
        parts, router = self._parts, block.router
        n, n_slots = parts.n_tokens, parts.n_tokens * block.n_used
        gate = block.shared.gate if block.shared is not None else None
        number = self._moe_layers.index(layer)
        gate_at = -(-block.n_expert // FLOATS) * FLOATS
        ahead_at = gate_at + (0 if gate is None else FLOATS)
        ahead = self._router_ahead(number, router.linear)
        n_ahead = 0 if ahead is None else -(-ahead.n_out // FLOATS) * FLOATS
        stride = ahead_at + n_ahead
        logits = parts.room.place(f"router logits {stride}", 4 * n * stride)
        products = [Product(router.linear)] + ([] if gate is None else [Product(gate, gate_at)])
        products += [] if ahead is None else [Product(ahead, ahead_at)]
        out = Output(logits, stride)
        add_products(parts, f"{layer}.router", products, x, out, parts.token_count, n)
        forecast_bytes = 4 * ((n - 1) * stride + n_ahead)
        routed = Routed(
            layer=number,
            choices=choices_place(parts) + 4 * number * n * choices_shape(parts.model.spec, n)[2],
            weights=parts.room.place("expert weights", 4 * n_slots),
            experts=parts.room.place("experts", 8 * ADDRESSES * n_slots),
            shared_weights=parts.room.place("shared weights", 4 * n),
            table=self._layer_table(layer),
            next_table=self._next_table(number),
            forecast=NO_FORECAST
            if ahead is None
            else Forecast(logits + 4 * ahead_at, 4 * stride, forecast_bytes),
        )
        parts.plan.add(
            f"{layer}.route",
            route(overlapped=parts.overlapped),
            (n,),
            {
                "logits": logits,
                "logits_stride": stride,
                "count": parts.token_count,
                "bias": parts.weights.vector(router.selection_bias),
                "n_expert": block.n_expert,
                "n_used": block.n_used,
                "score": SCORES[router.score],
                "n_groups": router.n_groups,
                "n_groups_used": router.n_groups_used,
                "renormalise": router.renormalise,
                "scale": router.scale,
                "table": routed.table,
                "in_place": int(by_slot(parts, block)),
                "shared_logits": 0 if gate is None else logits + 4 * gate_at,
                "shared_stride": stride,
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

    def _layer_table(self, layer: int) -> int:
        """Address of a layer's part of the table of experts."""
        return self._parts.memory.table + layer * self._table_stride

    def _next_table(self, number: int) -> int:
        """That of the next layer with routed experts; 0 where there is none."""
        behind = self._moe_layers[number + 1 :]
        return self._layer_table(behind[0]) if behind else 0


def choices_place(parts: PlanParts) -> int:
    """Address of the choices of all layers, see `choices_shape`; the bytes are a multiple of 16."""
    return parts.room.place("choices", choices_bytes(parts))


def choices_bytes(parts: PlanParts) -> int:
    """Bytes of them."""
    n_layers, n_tokens, n_used = choices_shape(parts.model.spec, parts.n_tokens)
    return -(-4 * n_layers * n_tokens * n_used // 16) * 16
