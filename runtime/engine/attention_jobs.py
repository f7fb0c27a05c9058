"""AttentionJobs: softmax attention over cached keys and values as jobs."""

from __future__ import annotations

from dataclasses import dataclass
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
from ops.cpu.gated_heads import GATED_HEADS, gate_heads, split_gates
from ops.cpu.general_attention import general_attention
from ops.cpu.heads import HEADS, heads
from ops.cpu.job import record
from ops.cpu.program import address_of, aligned
from runtime.engine.activation_rows import ActivationRows, Rows
from runtime.engine.indexer_jobs import IndexerJobs, PreparedIndexer
from runtime.engine.mixer_jobs import MixerParts
from runtime.engine.rope_tables import RopeTables
from runtime.engine.step_chunks import StepRows
from runtime.models.spec import AttentionSpec, QKNorm

NORM_KINDS = {
    QKNorm.NONE: heads_job.NORM_NONE,
    QKNorm.HEAD: heads_job.NORM_HEAD,
    QKNorm.ROW: heads_job.NORM_ROW,
}


@dataclass(frozen=True)
class Prepared:
    """The rows of Q, K, V together, and the parts of the products that fill them."""

    joined: Rows
    products: list[NDArray[Any]]
    index: PreparedIndexer | None = None


class AttentionJobs:
    """The jobs of layers with `AttentionSpec`; see `MixerJobs`."""

    def __init__(self, parts: MixerParts, ropes: RopeTables, indexers: IndexerJobs) -> None:
        self._parts, self._ropes, self._indexers = parts, ropes, indexers
        self._joined: dict[int, Rows] = {}
        self._attended: dict[int, ActivationRows] = {}
        self._gates: dict[int, Rows] = {}
        self._room = AttentionRoom(parts)

    def prepare(self, mixer: AttentionSpec, x: ActivationRows) -> Prepared:
        """The rows of Q, K, V together, and the parts of the products that fill them."""
        width = mixer.n_q + mixer.n_gate + mixer.n_k + mixer.n_v
        joined = self._joined.setdefault(width, Rows(self._parts.n_tokens, 4 * width))
        products, first = [], 0
        for linear in mixer.qkv:
            products.append(self._parts.matrices.part(linear, x, joined, first))
            first += 4 * linear.n_out
        if mixer.indexer is None:
            return Prepared(joined, products)
        index = self._indexers.prepare(mixer.indexer, x)
        return Prepared(joined, products + index.products, index)

    def add(
        self, layer: int, mixer: AttentionSpec, prepared: Prepared, rows: StepRows
    ) -> dict[str, int]:
        """See `MixerJobs.add`."""
        parts, joined = self._parts, prepared.joined
        parts.matrices.products(f"{layer}.qkv", prepared.products, parts.chunks.tokens)
        selection = {}
        if mixer.indexer is not None and prepared.index is not None:
            selection = self._indexers.add(layer, mixer.indexer, prepared.index)
        shared = {
            "n_head": mixer.n_head,
            "n_head_kv": mixer.n_head_kv,
            "dim_k": mixer.head_dim_k,
            "dim_v": mixer.head_dim_v,
            "positions": address_of(parts.buffers.positions),
            "error": parts.program.error_address,
            **parts.pages.fields(layer),
        }
        width = mixer.n_head * mixer.head_dim_v
        attended = self._attended.setdefault(width, ActivationRows(parts.n_tokens, width))
        gating = self._gating(mixer, joined, attended.f32, rows)
        if gating is not None:
            job = parts.program.add(f"{layer}.split_gates", split_gates.address, gating)
            parts.chunks.tokens.per_row.append(job)
        self._heads(layer, mixer, joined, shared)
        args = record(
            ATTENTION,
            q=joined.address,
            q_stride=joined.stride,
            out=attended.f32.address,
            out_stride=attended.f32.stride,
            window=mixer.window or 0,
            sinks=parts.matrices.vector(mixer.sinks),
            value_scale=mixer.value_scale,
            row_dim=shared["dim_v_padded"],
            **selection,
            **shared,
            **self._room.fields(mixer.n_head, mixer.n_head_kv, mixer.head_dim_k, shared),
        )
        parts.program.keep += [joined, attended]
        self._room.add(layer, args, mixer.n_head_kv, rows)
        if gating is not None:
            job = parts.program.add(f"{layer}.gate_heads", gate_heads.address, gating)
            rows.per_row.append(job)
        return parts.output(f"{layer}.attention_", mixer.output, attended, rows)

    def _gating(
        self, mixer: AttentionSpec, joined: Rows, attended: Rows, rows: StepRows
    ) -> NDArray[Any] | None:
        """The arguments of the jobs around attention whose output is gated."""
        if not mixer.gated:
            return None
        n_tokens = self._parts.n_tokens
        gates = self._gates.setdefault(mixer.n_gate, Rows(n_tokens, 4 * mixer.n_gate))
        self._parts.program.keep.append(gates)
        return record(
            GATED_HEADS,
            q=joined.address,
            q_stride=joined.stride,
            gates=gates.address,
            gates_stride=gates.stride,
            n_head=mixer.n_head,
            dim_k=mixer.head_dim_k,
            dim_v=mixer.head_dim_v,
            tokens=self._parts.row_jobs.tokens_of(rows),
            attended=attended.address,
            attended_stride=attended.stride,
        )

    def _heads(
        self, layer: int, mixer: AttentionSpec, joined: Rows, shared: dict[str, int]
    ) -> None:
        parts, n_q = self._parts, mixer.n_q + mixer.n_gate
        args = record(
            HEADS,
            q=joined.address,
            k=joined.address + 4 * n_q,
            v=joined.address + 4 * (n_q + mixer.n_k),
            row_stride=joined.stride,
            norm_kind=NORM_KINDS[mixer.qk_norm],
            q_norm=parts.matrices.vector(mixer.q_norm),
            k_norm=parts.matrices.vector(mixer.k_norm),
            cell_pages=address_of(parts.buffers.cell_pages),
            eps=parts.model.spec.eps,
            q_scale=mixer.scale,
            **shared,
            **self._ropes.fields(mixer.rope),
        )
        parts.program.keep.append(self._ropes)
        job = parts.program.add(f"{layer}.heads", heads.address, args)
        parts.chunks.tokens.per_row.append(job)


class AttentionRoom:
    """Attention jobs, and their workspaces and partial results: layers of the same sizes share."""

    def __init__(self, parts: MixerParts) -> None:
        self._parts = parts
        self._workspaces: dict[tuple[int, int, int], NDArray[Any]] = {}
        self._partials: dict[int, NDArray[Any]] = {}

    def fields(
        self, n_head: int, n_head_kv: int, dim_k: int, shared: dict[str, int]
    ) -> dict[str, int]:
        """The fields of `ATTENTION` that say where the step's inputs and the room are."""
        b, program, padded = self._parts.buffers, self._parts.program, shared["dim_v_padded"]
        partial_bytes = n_head * (PARTIAL_HEAD + 4 * padded)
        if partial_bytes not in self._partials:
            self._partials[partial_bytes] = aligned((b.max_partials, partial_bytes), np.uint8)
            program.keep.append(self._partials[partial_bytes])
        key = (n_head, n_head_kv, max(padded, dim_k))
        if key not in self._workspaces:
            self._workspaces[key], arrays = attention_workspaces(self._parts.n_workers, *key)
            program.keep += [self._workspaces[key], *arrays]
        return {
            "items": address_of(b.items),
            "sequences": address_of(b.sequences),
            "page_tables": address_of(b.page_tables),
            "table_stride": b.page_tables.strides[0],
            "partials": address_of(self._partials[partial_bytes]),
            "partial_bytes": partial_bytes,
            "partial_spans": address_of(b.partial_spans),
            "workspaces": address_of(self._workspaces[key]),
        }

    def add(self, layer: int, args: NDArray[Any], n_head_kv: int, rows: StepRows) -> None:
        """Add the jobs of an `ATTENTION` record."""
        program, chunks = self._parts.program, self._parts.chunks
        is_general = any(args[name][0] for name in ("window", "keys_are_rows", "masks"))
        kernel = general_attention if is_general else attention
        job = program.add(f"{layer}.attention", kernel.address, args)
        items = chunks.per_output_item if rows is chunks.outputs else chunks.per_item
        items.append((job, n_head_kv))
        job = program.add(f"{layer}.attention_end", attention_end.address, args)
        chunks.per_partial.append(job)
