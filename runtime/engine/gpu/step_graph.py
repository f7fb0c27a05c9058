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
from runtime.engine.gpu.choice_launches import choices_bytes, choices_place
from runtime.engine.gpu.control import control_layout
from runtime.engine.gpu.feed_forward_launches import FeedForwardLaunches
from runtime.engine.gpu.graph_ends import (
    ALONE,
    GraphEnds,
    add_hand_over,
    add_take_over,
    add_take_tokens,
)
from runtime.engine.gpu.kv import GPUPages
from runtime.engine.gpu.launch_plan import Constants, LaunchPlan, Room
from runtime.engine.gpu.matrix_launches import Output, Product, add_products, want_inputs
from runtime.engine.gpu.memory_launches import MemoryLaunches, memory_bytes
from runtime.engine.gpu.mixer_launches import MixerPlanner
from runtime.engine.gpu.plan_parts import (
    DeviceRows,
    Fetches,
    Mailboxes,
    PlanParts,
    RowSource,
    StepMemory,
)
from runtime.engine.gpu.sampling_launches import Copy, add_sampling
from runtime.engine.gpu.state_slots import GPUStates
from runtime.engine.gpu.step_shape import Sampling, StepShape
from runtime.engine.gpu.stream_launches import Residual, begin_residual, continue_residual
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
    rows        of tables, where CPU workers gather those of steps that choose their tokens
    fetches     where steps that fetch experts put them
    max_deltas  changes of the table of experts that a step may bring
    states      of sequences, where the model has any
    ends        what comes before and behind the model's layers, which may be some of a larger one's
    overlapped  kernels start while their predecessors run (compute capability 9.0 or newer)
    """

    def __init__(
        self,
        model: Model,
        weights: DeviceWeights,
        pages: GPUPages,
        *,
        mailboxes: Mailboxes | None = None,
        rows: RowSource | None = None,
        fetches: Fetches | None = None,
        max_deltas: int = 0,
        states: GPUStates | None = None,
        ends: GraphEnds = ALONE,
        overlapped: bool,
    ) -> None:
        self.model = model
        self._weights, self._pages = weights, pages
        self._mailboxes, self._max_deltas = mailboxes, max_deltas
        self._fetches, self._states, self._rows = fetches, states, rows
        self._ends = ends
        self.overlapped = overlapped

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
            gpu=self._pages.gpu,
            model=self.model,
            weights=self._weights,
            memory=memory,
            layout=control_layout(
                shape,
                self._pages.page_tokens,
                self._max_deltas,
                has_states=self._ends.has_states or self._states is not None,
                memory_bytes=self._ends.memories[0] or memory_bytes(self.model),
            ),
            shape=shape,
            plan=LaunchPlan(),
            room=room,
            constants=constants,
            mailboxes=None if shape.fetches else self._mailboxes,
            rows=None if shape.sampling is Sampling.HOST else self._rows,
            fetches=self._fetches if shape.fetches else None,
            states=self._states,
            overlapped=self.overlapped,
        )
        self._refresh(parts)
        mixers = MixerPlanner(parts, self._pages)
        spec = self.model.spec
        table_stride = 8 * ADDRESSES * max(spec.n_expert_max, 1)
        feed_forwards = FeedForwardLaunches(parts, table_stride)
        feed_forwards.begin()
        memories = MemoryLaunches(parts, self._ends.memories[1])
        residual, pending = self._begin(parts)
        for index in range(len(spec.layers)) if layers is None else layers:
            layer = spec.layers[index]
            if layer.memory is not None:
                residual.settle(f"{index}.settle", pending)
                offset = layer.mixer.state_bytes
                memories.add(index, layer.memory, residual.x, offset)
                pending = {}
            pending = self._layer(parts, index, layer, residual, mixers, feed_forwards, pending)
        self._end(parts, residual, pending)
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
        residual: Residual,
        mixers: MixerPlanner,
        feed_forwards: FeedForwardLaunches,
        pending: Mapping[str, int],
    ) -> Mapping[str, int]:
        """Launches of one layer; what the next norm adds to the residual stream."""
        n, n_embd = parts.n_tokens, parts.model.spec.n_embd
        normed = DeviceRows(parts.room, "mixer input", n, n_embd)
        mixer = mixers.of(layer.mixer)
        mixer.prepare(layer.mixer, normed)
        name, norm = f"{index}.mixer_norm", layer.mixer_norm
        residual.enter(name, norm, layer.mixer_streams, normed, pending)
        added = mixer.add(index, layer.mixer, normed)
        normed = DeviceRows(parts.room, "feed-forward input", n, n_embd)
        feed_forwards.prepare(layer.feed_forward, normed)
        name, norm = f"{index}.feed_forward_norm", layer.feed_forward_norm
        entry = None
        if feed_forwards.takes_norm(layer.feed_forward):
            entry = residual.leave_norm(norm, added)
        if entry is None:
            residual.enter(name, norm, layer.feed_forward_streams, normed, added)
        return feed_forwards.add(index, layer.feed_forward, normed, entry)

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
                "table": memory.table - 8 * ADDRESSES * memory.first_row,
            },
        )

    def _begin(self, parts: PlanParts) -> tuple[Residual, Mapping[str, int]]:
        """The residual: of the tokens, or of the GPU before; and what is to be added to it."""
        if self._ends.taking is None:
            if self._ends.tokens is not None and parts.shape.sampling is not Sampling.HOST:
                add_take_tokens(parts, self._ends.tokens)
            return begin_residual(parts, self._embed(parts))
        return continue_residual(parts, add_take_over(parts, self._ends.taking)), {}

    def _end(self, parts: PlanParts, residual: Residual, pending: Mapping[str, int]) -> None:
        """Logits, or the residual stream for the next GPU."""
        if self._ends.giving is None:
            self._logits(parts, residual, pending)
            return
        residual.settle("last_sum", pending)
        add_hand_over(parts, residual.x, self._ends.giving)
        self._report(parts, 0, LOGITS_ALIGN)

    def _embed(self, parts: PlanParts) -> int:
        """Address of the tokens' embeddings, f32[n_tokens, n_embd]."""
        spec = parts.model.spec
        n, fmt = spec.n_embd, parts.format_of(spec.token_embedding)
        x = parts.room.place("embeddings", 4 * parts.n_tokens * n)
        parts.plan.add(
            "embed",
            embed(fmt, overlapped=parts.overlapped),
            embed_kernel.grid(n, parts.n_tokens),
            {
                "token_ids": parts.control("token_ids"),
                "sampled": parts.memory.chosen,
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

    def _logits(self, parts: PlanParts, residual: Residual, pending: Mapping[str, int]) -> None:
        """The outputs' rows: last norm, output matrix, report."""
        spec, shape = parts.model.spec, parts.shape
        n_rows, count = shape.n_outputs, parts.output_count
        out = DeviceRows(parts.room, "output input", max(n_rows, parts.n_tokens), spec.n_embd)
        want_inputs(parts, [spec.output], out)
        if shape.gathered:  # what is pending belongs to all tokens, the norm to some of them
            residual.settle("last_sum", pending)
            pending = {}
        norm, streams = spec.output_norm, spec.output_streams
        residual.enter("output_norm", norm, streams, out, pending, outputs=shape.gathered)
        stride = logits_stride(spec.n_vocab)
        logits = parts.room.place("logits", 4 * n_rows * stride)
        products = [Product(spec.output)]
        add_products(parts, "logits", products, out, Output(logits, stride), count, n_rows)
        self._report(parts, logits, stride)

    def _report(self, parts: PlanParts, logits: int, stride: int) -> None:
        """Logits or tokens, if there are any, and choices that a cache wants, to the host."""
        spec, memory, count = parts.model.spec, parts.memory, parts.output_count
        copies: list[Copy] = []
        shown = bool(logits) and parts.shape.sampling is Sampling.HOST
        if logits and not shown:
            copies += add_sampling(parts, logits, stride)
        if self._mailboxes is not None:
            place = choices_place(parts)
            copies.append((place, memory.choices, choices_bytes(parts), memory.choices_stride))
        if parts.shape.timed:
            n_bytes = memory.stamps_bytes
            copies.append((memory.stamps, memory.host_stamps, n_bytes, n_bytes))
        listed = parts.constants.place(np.array(copies, np.uint64)) if copies else 0
        parts.plan.add(
            "report",
            report(overlapped=parts.overlapped),
            (report_blocks(stride), 1 + shown * parts.shape.n_outputs),
            {
                "epoch": memory.epoch,
                "count": count,
                "logits": logits if shown else 0,
                "n_vocab": spec.n_vocab,
                "stride": stride,
                "host_logits": memory.logits,
                "flags": memory.flags,
                "copies": listed,
                "n_copies": len(copies),
                "counter": memory.counter,
                "done": memory.done,
            },
            overlapped=parts.overlapped,
        )
