"""hotexpert inspect, on the bundled model."""

from __future__ import annotations

import pytest

from runtime.commands import main
from runtime.commands.inspect import gibibytes, plan_lines, size
from runtime.models.sizes import LayerSizes, ModelSizes

GIB = 2**30


def test_the_bundled_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--vram", "0.01"]) == 0
    shown = capsys.readouterr()
    assert "DEMONSTRATION" in shown.err
    for words in (
        "general.architecture = 'olmoe'",
        "blk.*.attn_q.weight x8",
        "256 x 256 x 32",
        "58.79 M parameters",
        "one of 32 experts",
        "Q6_K",
        "what fits where",
    ):
        assert words in shown.out
    assert "blk.0." not in shown.out
    assert main(["inspect", "--tensors"]) == 0
    assert "blk.7.attn_q.weight" in capsys.readouterr().out


def plan(ram: int | None, vram: int) -> str:
    layer = LayerSizes(n_expert=8, n_used=2, expert_bytes=GIB, rest_bytes=GIB, kv_elems=1024)
    sizes = ModelSizes((layer, layer), GIB, GIB, output_is_tied=False)
    return "\n".join(plan_lines(sizes, ram, vram, n_ctx=2**18))  # 1 GiB of KV cache


def test_plans() -> None:
    assert "dense weights and 262144 tokens of KV cache take 4.00 GiB" in plan(64 * GIB, 0)
    assert "21.00 GiB fit into 64.00 GiB" in plan(64 * GIB, 0)
    assert "do not fit into 16.00 GiB; 5.00 GiB" in plan(16 * GIB, 0)
    assert "not known" in plan(None, 0)
    assert "about 8 of 16 (50 %)" in plan(64 * GIB, 12 * GIB)
    assert "the whole model fits into 24.00 GiB; 4.00 GiB are left" in plan(64 * GIB, 24 * GIB)
    assert "1.00 GiB are missing" in plan(64 * GIB, 3 * GIB)


def test_units() -> None:
    assert [size(n) for n in (7, 2048, 3 * 2**20, 5 * GIB // 2)] == [
        "7 B",
        "2.00 KiB",
        "3.00 MiB",
        "2.50 GiB",
    ]
    assert gibibytes("1.5") == 3 * GIB // 2
