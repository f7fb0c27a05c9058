"""Paged attention and the store into pages, against NumPy float64."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from ops.cpu import heads as heads_job
from ops.cpu.attention import tile_tokens
from ops.cpu.kv_layout import BLOCK_TOKENS, PAGE_TOKENS
from tests.support.attention_cache import Cache, singles, split_by_block, tiles

F32 = NDArray[np.float32]
TOLERANCE = {"f32": 2e-6, "f16": 2e-3, "q8_0": 3e-2}


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
    chosen = [0, 31, 511, 512, 513, n - 1]
    items = split_by_block(chosen)
    split = cache.attend(queries, items, len(items))
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
