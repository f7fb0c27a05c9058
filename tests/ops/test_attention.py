"""Paged attention and the store into pages, against NumPy float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ops.cpu import heads as heads_job
from ops.cpu.attention import (
    ATTENTION,
    ITEM,
    PARTIAL_HEAD,
    attention,
    attention_end,
    attention_workspaces,
    tile_tokens,
)
from ops.cpu.heads import HEADS, heads
from ops.cpu.kv_layout import BLOCK_TOKENS, PAGE_TOKENS, PageLayout
from ops.cpu.program import aligned
from tests.support.jobs import job_args, run_job

F32 = NDArray[np.float32]
TOLERANCE = {"f32": 2e-6, "f16": 2e-3, "q8_0": 3e-2}


@dataclass
class Cache:
    """One layer of pages in random order, and a sequence's worth of q, k, v."""

    cache_type: str
    n_head: int = 4
    n_head_kv: int = 2
    dim_k: int = 64
    dim_v: int = 64
    n_tokens: int = 70
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
            workspaces=workspaces, value_scale=1, **self.fields(),
        )  # fmt: skip
        run_job(attention, args, len(items) * self.n_head_kv)
        if n_partials:
            tokens = sorted({item[0] for item in items})
            spans = np.zeros((n, 2), np.int32)
            for token in tokens:
                mine = [item for item in items if item[0] == token]
                spans[token] = min(i[4] for i in mine), sum(i[3] - i[2] for i in mine)
            args["partial_spans"] = spans.ctypes.data
            run_job(attention_end, args, n)
        return out

    def expected(self) -> NDArray[np.float64]:
        group = self.n_head // self.n_head_kv
        k, v = (np.repeat(a.astype(np.float64), group, 1) for a in (self.k, self.v))
        scores = np.einsum("qhd,khd->hqk", self.q.astype(np.float64), k) * self.scale
        scores = np.where(np.tri(self.n_tokens, dtype=bool)[None], scores, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        return np.einsum("hqk,khd->qhd", p, v).reshape(self.n_tokens, -1)


def tiles(n: int, size: int) -> list[tuple[int, ...]]:
    return [
        (t, min(size, n - t), 0, (min(t + size, n) - 1) // BLOCK_TOKENS + 1, -1)
        for t in range(0, n, size)
    ]


def singles(n: int) -> list[tuple[int, ...]]:
    return [(t, 1, 0, t // BLOCK_TOKENS + 1, -1) for t in range(n)]


@pytest.mark.parametrize("cache_type", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize(("n_head", "n_head_kv"), [(4, 4), (4, 1), (6, 2)])
def test_attention(cache_type: str, n_head: int, n_head_kv: int) -> None:
    cache = Cache(cache_type, n_head, n_head_kv)
    queries = cache.store()
    tiled = cache.attend(queries, tiles(cache.n_tokens, tile_tokens(n_head, n_head_kv)))
    assert np.abs(tiled - cache.expected()).max() < TOLERANCE[cache_type]
    assert np.array_equal(tiled, cache.attend(queries, singles(cache.n_tokens)))


@pytest.mark.parametrize(("dim_k", "dim_v"), [(16, 16), (24, 16), (80, 24), (192, 128)])
def test_heads_of_any_even_width(dim_k: int, dim_v: int) -> None:
    cache = Cache("f32", dim_k=dim_k, dim_v=dim_v, n_tokens=40)
    out = cache.attend(cache.store(), tiles(40, 8))
    assert np.abs(out - cache.expected()).max() < TOLERANCE["f32"]


def test_a_group_wider_than_a_tile() -> None:
    cache = Cache("f16", n_head=40, n_head_kv=1, dim_k=32, dim_v=32, n_tokens=40)
    out = cache.attend(cache.store(), tiles(40, tile_tokens(40, 1)))
    assert np.abs(out - cache.expected()).max() < TOLERANCE["f16"]


def test_long_contexts_are_cut_into_blocks_without_changing_bits() -> None:
    cache = Cache("f16", n_head=2, n_head_kv=1, dim_k=32, dim_v=32, n_tokens=2 * BLOCK_TOKENS + 40)
    queries = cache.store()
    n = cache.n_tokens
    tiled = cache.attend(queries, tiles(n, 16))
    assert np.abs(tiled - cache.expected()).max() < TOLERANCE["f16"]
    items, n_partials = [], 0
    chosen = [0, 31, 511, 512, 513, n - 1]
    for token in chosen:
        for block in range(token // BLOCK_TOKENS + 1):
            items.append((token, 1, block, block + 1, n_partials))
            n_partials += 1
    split = cache.attend(queries, items, n_partials)
    assert np.array_equal(split[chosen], tiled[chosen])


def test_q8_keeps_a_nan_a_nan() -> None:
    """A poisoned key must not become a number."""
    cache = Cache("q8_0", n_tokens=3)
    cache.k[1, 0, 5] = np.nan
    out = cache.attend(cache.store(), singles(3)).reshape(3, 4, 64)
    assert np.isnan(out[1, :2]).all()
    assert np.isfinite(out[0]).all()
    assert np.isfinite(out[1, 2:]).all()


@pytest.mark.parametrize("kind", [heads_job.ROPE_NEOX, heads_job.ROPE_NORM])
@pytest.mark.parametrize("n_rot", [16, 64])
@pytest.mark.parametrize("norm", [heads_job.NORM_NONE, heads_job.NORM_HEAD, heads_job.NORM_ROW])
def test_rope_and_head_norms(kind: int, n_rot: int, norm: int) -> None:
    cache = Cache("f32", n_tokens=5)
    rng = np.random.default_rng(9)
    widths = (64, 64) if norm == heads_job.NORM_HEAD else (4 * 64, 2 * 64)
    weights = [rng.normal(size=w).astype(np.float32) for w in widths]
    angles = np.arange(5)[:, None] * 10000.0 ** (-np.arange(n_rot // 2) * 2 / n_rot)
    cos, sin = (f(angles).astype(np.float32) for f in (np.cos, np.sin))
    queries = cache.store(
        norm_kind=norm, q_norm=weights[0], k_norm=weights[1], rope_kind=kind, n_rot=n_rot,
        cosines=cos, sines=sin,
    )  # fmt: skip
    q = _rope(_norm(cache.q, norm, weights[0]), angles, kind, n_rot)
    assert np.allclose(queries.reshape(q.shape), q * cache.scale, atol=2e-6)
    k = _rope(_norm(cache.k, norm, weights[1]), angles, kind, n_rot)
    page = cache.pages[0][cache.table[0, 0]].view(np.float32).reshape(2, 64, PAGE_TOKENS)
    assert np.allclose(page[:, :, :5].transpose(2, 0, 1), k, atol=2e-6)


def _norm(x: F32, kind: int, weight: F32) -> NDArray[np.float64]:
    wide = x.astype(np.float64)
    if kind == heads_job.NORM_ROW:
        wide = wide.reshape(len(x), -1)
    if kind != heads_job.NORM_NONE:
        wide = wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-6) * weight
    return wide.reshape(x.shape)


def _rope(
    x: NDArray[np.float64], angles: NDArray[np.float64], kind: int, n_rot: int
) -> NDArray[np.float64]:
    out = x.copy()
    half = n_rot // 2
    a, b = (slice(0, half), slice(half, n_rot))
    if kind == heads_job.ROPE_NORM:
        a, b = slice(0, n_rot, 2), slice(1, n_rot, 2)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    out[..., a] = x[..., a] * cos - x[..., b] * sin
    out[..., b] = x[..., a] * sin + x[..., b] * cos
    return out
