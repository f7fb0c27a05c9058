"""ServeProgram: what the CPU team runs beside a GPU's step, two jobs a MoE layer."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ops.arithmetic import activation_layout
from ops.cpu.experts import FEED_FORWARD
from ops.cpu.job import record
from ops.cpu.linear import MATRIX
from ops.cpu.matmul import SCRATCH_BYTES, matmul_address
from ops.cpu.program import Program, address_of, aligned
from ops.cpu.serve import (
    ABORT,
    EPOCH,
    SERVE,
    SERVE_SCRATCH_BYTES,
    quantized_bytes,
    receive,
    serve,
)
from ops.exchange import ExchangeLayout
from ops.quants.block import ACTIVATION_GROUP
from runtime.engine.feed_forward_jobs import ACTIVATIONS
from runtime.models.linear import Linear
from runtime.models.spec import MoeSpec
from runtime.models.weights import Weight

JOBS_PER_LAYER = 2


class ServeProgram:
    """The program of all layers that have a mailbox, and the words that steer it.

    The weights, the exchange at `exchange` and the u32 at `done` must outlive it.
    """

    def __init__(
        self,
        weights: Mapping[str, Weight],
        layers: Sequence[MoeSpec],
        layout: ExchangeLayout,
        exchange: int,
        done: int,
        n_workers: int,
    ) -> None:
        self.program = Program(JOBS_PER_LAYER * len(layers))
        self._step = aligned(2, np.int64)
        self._weights, self._layout, self._exchange = weights, layout, exchange
        self._n_workers = n_workers
        n_slots = layout.n_slots
        widest = max(layer.n_ff for layer in layers)
        self._hidden = aligned((n_slots, -(-4 * widest // 64) * 64), np.uint8)
        self._counts = aligned(1 << 16, np.int32)
        self._lists = aligned((4, n_slots + 16), np.int32)
        self._finished = aligned(n_slots, np.int64)
        room = max(self._hidden_bytes(layer) for layer in layers)
        self._quantized = aligned((n_workers, quantized_bytes(room)), np.uint8)
        self._tags = self._quantized[:, :8].view(np.int64)
        scratch_bytes = -(-SERVE_SCRATCH_BYTES // 64) * 64 + SCRATCH_BYTES
        self._scratch = aligned((n_workers, scratch_bytes), np.uint8)
        self._yield = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0
        self.program.keep += [self._hidden, self._counts, self._lists, self._finished]
        self.program.keep += [self._scratch, self._step, self._quantized]
        for index, layer in enumerate(layers):
            self._add(index, layer, len(layers), done)

    def begin(self, epoch: int) -> None:
        """Set the step that the next run serves."""
        self._step[EPOCH // 8] = epoch
        self._step[ABORT // 8] = 0
        self._tags[:] = 0

    def abort(self) -> None:
        """Let a run end without waiting for the GPU any longer."""
        self._step[ABORT // 8] = 1

    def _add(self, index: int, layer: MoeSpec, n_layers: int, done: int) -> None:
        down_format = self._weights[layer.down.weight].format
        args = record(
            SERVE,
            exchange=self._exchange,
            done=done,
            step=address_of(self._step),
            layer=index,
            n_layers=n_layers,
            n_used=layer.n_used,
            records_offset=self._layout.records_offset,
            answers_offset=self._layout.answers_offset,
            experts=address_of(self._experts(layer)),
            counts=address_of(self._counts),
            active=address_of(self._lists[0]),
            offsets=address_of(self._lists[1]),
            slot_tokens=address_of(self._lists[2]),
            answers=address_of(self._lists[3]),
            finished=address_of(self._finished),
            hidden_group=ACTIVATION_GROUP[down_format.activation],
            hidden_bytes=self._hidden_bytes(layer),
            n_workers=self._n_workers,
            sched_yield=self._yield,
            quantized=address_of(self._quantized),
            quantized_bytes=self._quantized.strides[0],
            scratch=address_of(self._scratch),
            scratch_bytes=self._scratch.strides[0],
        )
        program = self.program
        program.add(f"{index}.receive", receive.address, args)
        at = program.add(f"{index}.serve", serve.address, args, 0)
        args["chunks"] = program.n_chunks_address(at)

    def _experts(self, layer: MoeSpec) -> NDArray[Any]:
        gate, up = layer.gate_up[0], layer.gate_up[-1]
        matrices = [self._matrix(linear) for linear in (gate, up, layer.down)]
        x = self._exchange + self._layout.records_offset
        stride = record_bytes(self._weights, layer)
        made = record(
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
            hidden=address_of(self._hidden),
            hidden_stride=self._hidden.strides[0],
            hidden_group=1,
            activation=ACTIVATIONS[layer.activation],
            active=address_of(self._lists[0]),
            offsets=address_of(self._lists[1]),
            slot_tokens=address_of(self._lists[2]),
            limit=layer.activation_limit,
        )
        self.program.keep.append(made)
        return made

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
        self.program.keep += [made, weight]
        return made

    def _vector(self, name: str | None) -> int:
        """Address of a small tensor as f32 values; 0 for None."""
        if name is None:
            return 0
        values = np.ascontiguousarray(self._weights[name].to_f32())
        self.program.keep.append(values)
        return address_of(values)

    def _hidden_bytes(self, layer: MoeSpec) -> int:
        kind = self._weights[layer.down.weight].format.activation
        return activation_layout(kind, layer.n_ff)[2]


def record_bytes(weights: Mapping[str, Weight], layer: MoeSpec) -> int:
    """Of the activation record that gate and up of this layer multiply.

    Raises: ValueError if the two want different kinds: one record is posted.
    """
    kinds = {weights[linear.weight].format.activation for linear in layer.gate_up}
    if len(kinds) > 1:
        raise ValueError(f"gate and up of {layer.gate_up[0].weight} want records of {kinds}")
    return activation_layout(kinds.pop(), layer.gate_up[0].n_in)[2]
