"""StepPlanner: from a model's spec to the launches of one step.

The list serves every step of a shape: kernels read how many tokens there really are from the
control block, and leave where there is nothing to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass

import numpy as np

from ops.gpu import embed as embed_kernel
from ops.gpu.embed import embed
from ops.gpu.expert import ADDRESSES
from ops.gpu.step_io import refresh, refresh_blocks, report, report_blocks
from runtime.engine.gpu.attention_launches import AttentionLaunches
from runtime.engine.gpu.control import control_layout
from runtime.engine.gpu.feed_forward_launches import (
    FeedForwardLaunches,
    choices_bytes,
    choices_place,
)
from runtime.engine.gpu.kv import GPUPages
from runtime.engine.gpu.launch_plan import Constants, LaunchPlan, Room
from runtime.engine.gpu.matrix_launches import Output, Product, add_products, want_inputs
from runtime.engine.gpu.plan_parts import DeviceRows, Mailboxes, PlanParts, StepMemory
from runtime.engine.gpu.row_launches import add_norm
from runtime.engine.gpu.step_shape import StepShape
from runtime.engine.gpu.weights import DeviceWeights
from runtime.models.model import Model
from runtime.models.spec import LayerSpec

LOGITS_ALIGN = 4
"""Rows of logits begin at multiples of so many values."""


def logits_stride(n_vocab: int) -> int:
    """Values from one row of logits to the next."""
    return -(-n_vocab // LOGITS_ALIGN) * LOGITS_ALIGN


class StepPlanner:
    """Plans steps of one model on one GPU.

    mailboxes   what hands missed experts to the CPU; None: every expert is on the GPU, and
                nobody wants to know which ones are used
    max_deltas  changes of the table of experts that a step may bring
    overlapped  kernels start while their predecessors run (compute capability 9.0 or newer)
    """

    def __init__(
        self,
        model: Model,
        weights: DeviceWeights,
        pages: GPUPages,
        *,
        mailboxes: Mailboxes | None = None,
        max_deltas: int = 0,
        overlapped: bool,
    ) -> None:
        self.model = model
        self._weights, self._pages = weights, pages
        self._mailboxes, self._max_deltas = mailboxes, max_deltas
        self._overlapped = overlapped

    def plan(
        self,
        shape: StepShape,
        memory: StepMemory,
        room: Room,
        constants: Constants,
        layers: Sequence[int] | None = None,
    ) -> PlanParts:
        """The launches of steps of this shape, in `plan` of what is returned.

        layers: of these alone (`distinct_layers` need all the kernels and room that all need).
        """
        parts = PlanParts(
            model=self.model,
            weights=self._weights,
            memory=memory,
            layout=control_layout(shape, self._pages.page_tokens, self._max_deltas),
            shape=shape,
            plan=LaunchPlan(),
            room=room,
            constants=constants,
            mailboxes=self._mailboxes,
            overlapped=self._overlapped,
        )
        self._refresh(parts)
        x = self._embed(parts)
        attention = AttentionLaunches(parts, self._pages)
        spec = self.model.spec
        table_stride = 8 * ADDRESSES * max(spec.n_expert_max, 1)
        feed_forwards = FeedForwardLaunches(parts, table_stride)
        pending: Mapping[str, int] = {}
        for index in range(len(spec.layers)) if layers is None else layers:
            layer = spec.layers[index]
            pending = self._layer(parts, index, layer, x, attention, feed_forwards, pending)
        self._logits(parts, x, pending)
        return parts

    def distinct_layers(self) -> list[int]:
        """The first layer of each kind: those alike differ in nothing but their tensors."""
        kinds: dict[object, int] = {}
        for index, layer in enumerate(self.model.spec.layers):
            kinds.setdefault(self._kind(layer), index)
        return list(kinds.values())

    def _kind(self, part: object) -> object:
        """A spec with the names of its tensors replaced by their formats."""
        if isinstance(part, str):
            return self.model.weights[part].format.name if part in self.model.weights else part
        if isinstance(part, tuple):
            return tuple(self._kind(item) for item in part)
        if is_dataclass(part):
            values = (getattr(part, field.name) for field in fields(part))
            return (type(part), *(self._kind(value) for value in values))
        return part

    def _layer(
        self,
        parts: PlanParts,
        index: int,
        layer: LayerSpec,
        x: int,
        attention: AttentionLaunches,
        feed_forwards: FeedForwardLaunches,
        pending: Mapping[str, int],
    ) -> Mapping[str, int]:
        """Launches of one layer; what the next norm adds to the residual stream."""
        n, n_embd = parts.n_tokens, parts.model.spec.n_embd
        normed = DeviceRows(parts.room, "mixer input", n, n_embd)
        attention.prepare(layer.mixer, normed)
        add_norm(parts, f"{index}.mixer_norm", layer.mixer_norm, x, normed, pending)
        added = attention.add(index, layer.mixer, normed)
        normed = DeviceRows(parts.room, "feed-forward input", n, n_embd)
        feed_forwards.prepare(layer.feed_forward, normed)
        add_norm(parts, f"{index}.feed_forward_norm", layer.feed_forward_norm, x, normed, added)
        return feed_forwards.add(index, layer.feed_forward, normed)

    def _refresh(self, parts: PlanParts) -> None:
        memory, layout = parts.memory, parts.layout
        parts.plan.add(
            "refresh",
            refresh(),
            (refresh_blocks(layout.n_bytes, layout.max_deltas),),
            {
                "epoch": memory.epoch,
                "ring": memory.ring,
                "stride": memory.ring_stride,
                "n_bytes": layout.n_bytes,
                "control": memory.control,
                "deltas_offset": layout.n_bytes,
                "max_deltas": layout.max_deltas,
                "table": memory.table,
            },
        )

    def _embed(self, parts: PlanParts) -> int:
        """Address of the residual stream, f32[n_tokens, n_embd]."""
        spec = parts.model.spec
        n, fmt = spec.n_embd, parts.format_of(spec.token_embedding)
        x = parts.room.place("x", 4 * parts.n_tokens * n)
        parts.plan.add(
            "embed",
            embed(fmt, overlapped=parts.overlapped),
            embed_kernel.grid(n, parts.n_tokens),
            {
                "token_ids": parts.control("token_ids"),
                "weights": parts.weights.matrix(spec.token_embedding),
                "table": parts.grid_table(fmt),
                "x": x,
                "count": parts.token_count,
                "n": n,
            },
            shared_bytes=embed_kernel.shared_bytes(fmt),
            overlapped=parts.overlapped,
        )
        return x

    def _logits(self, parts: PlanParts, x: int, pending: Mapping[str, int]) -> None:
        """The outputs' rows: last norm, output matrix, report."""
        spec, shape = parts.model.spec, parts.shape
        n_rows, count = shape.n_outputs, parts.output_count
        out = DeviceRows(parts.room, "output input", max(n_rows, parts.n_tokens), spec.n_embd)
        want_inputs(parts, [spec.output], out)
        if shape.gathered:  # what is pending belongs to all tokens, the norm to some of them
            add_norm(parts, "last_sum", None, x, out, pending)
            pending = {}
        add_norm(parts, "output_norm", spec.output_norm, x, out, pending, outputs=shape.gathered)
        stride = logits_stride(spec.n_vocab)
        logits = parts.room.place("logits", 4 * n_rows * stride)
        products = [Product(spec.output)]
        add_products(parts, "logits", products, out, Output(logits, stride), count, n_rows)
        self._report(parts, logits, stride)

    def _report(self, parts: PlanParts, logits: int, stride: int) -> None:
        """Logits and, where a cache wants them, choices to the host."""
        spec, memory, count = parts.model.spec, parts.memory, parts.output_count
        copies = 0
        if self._mailboxes is not None:
            copy = (choices_place(parts), memory.choices, choices_bytes(parts), 0)
            copies = parts.constants.place(np.array(copy, np.uint64))
        parts.plan.add(
            "report",
            report(overlapped=parts.overlapped),
            (report_blocks(stride), 1 + parts.shape.n_outputs),
            {
                "epoch": memory.epoch,
                "count": count,
                "logits": logits,
                "n_vocab": spec.n_vocab,
                "stride": stride,
                "host_logits": memory.logits,
                "flags": memory.flags,
                "copies": copies,
                "n_copies": int(copies != 0),
                "counter": memory.counter,
                "done": memory.done,
            },
            overlapped=parts.overlapped,
        )
