"""IndexerJobs: which blocks of tokens the attention of a layer reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ops.cpu.indexer import (
    INDEXER,
    index_keys,
    index_queries,
    score_blocks,
    select_blocks,
)
from ops.cpu.job import record
from ops.cpu.kv_layout import PAGE_TOKENS
from ops.cpu.program import address_of, aligned
from runtime.engine.activation_rows import ActivationRows, Rows
from runtime.engine.mixer_jobs import MixerParts
from runtime.engine.rope_tables import RopeTables
from runtime.models.indexer import IndexerSpec

SLICES_PER_WORKER = 2  # of the blocks of a token, so that a decode step uses every core


@dataclass(frozen=True)
class PreparedIndexer:
    """The rows of an indexer's products, and the parts that fill them from the layer's input.

    second  the part that fills the queries, where they are made from something else
    """

    query: Rows
    key: Rows
    gate: Rows | None
    weight: Rows | None
    products: list[NDArray[Any]]
    second: list[NDArray[Any]]


class IndexerJobs:
    """Adds the jobs between the first products of a layer and its attention."""

    def __init__(self, parts: MixerParts, ropes: RopeTables) -> None:
        self._parts, self._ropes = parts, ropes
        self._rows: dict[tuple[str, int], Rows] = {}
        self._rooms: dict[tuple[str, int], NDArray[Any]] = {}
        parts.program.keep += [self._rows, self._rooms, ropes]

    def prepare(
        self, indexer: IndexerSpec, x: ActivationRows, narrow: ActivationRows | None = None
    ) -> PreparedIndexer:
        """Ask the layer's input x for what the products need.

        narrow: what queries are made from, where it is not x.
        """
        part = self._parts.matrices.part
        query = self._room("query", indexer.query.n_out)
        key = self._room("key", indexer.key.n_out)
        products = [part(indexer.key, x, key)]
        second = []
        if narrow is None:
            products.append(part(indexer.query, x, query))
        else:
            second.append(part(indexer.query, narrow, query))
        gate = weight = None
        if indexer.pool_gate is not None:
            gate = self._room("gate", indexer.pool_gate.n_out)
            products.append(part(indexer.pool_gate, x, gate))
        if indexer.weight is not None:
            weight = self._room("weight", indexer.weight.n_out)
            products.append(part(indexer.weight, x, weight))
        return PreparedIndexer(query, key, gate, weight, products, second)

    def add(self, layer: int, indexer: IndexerSpec, prepared: PreparedIndexer) -> dict[str, int]:
        """Add the jobs; the fields of `ops.cpu.attention.ATTENTION` that say what is read."""
        parts = self._parts
        b, vector = parts.buffers, parts.matrices.vector
        max_blocks = -(-b.n_positions // indexer.block)
        scores = self._array("scores", (parts.n_tokens, max_blocks), np.float32)
        scratch = self._array("scratch", (parts.n_workers, max_blocks), np.float32)
        n_slices = SLICES_PER_WORKER * parts.n_workers
        selection = self.selection()
        index = parts.pages.layers[layer].index
        rows = {"query": prepared.query, "key": prepared.key}
        rows |= {"gate": prepared.gate} if prepared.gate is not None else {}
        rows |= {"weight": prepared.weight} if prepared.weight is not None else {}
        args = record(
            INDEXER,
            spans=address_of(b.spans),
            states=parts.states.address(layer),
            state_bytes=parts.states.slot_bytes,
            positions=address_of(b.positions),
            sequences=address_of(b.sequences),
            page_tables=address_of(b.page_tables),
            table_stride=b.page_tables.strides[0],
            pages=address_of(index),
            page_bytes=index.strides[0],
            error=parts.program.error_address,
            n_head=indexer.n_head,
            dim=indexer.head_dim,
            block=indexer.block,
            n_best=indexer.n_best,
            query_norm=vector(indexer.query_norm),
            key_norm=vector(indexer.key_norm),
            key_bias=vector(indexer.key_bias),
            pool_bias=vector(indexer.pool_bias),
            scores=address_of(scores),
            max_blocks=max_blocks,
            n_slices=n_slices,
            scratch=address_of(scratch),
            eps=parts.model.spec.eps,
            key_eps=indexer.key_eps,
            scale=indexer.scale,
            **{name: made.address for name, made in rows.items()},
            **{f"{name}_stride": made.stride for name, made in rows.items()},
            **selection,
            **self._ropes.fields(indexer.rope),
        )
        parts.program.keep += [prepared, parts.states]
        job = parts.program.add(f"{layer}.index_keys", index_keys.address, args)
        parts.chunks.per_sequence.append((job, 1))
        tokens = parts.chunks.tokens
        job = parts.program.add(f"{layer}.index_queries", index_queries.address, args)
        tokens.per_row.append(job)
        job = parts.program.add(f"{layer}.score_blocks", score_blocks.address, args)
        tokens.slices.append((job, n_slices))
        job = parts.program.add(f"{layer}.select_blocks", select_blocks.address, args)
        tokens.per_row.append(job)
        return selection

    def selection(self) -> dict[str, int]:
        """What the last indexer chose, for a layer that reads the same: see `add`."""
        n_tokens = self._parts.n_tokens
        n_pages = -(-self._parts.buffers.n_positions // PAGE_TOKENS)
        masks = self._array("masks", (n_tokens, n_pages), np.int32)
        reads_all = self._array("reads_all", (n_tokens,), np.int32)
        return {
            "masks": address_of(masks),
            "mask_stride": masks.strides[0],
            "reads_all": address_of(reads_all),
        }

    def _room(self, role: str, width: int) -> Rows:
        """f32 rows that layers of the same sizes share."""
        return self._rows.setdefault((role, width), Rows(self._parts.n_tokens, 4 * width))

    def _array(self, role: str, shape: tuple[int, ...], dtype: type) -> NDArray[Any]:
        key = (role, int(np.prod(shape)))
        if key not in self._rooms:
            self._rooms[key] = aligned(shape, dtype)
        return self._rooms[key]
