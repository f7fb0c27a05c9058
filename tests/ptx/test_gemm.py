"""What is particular to the gemm kernels; their results are in test_kernels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ops.gpu.gemm import TILE_TOKENS, best_tile, gemm, gemm_tile, shipped_tiles
from ops.gpu.gemm_tile import Layout, most_tiles
from ops.quants import FORMATS

HOPPER_SHARED, SMALLEST_SHARED = 227 << 10, 99 << 10
"""Bytes of shared memory that a block can have on compute capability 9.0, and on 8.6 to 12.0."""


def test_every_tile_fits_a_multiprocessor() -> None:
    for tile in shipped_tiles():
        assert tile.shared_bytes <= HOPPER_SHARED, tile
        assert tile.threads <= 512


def test_the_sums_at_the_end_fit_in_front_of_what_is_still_needed() -> None:
    for tile in shipped_tiles():
        at = Layout(tile)
        assert tile.split * tile.tokens * at.sum_bytes <= at.slots, tile


def test_prompt_tiles_of_the_usual_formats_leave_room_for_two_blocks() -> None:
    for name in ("Q4_K", "Q6_K"):
        tile = gemm_tile(FORMATS[name], 64)
        assert tile.min_blocks == 2
        assert 2 * (tile.shared_bytes + 1024) <= HOPPER_SHARED + 1024


def test_parts_of_a_layout_follow_each_other() -> None:
    for name in ("Q2_K", "Q4_K", "Q5_1", "IQ3_S", "NVFP4"):
        at = Layout(gemm_tile(FORMATS[name], 16))
        assert 0 < at.x < at.x_scales < at.x_sums <= at.stage_bytes
        assert 2 * at.stage_bytes <= at.slots < at.out_rows < at.table <= at.n_bytes
        assert at.row_pitch % 32 == at.pitch % 32 == 16


def test_grid_has_room_for_every_division_into_groups() -> None:
    rng = np.random.default_rng(0)
    for n_slots in (1, 7, 40, 300):
        for n_groups in (1, 5, 128):
            counts = rng.multinomial(n_slots, np.ones(n_groups) / n_groups)
            for tokens in TILE_TOKENS:
                assert -(-counts // tokens).sum() <= most_tiles(tokens, n_slots, n_groups)
    assert most_tiles(8, 64, 0) == 8
    assert gemm_tile(FORMATS["Q4_K"], 8).grid(100, 9, 0, 2) == (4, 2, 2)


def test_many_rows_are_for_large_products_of_32_slots() -> None:
    fmt = FORMATS["Q4_K"]
    assert best_tile(fmt, 151936, 31, shared_bytes=HOPPER_SHARED).rows == 64
    assert best_tile(fmt, 4096, 31, shared_bytes=HOPPER_SHARED) == gemm_tile(fmt, 32)
    assert gemm_tile(fmt, 64, many_rows=True) == gemm_tile(fmt, 64)
    assert gemm_tile(FORMATS["NVFP4"], 32, many_rows=True) == gemm_tile(FORMATS["NVFP4"], 32)


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "Q5_K"])
def test_formats_of_many_registers_have_tall_blocks_where_they_fit(name: str) -> None:
    fmt = FORMATS[name]
    assert best_tile(fmt, 2048, 2048, shared_bytes=HOPPER_SHARED).rows == 128
    assert best_tile(fmt, 2048, 2048, shared_bytes=163 << 10) == gemm_tile(fmt, 64)
    assert best_tile(fmt, 256, 512, shared_bytes=HOPPER_SHARED) == gemm_tile(fmt, 64), "few blocks"
    assert gemm_tile(fmt, 32, many_rows=True).threads <= 256


def test_small_units_have_three_buffers_where_they_fit() -> None:
    fmt = FORMATS["IQ4_NL"]
    usual = best_tile(fmt, 4096, 512, shared_bytes=HOPPER_SHARED)
    assert usual == gemm_tile(fmt, 64) and usual.stages == 3
    assert best_tile(fmt, 4096, 512, shared_bytes=SMALLEST_SHARED) == replace(usual, stages=2)


def test_copies_of_eight_groups_use_different_banks() -> None:
    for tile in shipped_tiles():
        if tile.fmt.unit_elems < 256:
            words = Layout(tile).group_pitch // 4 * np.arange(8)[:, None] + np.arange(4)
            assert len(np.unique(words % 32)) == 32, tile


def test_slots_of_a_tile_are_those_of_a_group() -> None:
    fmt = FORMATS["Q6_K"]
    assert best_tile(fmt, 768, 248, 128, shared_bytes=HOPPER_SHARED).tokens == 8
    assert best_tile(fmt, 768, 8 * 2048, 128, shared_bytes=HOPPER_SHARED).tokens == 64


def test_cards_with_less_shared_memory_get_smaller_tiles() -> None:
    for tile in shipped_tiles():
        for n_slots in (8, 16, 31, 512):
            best = best_tile(tile.fmt, 4096, n_slots, shared_bytes=SMALLEST_SHARED)
            assert best.shared_bytes <= SMALLEST_SHARED


def test_what_there_is_not_is_refused() -> None:
    with pytest.raises(LookupError, match="no gemm for F32; there are Q4_0"):
        gemm_tile(FORMATS["F32"], 8)
    with pytest.raises(LookupError, match="no tile of 24 slots"):
        gemm_tile(FORMATS["Q4_K"], 24)


def test_dense_weights_travel_before_the_predecessor_is_waited_for() -> None:
    text = gemm(gemm_tile(FORMATS["Q4_K"], 8), overlapped=True).text
    assert text.index("cp.async.cg") < text.index("griddepcontrol.wait") < text.index("ld.global")
