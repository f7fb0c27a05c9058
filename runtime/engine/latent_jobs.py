"""LatentJobs: latent attention as jobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ops.arithmetic import activation_layout
from ops.cpu.attention import ATTENTION
from ops.cpu.job import record
from ops.cpu.latent import (
    HEAD_PRODUCTS,
    LATENT_HEADS,
    head_products,
    head_products_scratch,
    latent_heads,
)
from ops.cpu.matmul import SCRATCH_BYTES
from ops.cpu.program import address_of, aligned
from ops.quants.block import ACTIVATION_GROUP
from runtime.engine.activation_rows import ActivationRows, Rows
from runtime.engine.attention_jobs import AttentionRoom
from runtime.engine.indexer_jobs import IndexerJobs, PreparedIndexer
from runtime.engine.matrix_jobs import rows_per_chunk
from runtime.engine.mixer_jobs import MixerParts
from runtime.engine.rope_tables import RopeTables
from runtime.engine.step_chunks import StepRows
from runtime.models.latent_attention import LatentAttentionSpec
from runtime.models.linear import Linear

HEADS_TOGETHER = 8
"""Most heads of one attention chunk: they share what they read, others run beside them."""


def head_groups(n_head: int) -> int:
    """How many chunks the heads of a token are cut into, equal ones."""
    return n_head // max(d for d in range(1, HEADS_TOGETHER + 1) if n_head % d == 0)


@dataclass(frozen=True)
class Prepared:
    """What a layer's first products read and write.

    rows   [latent | key part] of each token, padded with zeros
    """

    q: Rows
    rows: Rows
    narrow: ActivationRows | None
    first: list[NDArray[Any]]
    second: list[NDArray[Any]]
    index: PreparedIndexer | None = None


class LatentJobs:
    """The jobs of layers with `LatentAttentionSpec`; see `MixerJobs`."""

    def __init__(self, parts: MixerParts, ropes: RopeTables, indexers: IndexerJobs) -> None:
        self._parts, self._ropes, self._indexers = parts, ropes, indexers
        self._shared: dict[tuple[str, int], Any] = {}
        self._room = AttentionRoom(parts)
        parts.program.keep += [self._shared, ropes]

    def prepare(self, mixer: LatentAttentionSpec, x: ActivationRows) -> Prepared:
        """The rows of queries and of latents, and the products that fill them."""
        parts = self._parts
        rows = self._rows("row", _padded(mixer.dim_k))
        q = self._rows("q", mixer.n_head * (mixer.dim_nope + mixer.dim_rope))
        latent = parts.matrices.part(mixer.latent, x, rows)
        if mixer.query_norm is None:
            query = parts.matrices.part(mixer.query[0], x, q)
            return Prepared(q, rows, None, [query, latent], [])
        narrow = self._activations("narrow", mixer.query[0].n_out)
        query = parts.matrices.part(mixer.query[0], x, narrow.f32)
        second = parts.matrices.part(mixer.query[1], narrow, q)
        if mixer.indexer is None:
            return Prepared(q, rows, narrow, [query, latent], [second])
        index = self._indexers.prepare(mixer.indexer, x, narrow)
        first = [query, latent, *index.products]
        return Prepared(q, rows, narrow, first, [second, *index.second], index)

    def add(
        self, layer: int, mixer: LatentAttentionSpec, prepared: Prepared, rows: StepRows
    ) -> dict[str, int]:
        """See `MixerJobs.add`."""
        parts, tokens = self._parts, self._parts.chunks.tokens
        parts.matrices.products(f"{layer}.query_latent", prepared.first, tokens)
        if prepared.narrow is not None and mixer.query_norm is not None:
            narrow = prepared.narrow
            name = f"{layer}.query_norm"
            parts.row_jobs.norm(name, mixer.query_norm, narrow.f32, narrow, tokens)
            parts.matrices.products(f"{layer}.query", prepared.second, tokens)
        queries = self._rows("queries", mixer.n_head * _padded(mixer.dim_k))
        self._heads(layer, mixer, prepared, queries)
        dim_q = mixer.dim_nope + mixer.dim_rope
        from_q, to_queries = (prepared.q, 4 * dim_q), (queries, 4 * _padded(mixer.dim_k))
        self._products(f"{layer}.key_up", mixer.key_up, from_q, to_queries, tokens)
        mixed = self._rows("mixed", mixer.n_head * mixer.dim_latent)
        selection = self._selection(layer, mixer, prepared)
        self._attention(layer, mixer, queries, mixed, rows, selection)
        values = self._activations("values", mixer.n_head * mixer.dim_v)
        to_values = (values.f32, 4 * mixer.dim_v)
        from_mixed = (mixed, 4 * mixer.dim_latent)
        self._products(f"{layer}.value_up", mixer.value_up, from_mixed, to_values, rows)
        return parts.output(f"{layer}.attention_", mixer.output, values, rows)

    def _heads(
        self, layer: int, mixer: LatentAttentionSpec, prepared: Prepared, queries: Rows
    ) -> None:
        parts = self._parts
        pages = parts.pages.fields(layer)
        args = record(
            LATENT_HEADS,
            q=prepared.q.address,
            q_stride=prepared.q.stride,
            n_head=mixer.n_head,
            dim_nope=mixer.dim_nope,
            dim_rope=mixer.dim_rope,
            dim_latent=mixer.dim_latent,
            row=prepared.rows.address,
            row_stride=prepared.rows.stride,
            row_dim=_padded(mixer.dim_k),
            norm=parts.matrices.vector(mixer.latent_norm),
            queries=queries.address,
            queries_stride=queries.stride,
            positions=address_of(parts.buffers.positions),
            cell_pages=address_of(parts.buffers.cell_pages),
            error=parts.program.error_address,
            cache=pages["k_cache"],
            pages=pages["k_pages"],
            page_bytes=pages["k_page_bytes"],
            eps=parts.model.spec.eps,
            q_scale=mixer.scale,
            **self._ropes.fields(mixer.rope),
        )
        job = parts.program.add(f"{layer}.heads", latent_heads.address, args)
        parts.chunks.tokens.per_row.append(job)

    def _selection(
        self, layer: int, mixer: LatentAttentionSpec, prepared: Prepared
    ) -> dict[str, int]:
        """The fields of attention that say which keys are read; none: all."""
        if mixer.indexer is not None and prepared.index is not None:
            return self._indexers.add(layer, mixer.indexer, prepared.index)
        return self._indexers.selection() if mixer.reads_as_before else {}

    def _attention(
        self,
        layer: int,
        mixer: LatentAttentionSpec,
        queries: Rows,
        out: Rows,
        rows: StepRows,
        selection: dict[str, int],
    ) -> None:
        """Attention whose groups of heads all read the one cached row of each token."""
        parts, n_groups, dim = self._parts, head_groups(mixer.n_head), _padded(mixer.dim_k)
        pages = parts.pages.fields(layer) | {
            "k_head_bytes": 0,
            "v_head_bytes": 0,
            "dim_v_padded": _padded(mixer.dim_latent),
        }
        args = record(
            ATTENTION,
            q=queries.address,
            q_stride=queries.stride,
            out=out.address,
            out_stride=out.stride,
            n_head=mixer.n_head,
            n_head_kv=n_groups,
            dim_k=dim,
            dim_v=mixer.dim_latent,
            row_dim=dim,
            keys_are_rows=1,
            value_scale=1.0,
            positions=address_of(parts.buffers.positions),
            error=parts.program.error_address,
            **selection,
            **pages,
            **self._room.fields(mixer.n_head, n_groups, dim, pages),
        )
        self._room.add(layer, args, n_groups, rows)

    def _products(
        self,
        name: str,
        linear: Linear,
        x: tuple[Rows, int],
        y: tuple[Rows, int],
        rows: StepRows,
    ) -> None:
        """From the f32 rows x to y, of all tokens; each with the bytes of a head."""
        parts = self._parts
        weight = parts.model.weights[linear.weight]
        kind = weight.format.activation
        record_bytes = activation_layout(kind, linear.n_in)[2]
        n_bytes = head_products_scratch(record_bytes) + SCRATCH_BYTES
        scratch = self._room_of("scratch", n_bytes)
        n_head = linear.n_expert or 1
        rows_each = rows_per_chunk(linear.n_out, weight.row_bytes, parts.n_workers, n_head)
        args = record(
            HEAD_PRODUCTS,
            matrix=address_of(parts.matrices.matrix(linear)),
            n_rows=linear.n_out,
            n_in=linear.n_in,
            rows_per_chunk=rows_each,
            group=ACTIVATION_GROUP[kind],
            tokens=parts.row_jobs.tokens_of(rows),
            n_tokens=address_of(rows.n_rows),
            x=x[0].address,
            x_stride=x[0].stride,
            x_head_bytes=x[1],
            y=y[0].address,
            y_stride=y[0].stride,
            y_head_bytes=y[1],
            record_bytes=record_bytes,
            scratch=address_of(scratch),
            scratch_bytes=scratch.strides[0],
        )
        n_chunks = n_head * -(-linear.n_out // rows_each)
        job = parts.program.add(name, head_products.address, args, n_chunks)
        rows.if_any.append((job, n_chunks))

    def _rows(self, role: str, width: int) -> Rows:
        """f32 rows that layers of the same sizes share."""
        made: Rows = self._shared.setdefault((role, width), Rows(self._parts.n_tokens, 4 * width))
        return made

    def _activations(self, role: str, width: int) -> ActivationRows:
        key = (role, width)
        made: ActivationRows = self._shared.setdefault(
            key, ActivationRows(self._parts.n_tokens, width)
        )
        return made

    def _room_of(self, role: str, n_bytes: int) -> NDArray[Any]:
        """Bytes of each worker."""
        room: NDArray[Any] = self._shared.setdefault(
            (role, n_bytes), aligned((self._parts.n_workers, -(-n_bytes // 64) * 64), np.uint8)
        )
        return room


def _padded(dim: int) -> int:
    """Numbers of a cached row or of a query, with the zeros behind them."""
    return -(-dim // 16) * 16
