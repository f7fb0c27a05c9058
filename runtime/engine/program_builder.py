"""ProgramBuilder: from a model's spec to the list of jobs that one step is.

The same list serves decode and prompts of any size: the numbers of chunks that depend on the step
are set before each run (`StepChunks`), those that depend on the routing by the router's job.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ops.cpu import heads as heads_job
from ops.cpu.attention import (
    ATTENTION,
    PARTIAL_HEAD,
    attention,
    attention_end,
    attention_workspaces,
)
from ops.cpu.heads import HEADS, heads
from ops.cpu.job import record
from ops.cpu.norm import NORM, QUANTIZE, norm, quantize
from ops.cpu.program import Program, address_of, aligned
from runtime.engine.activation_rows import ActivationRows, Rows
from runtime.engine.feed_forward_jobs import FeedForwardJobs
from runtime.engine.kv_pages import KVPages
from runtime.engine.matrix_jobs import MatrixJobs
from runtime.engine.step_buffers import StepBuffers
from runtime.engine.step_chunks import StepChunks, StepRows
from runtime.errors import UnsupportedArchitecture
from runtime.models.model import Model
from runtime.models.rope import RopePairing, RopeSpec, rope_frequencies
from runtime.models.spec import AttentionSpec, LayerSpec, QKNorm

NORM_KINDS = {
    QKNorm.NONE: heads_job.NORM_NONE,
    QKNorm.HEAD: heads_job.NORM_HEAD,
    QKNorm.ROW: heads_job.NORM_ROW,
}
ROPE_KINDS = {RopePairing.NEOX: heads_job.ROPE_NEOX, RopePairing.NORM: heads_job.ROPE_NORM}
JOBS_PER_LAYER = 16


class ProgramBuilder:
    """Builds one program; `build` is called once.

    Raises: UnsupportedArchitecture for parts of a spec that no job computes.

    The program refers to the model's weights, the pages and the buffers by address: they must
    outlive it.
    """

    def __init__(
        self, model: Model, buffers: StepBuffers, pages: KVPages, n_workers: int, n_tokens: int
    ) -> None:
        spec = model.spec
        self._model, self._spec = model, spec
        self._buffers, self._pages = buffers, pages
        self._n_workers, self._n_tokens = n_workers, n_tokens
        self.program = Program(JOBS_PER_LAYER * len(spec.layers) + JOBS_PER_LAYER)
        self.chunks = StepChunks(buffers.n_tokens, buffers.n_outputs)
        self.x = Rows(n_tokens, 4 * spec.n_embd)
        self._matrices = MatrixJobs(self.program, model, n_workers)
        self._feed_forwards = FeedForwardJobs(self.program, model, n_workers, n_tokens)
        self._normed = ActivationRows(n_tokens, spec.n_embd)
        self._delta = Rows(n_tokens, 4 * spec.n_embd)
        self._rope_tables: dict[RopeSpec, tuple[NDArray[Any], NDArray[Any]]] = {}
        self._workspaces: dict[tuple[int, int, int], NDArray[Any]] = {}
        self._heads_rows: dict[int, Rows] = {}
        self._attended: dict[int, ActivationRows] = {}
        self._partials: dict[int, NDArray[Any]] = {}

    def build(self) -> Program:
        """The program of all layers and the logits."""
        spec, outputs = self._spec, self.chunks.outputs
        pending: dict[str, int] = {}
        for index, layer in enumerate(spec.layers):
            # Nothing reads the last layer's rows but the outputs' own logits.
            rows = outputs if index == len(spec.layers) - 1 else self.chunks.tokens
            pending = self._layer(index, layer, pending, rows)
        out = ActivationRows(self._n_tokens, spec.n_embd)
        output = self._matrices.part(spec.output, out, self._buffers.logits)
        self._norm("output_norm", spec.output_norm, out, pending, outputs)
        self._matrices.products("logits", [output], outputs, self._buffers.not_finite)
        self.program.keep += [self.x, out, self._normed, self._delta, self._model]
        self.program.keep += [self._buffers, self._pages]
        self.chunks.freeze(self.program)
        return self.program

    def _layer(
        self, index: int, layer: LayerSpec, pending: Mapping[str, int], rows: StepRows
    ) -> dict[str, int]:
        """Jobs of one layer; the norm fields that add its result to the residual stream.

        rows: those that go on after attention, which reads the keys and values of all tokens.
        """
        mixer, tokens = layer.mixer, self.chunks.tokens
        joined = self._heads_rows.setdefault(
            width := mixer.n_q + mixer.n_k + mixer.n_v, Rows(self._n_tokens, 4 * width)
        )
        parts, first = [], 0
        for linear in mixer.qkv:
            parts.append(self._matrices.part(linear, self._normed, joined, first))
            first += 4 * linear.n_out
        self._norm(f"{index}.mixer_norm", layer.mixer_norm, self._normed, pending, tokens)
        self._matrices.products(f"{index}.qkv", parts, tokens)
        attended = self._attention(index, mixer, joined, rows)
        source = attended.f32
        if rows is not tokens:
            attended = ActivationRows(self._n_tokens, attended.width)
        output = self._matrices.part(mixer.output, attended, self._delta)
        self._quantize(f"{index}.quantize", source, attended, rows)
        self._matrices.products(f"{index}.attention_output", [output], rows)

        routed = self._feed_forwards.prepare(layer.feed_forward, self._normed)
        added = {"delta": self._delta.address, "delta_stride": self._delta.stride}
        name = layer.feed_forward_norm
        self._norm(f"{index}.feed_forward_norm", name, self._normed, added, rows)
        return self._feed_forwards.add(f"{index}.", routed, self._matrices, rows)

    def _tokens_of(self, rows: StepRows) -> int:
        """Address of the token of each row; 0: row i is token i."""
        return 0 if rows is self.chunks.tokens else address_of(self._buffers.output_tokens)

    def _norm(
        self,
        name: str,
        weight: str,
        out: ActivationRows,
        pending: Mapping[str, int],
        rows: StepRows,
    ) -> None:
        args = record(
            NORM,
            x=self.x.address,
            x_stride=self.x.stride,
            n=self._spec.n_embd,
            tokens=self._tokens_of(rows),
            weight=self._matrices.vector(weight),
            eps=self._spec.eps,
            out_f32=out.f32.address,
            out_f32_stride=out.f32.stride,
            **out.record_fields(),
            **pending,
        )
        rows.per_row.append(self.program.add(name, norm.address, args))

    def _quantize(self, name: str, x: Rows, out: ActivationRows, rows: StepRows) -> None:
        """From the f32 rows x of all tokens to every wanted form of `rows`."""
        is_copied = out.f32 is not x
        if not (is_copied or out.quantized):
            return
        args = record(
            QUANTIZE,
            x=x.address,
            x_stride=x.stride,
            n=out.width,
            tokens=self._tokens_of(rows),
            out_f32=out.f32.address if is_copied else 0,
            out_f32_stride=out.f32.stride,
            **out.record_fields(),
        )
        self.program.keep += [x, out]
        rows.per_row.append(self.program.add(name, quantize.address, args))

    def _attention(
        self, index: int, mixer: AttentionSpec, joined: Rows, rows: StepRows
    ) -> ActivationRows:
        """The jobs between the QKV products and the output product; what the latter multiplies."""
        if mixer.window is not None or mixer.sinks is not None or mixer.value_scale != 1.0:
            raise UnsupportedArchitecture(
                f"{self._spec.architecture}: layer {index} has a sliding window, attention sinks "
                "or a value scale, which the CPU executor does not compute"
            )
        width = mixer.n_head * mixer.head_dim_v
        attended = self._attended.setdefault(width, ActivationRows(self._n_tokens, width))
        shared = {
            "n_head": mixer.n_head,
            "n_head_kv": mixer.n_head_kv,
            "dim_k": mixer.head_dim_k,
            "dim_v": mixer.head_dim_v,
            "positions": address_of(self._buffers.positions),
            "error": self.program.error_address,
            **self._pages.fields(index),
        }
        self._heads(index, mixer, joined, shared)
        args = self._attention_args(mixer, joined, attended.f32, shared)
        job = self.program.add(f"{index}.attention", attention.address, args)
        is_last = rows is self.chunks.outputs
        chunks = self.chunks.per_output_item if is_last else self.chunks.per_item
        chunks.append((job, mixer.n_head_kv))
        job = self.program.add(f"{index}.attention_end", attention_end.address, args)
        self.chunks.per_partial.append(job)
        return attended

    def _heads(
        self, index: int, mixer: AttentionSpec, joined: Rows, shared: dict[str, int]
    ) -> None:
        args = record(
            HEADS,
            q=joined.address,
            k=joined.address + 4 * mixer.n_q,
            v=joined.address + 4 * (mixer.n_q + mixer.n_k),
            row_stride=joined.stride,
            norm_kind=NORM_KINDS[mixer.qk_norm],
            q_norm=self._matrices.vector(mixer.q_norm),
            k_norm=self._matrices.vector(mixer.k_norm),
            cell_pages=address_of(self._buffers.cell_pages),
            eps=self._spec.eps,
            q_scale=mixer.scale,
            **shared,
        )
        if mixer.rope is not None:
            cosines, sines = self._rope(mixer.rope)
            args["rope_kind"] = ROPE_KINDS[mixer.rope.pairing]
            args["n_rot"] = mixer.rope.n_rot
            args["cosines"], args["sines"] = address_of(cosines), address_of(sines)
        job = self.program.add(f"{index}.heads", heads.address, args)
        self.chunks.tokens.per_row.append(job)

    def _attention_args(
        self, mixer: AttentionSpec, joined: Rows, out: Rows, shared: dict[str, int]
    ) -> NDArray[Any]:
        b, padded = self._buffers, shared["dim_v_padded"]
        partial_bytes = mixer.n_head * (PARTIAL_HEAD + 4 * padded)
        if partial_bytes not in self._partials:
            self._partials[partial_bytes] = aligned((b.max_partials, partial_bytes), np.uint8)
        key = (mixer.n_head, mixer.n_head_kv, max(padded, mixer.head_dim_k))
        if key not in self._workspaces:
            self._workspaces[key], arrays = attention_workspaces(self._n_workers, *key)
            self.program.keep += [self._workspaces[key], *arrays]
        self.program.keep += [joined, out, self._partials[partial_bytes]]
        return record(
            ATTENTION,
            items=address_of(b.items),
            q=joined.address,
            q_stride=joined.stride,
            out=out.address,
            out_stride=out.stride,
            sequences=address_of(b.sequences),
            page_tables=address_of(b.page_tables),
            table_stride=b.page_tables.strides[0],
            partials=address_of(self._partials[partial_bytes]),
            partial_bytes=partial_bytes,
            partial_spans=address_of(b.partial_spans),
            workspaces=address_of(self._workspaces[key]),
            **shared,
        )

    def _rope(self, rope: RopeSpec) -> tuple[NDArray[Any], NDArray[Any]]:
        """f32[n_positions, n_rot / 2] cosines and sines, computed once for all layers alike."""
        if rope not in self._rope_tables:
            factors = None
            if rope.factors is not None:
                factors = self._model.weights[rope.factors].to_f32().reshape(-1)
            frequencies = rope_frequencies(rope, factors)
            angles = np.arange(self._buffers.n_positions)[:, None] * frequencies
            tables = tuple(
                np.ascontiguousarray(f(angles) * rope.magnitude, np.float32)
                for f in (np.cos, np.sin)
            )
            self._rope_tables[rope] = (tables[0], tables[1])
            self.program.keep += tables
        return self._rope_tables[rope]
