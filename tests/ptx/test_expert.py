"""expert_gate_up and expert_down: the real text, interpreted, has the bits of ops.arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

import ptx
from ops.expert import GPU_FORMATS, TEAMS, RowLaunch, best_team, expert_down, expert_gate_up
from ops.quants import FORMATS
from tests.support.expert_kernels import ExpertCase, interpreted, same_bits
from tests.support.ptx import PtxError, mutations

SHAPES = [(2560, 7), (768, 37)]
"""(n, n_rows): more than a chunk with a rest, less than a chunk; both with rows left over."""

SURVIVORS = 4
"""Of 12 seeded faults, how many may change nothing: an alignment taken with more bits, say."""


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("team", TEAMS)
@pytest.mark.parametrize("name", GPU_FORMATS)
def test_bits_and_every_instruction(name: str, team: int) -> None:
    fmt, launch = FORMATS[name], RowLaunch(team, block=64)
    gate_up = interpreted(expert_gate_up(fmt, launch))
    down = interpreted(expert_down(fmt, launch))
    for n, n_rows in SHAPES:
        case = ExpertCase(fmt, n, n_rows)
        assert same_bits(case.run_gate_up(gate_up, launch), case.gate_up())
        assert same_bits(case.run_down(down, launch), case.down())
    assert gate_up.never_executed() == []
    assert down.never_executed() == []


def test_overlapped_kernels_wait_before_they_read() -> None:
    fmt, launch = FORMATS["Q4_K"], RowLaunch(16, block=64, overlapped=True)
    case = ExpertCase(fmt, 768, 5)
    gate_up, down = expert_gate_up(fmt, launch), expert_down(fmt, launch)
    assert same_bits(case.run_gate_up(interpreted(gate_up), launch), case.gate_up())
    assert same_bits(case.run_down(interpreted(down), launch), case.down())
    text = gate_up.text
    assert text.index("griddepcontrol.wait") < text.index("ld.global")
    text = down.text
    first_read_of_h = text.index("ld.global.v4.b32")
    assert text.index("cp.async.cg") < text.index("griddepcontrol.wait") < first_read_of_h


@pytest.mark.parametrize("name", GPU_FORMATS)
def test_parameters_are_those_of_the_text(name: str) -> None:
    for make in (expert_gate_up, expert_down):
        kernel = make(FORMATS[name], RowLaunch(32))
        (entry,) = ptx.entries(kernel.text)
        assert entry.name == kernel.entry
        assert [(param.name, param.type) for param in entry.params] == list(kernel.params)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ["Q4_K", "IQ3_XXS"])
def test_faults_are_noticed(name: str, seed: int) -> None:
    fmt, launch = FORMATS[name], RowLaunch(16, block=64)
    kernel = expert_gate_up(fmt, launch)
    cases = [ExpertCase(fmt, n, n_rows) for n, n_rows in SHAPES]
    expected = [case.gate_up() for case in cases]
    survivors = []
    for mutation in mutations(kernel.text, seed, 12):
        try:
            changed = interpreted(kernel, mutation.text)
            results = [case.run_gate_up(changed, launch) for case in cases]
        except (PtxError, IndexError):
            continue
        if all(map(same_bits, results, expected)):
            survivors.append(str(mutation))
    assert len(survivors) <= SURVIVORS, survivors


def test_team_leaves_the_fewest_lanes_idle() -> None:
    widths = (768, 1536, 2048, 4096)
    assert [best_team(FORMATS["Q4_K"], n) for n in widths] == [16, 8, 32, 32]
    assert [best_team(FORMATS["Q8_0"], n) for n in widths] == [16, 32, 32, 32]


def test_formats_without_a_fragment_are_refused() -> None:
    with pytest.raises(LookupError, match="no GPU kernels for Q5_1 yet; there are Q2_K"):
        expert_down(FORMATS["Q5_1"], RowLaunch(32))


def test_packed_arguments_keep_their_order() -> None:
    kernel = expert_down(FORMATS["Q4_K"], RowLaunch(32))
    values = {name: index for index, (name, _) in enumerate(kernel.params)}
    packed = kernel.pack(**dict(reversed(values.items())))
    assert packed.values.tolist() == list(range(len(values)))
    assert packed.address % 8 == 0
    with pytest.raises(TypeError, match="expert_down_q4_k takes h, experts"):
        kernel.pack(h=1)
    assert packed.values.dtype == np.uint64
