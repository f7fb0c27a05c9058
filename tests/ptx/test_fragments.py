"""The shared fragments against the arithmetic contract, on the bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ops import arithmetic
from ptx import expand
from tests.support.ptx import Memory, PtxError, load, mutations
from tests.support.ptx.snippet import edge_values, same

N = 4096


def fragment(tmp_path: Path, name: str, **operands: str) -> str:
    """Code that includes a fragment, for a snippet: expanded, without the marker at its start."""
    lines = [f"#define {macro} {value}\n" for macro, value in operands.items()]
    lines.append(f'#include "inc/{name}.inc.ptx"\n')
    lines += [f"#undef {macro}\n" for macro in operands]
    (tmp_path / "part.ptx").write_text("".join(lines))
    return expand("part.ptx", root=tmp_path)


def hard_values() -> Any:
    """Around every place where exp changes its path, and a wide random range."""
    generator = np.random.default_rng(3)
    x = generator.normal(size=N).astype(np.float32) * np.float32(40)
    near = np.arange(-150, 151, dtype=np.float32) * np.float32(np.log(2) / 2)
    x[: len(near)] = near
    edges = [0.0, -0.0, np.nan, np.inf, -np.inf, 89, 89.5, -104, -103.9, -104.5, -87.4, 88.7, 1e-40]
    x[1000 : 1000 + len(edges)] = edges
    x[2000:3000] = edge_values("f32", 1000, 1)
    return x


def test_exp_has_the_bits_of_the_contract(evaluate: Any, tmp_path: Path) -> None:
    x = hard_values()
    code = fragment(tmp_path, "exp", X="%a", Y="%d")
    same(evaluate(code, "f32", a=("f32", x)), arithmetic.exp(x))


def test_exp_may_write_its_operand(evaluate: Any, tmp_path: Path) -> None:
    x = hard_values()[:128]
    code = fragment(tmp_path, "exp", X="%a", Y="%a") + "mov.f32 %d, %a;"
    same(evaluate(code, "f32", a=("f32", x)), arithmetic.exp(x))


def test_silu_has_the_bits_of_the_contract(evaluate: Any, tmp_path: Path) -> None:
    gate, up = hard_values(), edge_values("f32", N, 9)
    code = fragment(tmp_path, "silu", GATE="%a", UP="%b", OUT="%d")
    inputs = {"a": ("f32", gate), "b": ("f32", up)}
    same(evaluate(code, "f32", **inputs), arithmetic.silu_mul(gate, up))


def test_warp_sum_is_the_halving_tree(evaluate: Any, tmp_path: Path) -> None:
    x = np.random.default_rng(1).normal(size=128).astype(np.float32)
    code = fragment(tmp_path, "warp_sum", SUM="%a") + "mov.f32 %d, %a;"
    tree = x.reshape(-1, 32)
    while tree.shape[1] > 1:
        half = tree.shape[1] // 2
        tree = tree[:, :half] + tree[:, half:]
    same(evaluate(code, "f32", a=("f32", x)), np.repeat(tree[:, 0], 32))


KERNEL = """.version 8.0
.target sm_80
.address_size 64
.visible .entry exp(.param .u64 x, .param .u64 out, .param .u32 n)
{
    .reg .u64 %at;
    .reg .u32 %i, %n, %block;
    .reg .f32 %x, %y;
    .reg .pred %beyond;
    mov.u32             %i, %tid.x;
    mov.u32             %block, %ctaid.x;
    mad.lo.u32          %i, %block, 128, %i;
    ld.param.u32        %n, [n];
    setp.ge.u32         %beyond, %i, %n;
@%beyond ret;
    ld.param.u64        %at, [x];
    mad.wide.u32        %at, %i, 4, %at;
    ld.global.nc.f32    %x, [%at];
#define X %x
#define Y %y
#include "inc/exp.inc.ptx"
#undef X
#undef Y
    ld.param.u64        %at, [out];
    mad.wide.u32        %at, %i, 4, %at;
    st.global.f32       [%at], %y;
    ret;
}
"""


HARMLESS = (
    "0f42F20000",  # a limit of 121 for 89: e^89 is infinite already
    "add.s32             %exp_exponent, %exp_exponent, 0x4B400000",  # its low nine bits are zero
)
"""Faults that do not change the result."""


def run_exp(text: str) -> list[str]:
    """Check the kernel against the contract; the instructions that never ran."""
    x = hard_values()[:-10]
    memory = Memory(1 << 20)
    out = memory.reserve(x.nbytes)
    kernel = load(text, "exp.ptx")["exp"]
    kernel.launch(memory, (32,), (128,), [memory.place(x), out, len(x)], max_steps=10_000)
    same(memory.read(out, np.float32, len(x)), arithmetic.exp(x))
    return kernel.never_executed()


@pytest.fixture
def exp_text(tmp_path: Path) -> str:
    (tmp_path / "exp.ptx").write_text(KERNEL)
    return expand("exp.ptx", root=tmp_path)


def test_the_whole_kernel_runs(exp_text: str) -> None:
    assert run_exp(exp_text) == []


def test_faults_in_the_text_are_noticed(exp_text: str) -> None:
    survivors = []
    for fault in mutations(exp_text, seed=1, n=60):
        try:
            run_exp(fault.text)
        except (PtxError, AssertionError):
            continue
        if not any(harmless in fault.after for harmless in HARMLESS):
            survivors.append(str(fault))
    assert not survivors, "\n".join(survivors)


def test_mutations_are_seeded_and_each_differs_in_one_line(exp_text: str) -> None:
    first, again = mutations(exp_text, 5, 30), mutations(exp_text, 5, 30)
    assert first == again != mutations(exp_text, 6, 30)
    assert len({fault.text for fault in first}) == 30
    original = exp_text.split("\n")
    for fault in first:
        changed = [
            i for i, (a, b) in enumerate(zip(original, fault.text.split("\n"), strict=True), 1)
            if a != b
        ]  # fmt: skip
        assert changed == [fault.line]
    with pytest.raises(ValueError, match="places to change"):
        mutations("ret;", 0, 1)
