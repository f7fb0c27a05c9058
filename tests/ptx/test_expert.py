"""What is particular to the expert kernels; their results are in test_kernels."""

from __future__ import annotations

import pytest

from ops.gpu.expert import expert_down, expert_gate_up
from ops.gpu.linear import Segment, linear, segments
from ops.gpu.row_launch import (
    BLOCK_FORMATS,
    HALF_SHARED_BYTES,
    Multiprocessors,
    RowLaunch,
    best_team,
    down_launch,
    expert_launch,
    gate_up_launch,
    in_one_wave,
)
from ops.quants import FORMATS


def test_overlapped_kernels_wait_before_they_read() -> None:
    fmt, launch = FORMATS["Q4_K"], RowLaunch(16, block=64, overlapped=True)
    text = expert_gate_up(fmt, launch).text
    assert text.index("griddepcontrol.wait") < text.index("ld.global")
    text = expert_down(fmt, launch).text
    first_read_of_h = text.index("ld.global.v4.b32")
    assert text.index("cp.async.cg") < text.rindex("griddepcontrol.wait") < first_read_of_h


def test_blocks_without_an_expert_wait_too_before_they_leave() -> None:
    fmt, launch = FORMATS["Q4_K"], RowLaunch(16, overlapped=True)
    for make in (expert_gate_up, expert_down):
        text = make(fmt, launch).text
        assert text.index("griddepcontrol.wait") < text.index("ret;")


def test_team_leaves_the_fewest_lanes_idle() -> None:
    widths = (768, 1536, 2048, 4096)
    assert [best_team(FORMATS["Q4_K"], n) for n in widths] == [16, 8, 32, 32]
    assert [best_team(FORMATS["Q8_0"], n) for n in widths] == [16, 32, 32, 32]
    assert best_team(FORMATS["IQ3_S"], 2560) == 16, "two chunks, of eight units and of two"


def test_a_team_is_not_so_small_that_one_block_takes_a_multiprocessor() -> None:
    assert best_team(FORMATS["Q6_K"], 1536) == 32
    assert best_team(FORMATS["Q6_K"], 2560) == 16
    for name in BLOCK_FORMATS:
        for n in (256, 768, 1536, 2048, 4096, 14336):
            launch = RowLaunch(best_team(FORMATS[name], n))
            assert launch.shared_bytes(FORMATS[name], n) <= HALF_SHARED_BYTES


def test_blocks_of_all_slots_run_at_once() -> None:
    h200 = Multiprocessors(132, 232448)
    fmt = FORMATS["Q4_K"]
    for n_slots, rounds, n_blocks in ((8, 2, 384), (16, 4, 384), (64, 16, 384), (1, 1, 96)):
        launch = in_one_wave(gate_up_launch(fmt, 32), fmt, 2048, 768 * n_slots, h200)
        assert launch.rounds == rounds
        x, y = launch.grid(768, n_slots)
        assert x * y == n_blocks <= 3 * h200.count


def test_small_blocks_follow_each_other() -> None:
    h200 = Multiprocessors(132, 232448)
    for name in ("Q4_K", "IQ4_XS"):
        fmt = FORMATS[name]
        small = gate_up_launch(fmt, best_team(fmt, 2560))
        assert small.block == 128
        rounds = [in_one_wave(small, fmt, 2560, 6400 * n, h200).rounds for n in (1, 2)]
        assert rounds == [1, 2]


def test_blocks_with_copies_of_a_grid_are_not_small() -> None:
    fmt, one_block = FORMATS["IQ3_S"], 101376
    launch = gate_up_launch(fmt, best_team(fmt, 2560))
    for shared_bytes, rounds in ((232448, 2), (one_block, 4)):
        chosen = expert_launch(launch, fmt, 2560, 10 * 640, Multiprocessors(132, shared_bytes))
        assert (chosen.team, chosen.block, chosen.min_blocks, chosen.rounds) == (16, 256, 2, rounds)


def test_denser_blocks_where_they_idle_less() -> None:
    h200 = Multiprocessors(132, 232448)

    def rounds(name: str, launch: RowLaunch, n: int, n_pairs: int) -> tuple[int, int]:
        chosen = expert_launch(launch, FORMATS[name], n, n_pairs, h200)
        return chosen.min_blocks, chosen.rounds

    for name in ("Q2_K", "Q3_K", "Q4_K"):
        gate_up, down = gate_up_launch(FORMATS[name], 32), down_launch(FORMATS[name], 32)
        assert rounds(name, gate_up, 4096, 8 * 2048) == (4, 4), "not (3, 6), which idle more"
        assert rounds(name, down, 2048, 8 * 2048) == (4, 4), "not (2, 8), twice the rounds"
        assert rounds(name, gate_up, 2048, 8 * 768) == (3, 2), "(4, 2) would idle more"
        assert rounds(name, gate_up, 4096, 8 * 1536) == (3, 4), "(4, 3) idle as much"
        small = down_launch(FORMATS[name], 16)
        assert rounds(name, small, 768, 8 * 1024) == (2, 2), "teams of 16 have no denser blocks"


def test_denser_blocks_only_if_shared_memory_holds_them() -> None:
    fmt = FORMATS["Q6_K"]
    launch = gate_up_launch(fmt, 32)
    chosen = expert_launch(launch, fmt, 4096, 8 * 2048, Multiprocessors(132, 232448))
    assert (chosen.min_blocks, chosen.rounds) == (3, 6)


def test_larger_blocks_share_copies_of_a_grid_where_they_need_fewer_rounds() -> None:
    h200, small = Multiprocessors(132, 232448), Multiprocessors(132, 101376)

    def chosen(launch: RowLaunch, n: int, n_pairs: int, gpu: Multiprocessors) -> tuple[int, ...]:
        found = expert_launch(launch, fmt, n, n_pairs, gpu)
        return found.block, found.min_blocks, found.rounds

    for name in ("IQ3_XXS", "IQ2_XXS", "IQ3_S"):
        fmt = FORMATS[name]
        gate_up, down = gate_up_launch(fmt, 32), down_launch(fmt, 32)
        assert chosen(gate_up, 4096, 8 * 2048, h200) == (512, 2, 4), "not (256, 3, 6)"
        assert chosen(gate_up, 4096, 8 * 1536, h200) == (512, 2, 3), "not (256, 3, 4)"
        assert chosen(gate_up, 4096, 64 * 2048, h200) == (512, 2, 32), "not (256, 3, 42)"
        assert chosen(gate_up, 2048, 64 * 768, h200) == (512, 2, 12), "not (256, 3, 16)"
        assert chosen(gate_up, 2048, 8 * 768, h200) == (256, 3, 2), "two rounds either way"
        assert chosen(down, 2048, 8 * 2048, h200) == (512, 2, 4), "not (256, 2, 8)"
        assert chosen(gate_up, 4096, 8 * 2048, small) == (512, 2, 8), "alone: twice the warps"
        assert chosen(down, 2048, 8 * 2048, small) == (512, 2, 8), "alone: twice the warps"


def test_copies_of_a_grid_are_made_before_the_predecessor_has_ended() -> None:
    for name in ("IQ3_XXS", "IQ2_XXS", "IQ3_S"):
        fmt = FORMATS[name]
        text = expert_gate_up(fmt, gate_up_launch(fmt, 32, overlapped=True)).text
        assert text.index("[table]") < text.index("griddepcontrol.wait")
        assert text.count("[table]") == 1, "and not again"


def test_shared_memory_bounds_how_many_run_at_once() -> None:
    fmt = FORMATS["Q6_K"]
    launch = gate_up_launch(fmt, 32)
    assert launch.shared_bytes(fmt, 2048) > 50 << 10
    small = in_one_wave(launch, fmt, 2048, 768 * 8, Multiprocessors(132, 101376))
    assert small.rounds == 6  # one block a multiprocessor, where an H200 has three
    assert in_one_wave(launch, fmt, 2048, 768 * 8, Multiprocessors(132, 232448)).rounds == 2


def test_other_formats_are_refused() -> None:
    with pytest.raises(LookupError, match="no expert kernels for F16; there are Q4_0"):
        expert_down(FORMATS["F16"], RowLaunch(32))
    with pytest.raises(LookupError, match="no GPU kernels for F64; there are Q4_0"):
        linear(FORMATS["F64"], RowLaunch(32))


def test_float_rows_have_one_round() -> None:
    with pytest.raises(ValueError, match="one pair of F16 rows, not 2"):
        linear(FORMATS["F16"], RowLaunch(32))


def test_every_matrix_has_blocks_of_its_own() -> None:
    launch = RowLaunch(16, block=64, rounds=2)
    table, n_blocks = segments(launch, [Segment(1, 17), Segment(2, 16), Segment(3, 1)])
    assert table["first_block"].tolist() == [0, 2, 3]
    assert n_blocks == 4


def test_packed_arguments_keep_their_order() -> None:
    kernel = expert_down(FORMATS["Q4_K"], RowLaunch(32))
    values = {name: index for index, (name, _) in enumerate(kernel.params)}
    packed = kernel.pack(**dict(reversed(values.items())))
    assert packed.values.tolist() == list(range(len(values)))
    assert packed.address % 8 == 0
    with pytest.raises(TypeError, match="expert_down_q4_k takes h, experts"):
        kernel.pack(h=1)
