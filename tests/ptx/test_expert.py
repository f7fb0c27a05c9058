"""What is particular to the expert kernels; their results are in test_kernels."""

from __future__ import annotations

import pytest

from ops.gpu.expert import RowLaunch, best_team, expert_down, expert_gate_up
from ops.quants import FORMATS


def test_overlapped_kernels_wait_before_they_read() -> None:
    fmt, launch = FORMATS["Q4_K"], RowLaunch(16, block=64, overlapped=True)
    text = expert_gate_up(fmt, launch).text
    assert text.index("griddepcontrol.wait") < text.index("ld.global")
    text = expert_down(fmt, launch).text
    first_read_of_h = text.index("ld.global.v4.b32")
    assert text.index("cp.async.cg") < text.index("griddepcontrol.wait") < first_read_of_h


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
