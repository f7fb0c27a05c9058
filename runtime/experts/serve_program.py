"""ServeProgram: what the CPU team runs beside a GPU's step: a MoE layer's jobs, and clocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ops.arithmetic import activation_layout
from ops.cpu.c_functions import c_function
from ops.cpu.compiling import name_of, product_name
from ops.cpu.expert_use import add_token, count_uses, find_swaps
from ops.cpu.experts import FEED_FORWARD
from ops.cpu.job import record
from ops.cpu.linear import MATRIX
from ops.cpu.look_ahead import LOOK_AHEAD, MOST_AHEAD, fetch_ahead, look_ahead
from ops.cpu.matmul import SCRATCH_BYTES, matmul_address
from ops.cpu.posts import ABORT, EPOCH, TURN
from ops.cpu.program import LINE, Program, address_of, aligned
from ops.cpu.router import ROUTE, route
from ops.cpu.serve import SERVE, SERVE_SCRATCH_BYTES, quantized_bytes, receive, serve
from ops.exchange import FORECAST_TOKENS, ExchangeLayout
from ops.quants.block import ACTIVATION_GROUP
from runtime.engine.feed_forward_jobs import ACTIVATIONS, SCORES
from runtime.experts.serve_times import ServeTimes
from runtime.models.linear import Linear
from runtime.models.spec import MoeSpec
from runtime.models.weights import Weight

JOBS_PER_LAYER = 6
NOT_MISSING = 1


def kernels_of(weights: Mapping[str, Weight], layers: Sequence[MoeSpec]) -> list[str]:
    """Names of what programs of these layers call, as `ops.cpu.compiling` has them."""
    linears = [linear for layer in layers for linear in (*layer.gate_up, layer.down)]
    formats = {weights[linear.weight].format.name for linear in linears}
    kernels = (receive, serve, fetch_ahead, look_ahead, route, count_uses, add_token, find_swaps)
    return [*map(name_of, kernels), *map(product_name, sorted(formats))]


class ServeMemory:
    """What programs of the same layers share, since they never run at the same time.

    The weights and the exchange at `exchange` must outlive it.
    """

    def __init__(
        self,
        weights: Mapping[str, Weight],
        layers: Sequence[MoeSpec],
        layout: ExchangeLayout,
        exchange: int,
        n_workers: int,
    ) -> None:
        self.layers, self.layout, self.exchange = layers, layout, exchange
        self.n_workers = n_workers
        self._weights, self._keep = weights, list[Any]()
        n_slots = layout.n_slots
        widest = max(layer.n_ff for layer in layers)
        self.hidden = aligned((n_slots, -(-4 * widest // 64) * 64), np.uint8)
        self.counts = aligned(1 << 16, np.int32)
        self.lists = aligned((4, n_slots + 16), np.int32)
        self.finished = aligned(n_slots, np.int64)
        self.queues = aligned((n_workers, LINE), np.uint8)
        room = max(self.hidden_bytes(layer) for layer in layers)
        self.quantized = aligned((n_workers, quantized_bytes(room)), np.uint8)
        n_expert = max(layer.n_expert for layer in layers)
        matmul_bytes = -(-SERVE_SCRATCH_BYTES // 64) * 64 + SCRATCH_BYTES
        self.scratch = aligned((n_workers, max(matmul_bytes, 16 * n_expert)), np.uint8)
        self.sched_yield = c_function("sched_yield")
        self.missing = np.full((len(layers), n_expert), NOT_MISSING, np.int8)
        """i8[n_layers, n_expert]: 0 for the experts that the team would have to compute now."""
        n_used = max(layer.n_used for layer in layers)
        self._choices = aligned((2, FORECAST_TOKENS * n_used), np.int32)
        self.listed = aligned(1 + MOST_AHEAD, np.int64)
        self.experts = [self._experts(layer) for layer in layers]
        self.routings = [self._routing(layer) for layer in layers]
        self._n_turns = 0

    def next_turn(self) -> int:
        """How many steps were begun before this one."""
        self._n_turns += 1
        return self._n_turns - 1

    def down_format_group(self, layer: MoeSpec) -> int:
        """Values under one scale of the records that down multiplies."""
        return ACTIVATION_GROUP[self._weights[layer.down.weight].format.activation]

    def hidden_bytes(self, layer: MoeSpec) -> int:
        """Of such a record."""
        kind = self._weights[layer.down.weight].format.activation
        return activation_layout(kind, layer.n_ff)[2]

    def _experts(self, layer: MoeSpec) -> NDArray[Any]:
        gate, up = layer.gate_up[0], layer.gate_up[-1]
        matrices = [self._matrix(linear) for linear in (gate, up, layer.down)]
        x = self.exchange + self.layout.records_offset
        stride = record_bytes(self._weights, layer)
        return record(
            FEED_FORWARD,
            gate=address_of(matrices[0]),
            up=address_of(matrices[1]),
            down=address_of(matrices[2]),
            first_up_row=0 if len(layer.gate_up) == 2 else layer.n_ff,
            n_ff=layer.n_ff,
            n_out=layer.down.n_out,
            x_gate=x,
            x_gate_stride=stride,
            x_up=x,
            x_up_stride=stride,
            hidden=address_of(self.hidden),
            hidden_stride=self.hidden.strides[0],
            hidden_group=1,
            activation=ACTIVATIONS[layer.activation],
            active=address_of(self.lists[0]),
            offsets=address_of(self.lists[1]),
            slot_tokens=address_of(self.lists[2]),
            limit=layer.activation_limit,
        )

    def _routing(self, layer: MoeSpec) -> NDArray[Any]:
        """Of forecasts; only the choices count."""
        router = layer.router
        return record(
            ROUTE,
            logits=self.exchange + self.layout.forecasts_offset,
            n_expert=layer.n_expert,
            n_used=layer.n_used,
            score=SCORES[router.score],
            bias=self._vector(router.selection_bias),
            n_groups=router.n_groups,
            n_groups_used=router.n_groups_used,
            choices=address_of(self._choices[0]),
            weights=address_of(self._choices[1]),
            scratch=address_of(self.scratch),
            scratch_bytes=self.scratch.strides[0],
        )

    def _matrix(self, linear: Linear) -> NDArray[Any]:
        weight = self._weights[linear.weight]
        made = record(
            MATRIX,
            matmul=matmul_address(weight.format.name),
            weights=weight.address,
            row_bytes=weight.row_bytes,
            n_elems=linear.n_in,
            slab_bytes=linear.n_out * weight.row_bytes,
            bias=self._vector(linear.bias),
            bias_slab_bytes=4 * linear.n_out,
            scale=self._vector(linear.scale),
        )
        self._keep += [made, weight]
        return made

    def _vector(self, name: str | None) -> int:
        """Address of a small tensor as f32 values; 0 for None."""
        if name is None:
            return 0
        values = np.ascontiguousarray(self._weights[name].to_f32())
        self._keep.append(values)
        return address_of(values)


class ServeProgram:
    """The program of all layers that have a mailbox, and the words that steer it.

    Several of them may stand in the team's queue, for steps that follow one another. The u32 at
    `done` must outlive it.
    """

    def __init__(self, memory: ServeMemory, done: int) -> None:
        layers = memory.layers
        self.program = Program(JOBS_PER_LAYER * len(layers) + 1)
        self.times = ServeTimes(len(layers))
        self.times.begin(self.program)
        self._memory, self._step = memory, aligned(3, np.int64)
        self.program.keep += [memory, self._step, self.times]
        for index in range(len(layers)):
            self._add(index, done)

    def begin(self, epoch: int) -> None:
        """Set the step that the next run serves."""
        self._step[EPOCH // 8] = epoch
        self._step[ABORT // 8] = 0
        self._step[TURN // 8] = self._memory.next_turn()

    def abort(self) -> None:
        """Let a run end without waiting for the GPU any longer."""
        self._step[ABORT // 8] = 1

    def _add(self, index: int, done: int) -> None:
        memory, layout, program = self._memory, self._memory.layout, self.program
        layer = memory.layers[index]
        args = record(
            SERVE,
            exchange=memory.exchange,
            done=done,
            step=address_of(self._step),
            layer=index,
            n_layers=len(memory.layers),
            n_used=layer.n_used,
            records_offset=layout.records_offset,
            answers_offset=layout.answers_offset,
            experts=address_of(memory.experts[index]),
            counts=address_of(memory.counts),
            active=address_of(memory.lists[0]),
            offsets=address_of(memory.lists[1]),
            slot_tokens=address_of(memory.lists[2]),
            answers=address_of(memory.lists[3]),
            finished=address_of(memory.finished),
            hidden_group=memory.down_format_group(layer),
            hidden_bytes=memory.hidden_bytes(layer),
            n_workers=memory.n_workers,
            sched_yield=memory.sched_yield,
            queues=address_of(memory.queues),
            quantized=address_of(memory.quantized),
            quantized_bytes=memory.quantized.strides[0],
            scratch=address_of(memory.scratch),
            scratch_bytes=memory.scratch.strides[0],
        )
        program.add(f"{index}.receive", receive.address, args)
        self.times.posted(program, index)
        at = program.add(f"{index}.serve", serve.address, args, 0)
        args["chunks"] = program.n_chunks_address(at)
        self.times.served(program, index)
        if index + 1 < len(memory.layers):
            self._add_look_ahead(index + 1, args)

    def _add_look_ahead(self, index: int, args: NDArray[Any]) -> None:
        """To layer `index`, from the one before it, whose arguments these are."""
        memory, program = self._memory, self.program
        ahead = record(
            LOOK_AHEAD,
            serve=address_of(args),
            missing=address_of(memory.missing[index]),
            n_expert=memory.layers[index].n_expert,
            route=route.address,
            routing=address_of(memory.routings[index]),
            experts=address_of(memory.experts[index]),
            listed=address_of(memory.listed),
        )
        at = program.add(f"{index}.fetch_ahead", fetch_ahead.address, ahead, 0)
        args["fetch_chunks"] = ahead["chunks"] = program.n_chunks_address(at)
        args["look_ahead"], args["ahead"] = look_ahead.address, address_of(ahead)


def record_bytes(weights: Mapping[str, Weight], layer: MoeSpec) -> int:
    """Of the activation record that gate and up of this layer multiply.

    Raises: ValueError if the two want different kinds: one record is posted.
    """
    kinds = {weights[linear.weight].format.activation for linear in layer.gate_up}
    if len(kinds) > 1:
        raise ValueError(f"gate and up of {layer.gate_up[0].weight} want records of {kinds}")
    return activation_layout(kinds.pop(), layer.gate_up[0].n_in)[2]
