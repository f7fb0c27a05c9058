"""Sliding windows, sinks and scaled values: against NumPy, and the same bits for every cut."""

from __future__ import annotations

import numpy as np
import pytest

from ops.cpu.attention import tile_tokens
from ops.cpu.kv_layout import BLOCK_TOKENS
from tests.support.attention_cache import Cache, singles, split_by_block, tiles

TOLERANCE = {"f32": 2e-6, "f16": 2e-3, "q8_0": 3e-2}


@pytest.mark.parametrize("cache_type", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize("window", [1, 2, 7, 31, 32, 33, 48, 70, 200])
@pytest.mark.parametrize(("n_head", "n_head_kv"), [(4, 4), (4, 1), (6, 2)])
def test_windows(cache_type: str, window: int, n_head: int, n_head_kv: int) -> None:
    cache = Cache(cache_type, n_head, n_head_kv, dim_k=32, dim_v=32, window=window)
    queries = cache.store()
    tiled = cache.attend(queries, tiles(cache.n_tokens, tile_tokens(n_head, n_head_kv)))
    assert np.abs(tiled - cache.expected()).max() < TOLERANCE[cache_type]
    for items in (singles(cache.n_tokens), tiles(cache.n_tokens, 3)):
        assert np.array_equal(tiled, cache.attend(queries, items))


@pytest.mark.parametrize("window", [1, 40, 128, 512, 600])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_windows_across_blocks(window: int, with_sinks: bool) -> None:
    n = 2 * BLOCK_TOKENS + 40
    cache = Cache("f32", 2, 1, dim_k=16, dim_v=16, n_tokens=n, window=window, with_sinks=with_sinks)
    queries = cache.store()
    tiled = cache.attend(queries, tiles(n, 16))
    assert np.abs(tiled - cache.expected()).max() < 5e-6
    chosen = [0, 31, 511, 512, 513, 551, 552, 1023, 1024, n - 1]
    items = split_by_block(chosen)
    split = cache.attend(queries, items, len(items))
    assert np.array_equal(split[chosen], tiled[chosen])


def test_keys_before_the_window_are_not_read() -> None:
    """Neither NaN keys and values there, nor pages that are gone."""
    cache = Cache("f32", window=20, n_tokens=100)
    clean = cache.attend(cache.store(), tiles(100, 8))
    cache.k[:40], cache.v[:40] = np.nan, np.nan
    queries = cache.store()
    cache.table[0, 0] = -1
    items = [item for item in tiles(100, 8) if item[0] >= 64]
    assert np.array_equal(cache.attend(queries, items)[64:], clean[64:])
    items = [item for item in singles(100) if item[0] >= 59]
    assert np.array_equal(cache.attend(queries, items)[59:], clean[59:])
    assert np.isnan(cache.attend(queries, singles(100)[58:59])[58]).all()


@pytest.mark.parametrize("sink", [-200.0, 0.0, 5.0, 200.0])
def test_sinks(sink: float) -> None:
    """From one that changes nothing to one that takes everything."""
    cache = Cache("f32", with_sinks=True, value_scale=0.612)
    cache.sinks[:] = sink
    cache.sinks[1] = 1.0
    out = cache.attend(cache.store(), tiles(cache.n_tokens, 8))
    assert np.abs(out - cache.expected()).max() < 2e-6
    cache.with_sinks = False
    plain = cache.attend(cache.store(), singles(cache.n_tokens)).reshape(-1, 4, 64)
    assert np.abs(out.reshape(-1, 4, 64)[:, 1] - plain[:, 1]).max() > 1e-3
