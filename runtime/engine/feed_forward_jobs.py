"""FeedForwardJobs: router, experts and dense blocks of a layer as jobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ops.arithmetic import activation_layout
from ops.cpu import experts as experts_job
from ops.cpu import router as router_job
from ops.cpu.experts import (
    FEED_FORWARD,
    FEED_FORWARD_SCRATCH_BYTES,
    FEED_FORWARDS,
    GATE_UP_ROWS,
    down,
    gate_up,
)
from ops.cpu.job import record
from ops.cpu.matmul import SCRATCH_BYTES
from ops.cpu.program import Program, address_of, aligned
from ops.cpu.router import GROUP, ROUTE, group, route
from ops.quants.block import ACTIVATION_GROUP
from runtime.engine.activation_rows import ActivationRows, Rows
from runtime.engine.matrix_jobs import MatrixJobs, rows_per_chunk
from runtime.engine.routing_buffers import RoutingBuffers
from runtime.engine.step_chunks import StepRows
from runtime.models.model import Model
from runtime.models.spec import (
    Activation,
    DenseSpec,
    FeedForward,
    MoeSpec,
    RouterScore,
)

SCORES = {
    RouterScore.SOFTMAX: router_job.SOFTMAX,
    RouterScore.SIGMOID: router_job.SIGMOID,
    RouterScore.SOFTMAX_SELECTED: router_job.SOFTMAX_SELECTED,
}
ACTIVATIONS = {
    Activation.SWIGLU: experts_job.SWIGLU,
    Activation.SWIGLU_CLAMPED: experts_job.SWIGLU_CLAMPED,
    Activation.SWIGLU_OAI: experts_job.SWIGLU_OAI,
}


@dataclass(frozen=True)
class Prepared:
    """A feed-forward block whose input kinds are settled: x, the normalised rows."""

    spec: FeedForward
    x: ActivationRows


class FeedForwardJobs:
    """Adds the feed-forward jobs of layers; layers alike share their buffers."""

    def __init__(
        self,
        program: Program,
        model: Model,
        n_workers: int,
        n_tokens: int,
    ) -> None:
        self._program, self._model = program, model
        self._n_workers, self._n_tokens = n_workers, n_tokens
        n_bytes = FEED_FORWARD_SCRATCH_BYTES + SCRATCH_BYTES
        self._scratch = aligned((n_workers, n_bytes), np.uint8)
        self._shared: dict[tuple[str, int, int], Any] = {}
        self.routing = RoutingBuffers()
        program.keep += [self._scratch, self._shared, self.routing]

    def prepare(self, spec: FeedForward, x: ActivationRows) -> Prepared:
        """Ask `x` for the forms that the block's first products need."""
        for linear in spec.input_linears:
            x.want(self._model.weights[linear.weight].format.activation)
        return Prepared(spec, x)

    def add(
        self, name: str, prepared: Prepared, matrices: MatrixJobs, rows: StepRows
    ) -> dict[str, int]:
        """Add the block's jobs; the fields of the next norm that add its result to the stream."""
        spec, x = prepared.spec, prepared.x
        if isinstance(spec, DenseSpec):
            record_, out, counts = self._feed_forward(spec, x, matrices, "dense", self._n_tokens)
            self._jobs(name, record_, counts, None, rows)
            return {"delta": out.address, "delta_stride": out.stride}
        return self._moe(name, spec, x, matrices, rows)

    def _moe(
        self, name: str, spec: MoeSpec, x: ActivationRows, matrices: MatrixJobs, rows: StepRows
    ) -> dict[str, int]:
        n, k = self._n_tokens, spec.n_used
        routing = self._room("routing", n * k, spec.n_expert, _Routing)
        choices = address_of(self.routing.add(n, k, rows))
        self._route(name, spec, x, matrices, routing, choices, rows)
        experts, out, (gate_up_chunks, down_chunks) = self._feed_forward(
            spec, x, matrices, "experts", n * k
        )
        experts["active"] = address_of(routing.active)
        experts["offsets"] = address_of(routing.offsets)
        experts["slot_tokens"] = address_of(routing.slot_tokens)
        moe_sum = self._room("sum", n, 4 * spec.down.n_out, Rows)
        fields = {
            "expert_out": out.address,
            "expert_stride": out.stride,
            "slots": address_of(routing.slots),
            "weights": address_of(routing.weights),
            "n_used": k,
            "moe_sum": moe_sum.address,
            "moe_sum_stride": moe_sum.stride,
        }
        dense, dense_chunks = None, (0, 0)
        if spec.shared is not None:
            dense, shared_out, dense_chunks = self._feed_forward(
                spec.shared.dense, x, matrices, "shared", n
            )
            fields |= {"shared": shared_out.address, "shared_stride": shared_out.stride}
            if spec.shared.gate is not None:
                fields["shared_weights"] = address_of(routing.shared_weights)
        grouping = record(
            GROUP,
            choices=choices,
            n_tokens=address_of(rows.n_rows),
            n_used=k,
            n_expert=spec.n_expert,
            counts=address_of(routing.counts),
            active=address_of(routing.active),
            offsets=address_of(routing.offsets),
            slots=address_of(routing.slots),
            slot_tokens=address_of(routing.slot_tokens),
            gate_up_shared=dense_chunks[0],
            gate_up_per_expert=gate_up_chunks,
            down_shared=dense_chunks[1],
            down_per_expert=down_chunks,
        )
        self._program.add(f"{name}group", group.address, grouping)
        jobs = self._jobs(name, dense, dense_chunks, experts, rows)
        grouping["gate_up_chunks"] = self._program.n_chunks_address(jobs[0])
        grouping["down_chunks"] = self._program.n_chunks_address(jobs[1])
        return fields

    def _route(
        self,
        name: str,
        spec: MoeSpec,
        x: ActivationRows,
        matrices: MatrixJobs,
        routing: _Routing,
        choices: int,
        rows: StepRows,
    ) -> None:
        """The router's product and choice, the shared expert's gate with it."""
        n = self._n_tokens
        logits = self._room("logits", n, 4 * spec.n_expert, Rows)
        parts = [matrices.part(spec.router.linear, x, logits)]
        gate = spec.shared.gate if spec.shared is not None else None
        if gate is not None:
            parts.append(matrices.part(gate, x, routing.shared_logits))
        matrices.products(f"{name}router", parts, rows)
        scratch = self._room("route", self._n_workers, 12 * spec.n_expert, Rows)
        router = spec.router
        args = record(
            ROUTE,
            logits=logits.address,
            logits_stride=logits.stride,
            n_expert=spec.n_expert,
            n_used=spec.n_used,
            score=SCORES[router.score],
            bias=matrices.vector(router.selection_bias),
            n_groups=router.n_groups,
            n_groups_used=router.n_groups_used,
            renormalise=router.renormalise,
            choices=choices,
            weights=address_of(routing.weights),
            shared_logits=0 if gate is None else routing.shared_logits.address,
            shared_weights=address_of(routing.shared_weights),
            scratch=scratch.address,
            scratch_bytes=scratch.stride,
            scale=router.scale,
        )
        rows.per_row.append(self._program.add(f"{name}route", route.address, args))

    def _feed_forward(
        self,
        spec: DenseSpec | MoeSpec,
        x: ActivationRows,
        matrices: MatrixJobs,
        role: str,
        n_slots: int,
    ) -> tuple[NDArray[Any], Rows, tuple[int, int]]:
        """(FEED_FORWARD record, rows of the results, chunks of gate_up and down per expert)."""
        gate, up = spec.gate_up[0], spec.gate_up[-1]
        gate_format = self._model.weights[gate.weight].format
        up_format = self._model.weights[up.weight].format
        down_weight = self._model.weights[spec.down.weight]
        kind = down_weight.format.activation
        hidden = self._room(f"{role} {kind}", n_slots, activation_layout(kind, spec.n_ff)[2], Rows)
        out = self._room(f"{role} out", n_slots, 4 * spec.down.n_out, Rows)
        x_gate, x_up = x.want(gate_format.activation), x.want(up_format.activation)
        n_alike = spec.n_used if isinstance(spec, MoeSpec) else 1
        down_rows = rows_per_chunk(spec.down.n_out, down_weight.row_bytes, self._n_workers, n_alike)
        gate_up_rows = min(GATE_UP_ROWS, spec.n_ff)
        matrix_records = [matrices.matrix(linear) for linear in (gate, up, spec.down)]
        made = record(
            FEED_FORWARD,
            gate=address_of(matrix_records[0]),
            up=address_of(matrix_records[1]),
            down=address_of(matrix_records[2]),
            first_up_row=0 if len(spec.gate_up) == 2 else spec.n_ff,
            n_ff=spec.n_ff,
            n_out=spec.down.n_out,
            gate_up_rows=gate_up_rows,
            down_rows=down_rows,
            x_gate=x_gate.address,
            x_gate_stride=x_gate.stride,
            x_up=x_up.address,
            x_up_stride=x_up.stride,
            hidden=hidden.address,
            hidden_stride=hidden.stride,
            hidden_group=ACTIVATION_GROUP[kind],
            out=out.address,
            out_stride=out.stride,
            activation=ACTIVATIONS[spec.activation],
            limit=spec.activation_limit,
        )
        self._program.keep += [made, x]
        return made, out, (-(-spec.n_ff // gate_up_rows), -(-spec.down.n_out // down_rows))

    def _jobs(
        self,
        name: str,
        dense: NDArray[Any] | None,
        dense_chunks: tuple[int, int],
        experts: NDArray[Any] | None,
        rows: StepRows,
    ) -> tuple[int, int]:
        args = record(
            FEED_FORWARDS,
            dense=0 if dense is None else address_of(dense),
            dense_gate_up_chunks=dense_chunks[0],
            dense_down_chunks=dense_chunks[1],
            experts=0 if experts is None else address_of(experts),
            n_tokens=address_of(rows.n_rows),
            scratch=address_of(self._scratch),
            scratch_bytes=self._scratch.strides[0],
        )
        first = self._program.add(f"{name}gate_up", gate_up.address, args, dense_chunks[0])
        second = self._program.add(f"{name}down", down.address, args, dense_chunks[1])
        return first, second

    def _room(self, role: str, n_rows: int, width: int, kind: Any) -> Any:
        """Buffers that layers of the same sizes share: `kind(n_rows, width)`."""
        key = (role, n_rows, width)
        if key not in self._shared:
            self._shared[key] = kind(n_rows, width)
        return self._shared[key]


class _Routing:
    """What the router's jobs write; see `ops.cpu.router`."""

    def __init__(self, n_slots: int, n_expert: int) -> None:
        self.weights = aligned(n_slots, np.float32)
        self.slots = aligned(n_slots, np.int32)
        self.slot_tokens = aligned(n_slots, np.int32)
        self.counts = aligned(n_expert, np.int32)
        self.active = aligned(2 * n_expert, np.int32)
        self.offsets = aligned(n_expert + 1, np.int32)
        self.shared_logits = Rows(n_slots, 4)
        self.shared_weights = aligned(n_slots, np.float32)
