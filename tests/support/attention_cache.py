"""Paged attention without an engine: a sequence's q, k, v, and one layer of pages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ops.cpu.attention import (
    ATTENTION,
    ITEM,
    PARTIAL_HEAD,
    attention,
    attention_end,
    attention_workspaces,
)
from ops.cpu.general_attention import general_attention
from ops.cpu.heads import HEADS, heads
from ops.cpu.kv_layout import BLOCK_TOKENS, PAGE_TOKENS, PageLayout
from ops.cpu.program import aligned
from tests.support.jobs import job_args, run_job

F32 = NDArray[np.float32]


@dataclass
class Cache:
    """One layer of pages in random order, and a sequence's worth of q, k, v."""

    cache_type: str
    n_head: int = 4
    n_head_kv: int = 2
    dim_k: int = 64
    dim_v: int = 64
    n_tokens: int = 70
    window: int = 0
    value_scale: float = 1.0
    with_sinks: bool = False
    keep: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.n_tokens)
        n = self.n_tokens
        self.q = rng.normal(size=(n, self.n_head, self.dim_k)).astype(np.float32)
        self.k = rng.normal(size=(n, self.n_head_kv, self.dim_k)).astype(np.float32)
        self.v = rng.normal(size=(n, self.n_head_kv, self.dim_v)).astype(np.float32)
        n_pages = -(-n // PAGE_TOKENS) + 2
        self.table = rng.permutation(n_pages).astype(np.int32)[None, : -(-n // PAGE_TOKENS)].copy()
        k_layout, v_layout = (PageLayout(self.cache_type, d) for d in (self.dim_k, self.dim_v))
        self.layouts = (k_layout, v_layout)
        self.pages = [
            aligned((n_pages, self.n_head_kv, la.head_bytes), np.uint8) for la in self.layouts
        ]
        for pages in self.pages:
            pages[:] = 0xFF  # NaN everywhere: nothing unwritten may be read
        self.positions = np.arange(n, dtype=np.int32)
        self.scale = self.dim_k**-0.5
        self.sinks = rng.normal(size=self.n_head).astype(np.float32) * 3

    def fields(self) -> dict[str, Any]:
        made = {"dim_v_padded": self.layouts[1].padded_dim, "positions": self.positions}
        for side, pages, layout in zip("kv", self.pages, self.layouts, strict=True):
            made[f"{side}_cache"], made[f"{side}_pages"] = layout.code, pages
            made[f"{side}_page_bytes"], made[f"{side}_head_bytes"] = (
                pages[0].nbytes,
                layout.head_bytes,
            )
        for name in ("n_head", "n_head_kv", "dim_k", "dim_v"):
            made[name] = getattr(self, name)
        return made

    def store(self, **fields: Any) -> F32:
        """Run `heads` on all tokens; the queries it leaves."""
        n = self.n_tokens
        parts = (self.q, self.k, self.v)
        rows = np.concatenate([part.reshape(n, -1) for part in parts], 1)
        widths = [part[0].size for part in parts]
        cells = self.table[0][self.positions // PAGE_TOKENS]
        args = job_args(
            HEADS, q=rows, row_stride=rows.strides[0], cell_pages=cells, q_scale=self.scale,
            eps=1e-6, **self.fields(), **fields,
        )  # fmt: skip
        args["k"] = rows.ctypes.data + 4 * widths[0]
        args["v"] = args["k"] + 4 * widths[1]
        run_job(heads, args, n)
        return np.ascontiguousarray(rows[:, : widths[0]])

    def attend(self, queries: F32, items: list[tuple[int, ...]], n_partials: int = 0) -> F32:
        """Run the items; merge partial results of every token if there are any."""
        n = self.n_tokens
        out = np.full((n, self.n_head * self.dim_v), np.nan, np.float32)
        work = np.array(items, ITEM)
        sequences = np.zeros(n, np.int32)
        padded = self.layouts[1].padded_dim
        partial_bytes = self.n_head * (PARTIAL_HEAD + 4 * padded)
        partials = np.zeros((n_partials, partial_bytes), np.uint8)
        workspaces, arrays = attention_workspaces(1, self.n_head, self.n_head_kv, padded)
        for array in arrays:
            array[:] = 77
        args = job_args(
            ATTENTION, items=work, q=queries, q_stride=queries.strides[0], out=out,
            out_stride=out.strides[0], sequences=sequences, page_tables=self.table,
            table_stride=self.table.strides[0], partials=partials, partial_bytes=partial_bytes,
            workspaces=workspaces, row_dim=padded, window=self.window,
            value_scale=self.value_scale, **self.fields(),
        )  # fmt: skip
        if self.with_sinks:
            args["sinks"] = self.sinks.ctypes.data
        kernel = general_attention if self.window else attention
        run_job(kernel, args, len(items) * self.n_head_kv)
        if n_partials:
            spans = partial_spans(items, n)
            args["partial_spans"] = spans.ctypes.data
            run_job(attention_end, args, n)
        return out

    def expected(self) -> NDArray[np.float64]:
        group = self.n_head // self.n_head_kv
        k, v = (np.repeat(a.astype(np.float64), group, 1) for a in (self.k, self.v))
        scores = np.einsum("qhd,khd->hqk", self.q.astype(np.float64), k) * self.scale
        age = np.arange(self.n_tokens)[:, None] - np.arange(self.n_tokens)
        seen = (age >= 0) & (age < (self.window or self.n_tokens))
        p = np.where(seen, np.exp(scores), 0.0)
        total = p.sum(-1, keepdims=True)
        if self.with_sinks:
            total = total + np.exp(self.sinks.astype(np.float64))[:, None, None]
        mixed = np.einsum("hqk,khd->qhd", p / total, np.nan_to_num(v))
        return self.value_scale * mixed.reshape(self.n_tokens, -1)


def tiles(n: int, size: int) -> list[tuple[int, ...]]:
    """Work items of `size` tokens, each over all its blocks."""
    return [
        (t, min(size, n - t), 0, (min(t + size, n) - 1) // BLOCK_TOKENS + 1, -1)
        for t in range(0, n, size)
    ]


def singles(n: int) -> list[tuple[int, ...]]:
    """Work items of one token."""
    return [(t, 1, 0, t // BLOCK_TOKENS + 1, -1) for t in range(n)]


def split_by_block(tokens: list[int]) -> list[tuple[int, ...]]:
    """Work items of one token and block, whose results are merged."""
    items: list[tuple[int, ...]] = []
    for token in tokens:
        for block in range(token // BLOCK_TOKENS + 1):
            items.append((token, 1, block, block + 1, len(items)))
    return items


def partial_spans(items: list[tuple[int, ...]], n_tokens: int) -> NDArray[np.int32]:
    """i32[n_tokens][2]: the first partial result of each token and how many it has."""
    spans = np.zeros((n_tokens, 2), np.int32)
    for token in sorted({item[0] for item in items}):
        mine = [item for item in items if item[0] == token]
        spans[token] = min(i[4] for i in mine), sum(i[3] - i[2] for i in mine)
    return spans
