"""The feed-forward blocks of layers as launches: dense blocks, routers and experts."""

from __future__ import annotations

from collections.abc import Mapping

from runtime.engine.gpu.choice_launches import (
    RouterLayer,
    add_choice,
    add_route,
    add_router,
    chooses_with_norm,
    router_ahead,
    shared_beside,
)
from runtime.engine.gpu.dense_launches import add_dense_down, takes_dense_down
from runtime.engine.gpu.expert_launches import PHASE, GateUp, add_activation, add_experts
from runtime.engine.gpu.fetch_launches import begin_fetches
from runtime.engine.gpu.matrix_launches import (
    Output,
    Product,
    add_products,
    joined,
    want_inputs,
)
from runtime.engine.gpu.plan_parts import DeviceRows, PlanParts
from runtime.engine.gpu.row_launches import NormEntry
from runtime.models.spec import DenseSpec, FeedForward, MoeSpec

FLOATS = 4
"""Rows of f32 values begin at multiples of so many: 16-byte loads."""


class FeedForwardLaunches:
    """Adds the launches of feed-forward blocks to a plan; layers alike share their places."""

    def __init__(self, parts: PlanParts, table_stride: int) -> None:
        """table_stride: bytes of the table of experts from a layer to the next."""
        self._parts = parts
        self._moe_layers = [index for index, _ in parts.model.spec.moe_layers]
        self._tables = [parts.memory.table + layer * table_stride for layer in self._moe_layers]

    def begin(self) -> None:
        """Have the first experts on their way, behind the table's changes."""
        begin_fetches(self._parts, self._tables)

    def prepare(self, block: FeedForward, x: DeviceRows) -> None:
        """Ask x, the normalised rows, for the forms that the first products need."""
        want_inputs(self._parts, block.input_linears, x)

    def takes_norm(self, block: FeedForward) -> bool:
        """Whether the block's first launch can norm the residual itself."""
        return chooses_with_norm(self._parts, block)

    def add(
        self, layer: int, block: FeedForward, x: DeviceRows, entry: NormEntry | None = None
    ) -> Mapping[str, int]:
        """Add the block; what the next norm adds to the residual stream, see `add_norm`.

        entry: the norm that fills x is still to be done, see `takes_norm`
        """
        if isinstance(block, DenseSpec):
            return {"delta": self._dense(f"{layer}.dense", block, x)}
        return self._moe(layer, block, x, entry)

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

    def _gate_up(self, name: str, block: DenseSpec, x: DeviceRows) -> GateUp:
        """The products gate and up."""
        parts, n_ff = self._parts, block.n_ff
        stride = -(-2 * n_ff // FLOATS) * FLOATS
        at = parts.room.place(f"gate up {stride}", 4 * parts.n_tokens * stride, PHASE)
        out, n = Output(at, stride), parts.n_tokens
        products = joined(block.gate_up)
        add_products(parts, f"{name}.gate_up", products, x, out, parts.token_count, n)
        return GateUp(at, at + 4 * n_ff, stride)

    def _dense_down(self, name: str, block: DenseSpec, rows: GateUp) -> int:
        """The rest of a block by one launch."""
        result = self._dense_out(block.down.n_out)
        add_dense_down(self._parts, f"{name}.down", block, rows, result)
        return result

    def _dense_out(self, n_out: int) -> int:
        return self._parts.room.place(f"dense out {n_out}", 4 * self._parts.n_tokens * n_out)

    def _moe(
        self, layer: int, block: MoeSpec, x: DeviceRows, entry: NormEntry | None
    ) -> Mapping[str, int]:
        parts, shared = self._parts, block.shared
        number = self._moe_layers.index(layer)
        ahead = router_ahead(parts, self._moe_layers, number, block.router.linear)
        router = RouterLayer(layer, number, block, self._tables, ahead)
        beside = shared is not None and shared_beside(parts, block)
        name = f"{layer}.router.shared" if beside else f"{layer}.shared"
        pending: dict[str, int] = {}
        if entry is not None:
            routed = add_choice(parts, router, x, entry)
        else:
            if shared is not None and beside:
                rows = self._gate_up(name, shared.dense, x)
            add_router(parts, router, x, late=beside)
            if shared is not None and beside:
                pending["shared"] = self._dense_down(name, shared.dense, rows)
            routed = add_route(parts, router, late=beside)
        pending |= {"weights": routed.weights, "n_used": block.n_used}
        pending |= add_experts(parts, layer, block, x, routed)
        if shared is not None and not beside:
            pending["shared"] = self._dense(name, shared.dense, x)
        if shared is not None and shared.gate is not None:
            pending["shared_weights"] = routed.shared_weights
        return pending
