"""Branches, barriers, waiting, coverage and launches."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import tests.support.ptx.kernel as kernel_module
from tests.support.ptx import Deadlock, Memory, PtxError, load
from tests.support.ptx.snippet import Snippet, same

HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n"


def u32(values: Any) -> tuple[str, Any]:
    return "u32", np.asarray(values, np.uint32)


def test_each_thread_loops_as_often_as_it_should(evaluate: Any) -> None:
    code = """
    mov.u32 %d, 0;
loop:
    setp.eq.u32 %p, %a, 0;
@%p bra done;
    and.b32 %b, %a, 1;
    setp.ne.u32 %q, %b, 0;
@%q bra odd;
    shr.u32 %a, %a, 1;
    bra.uni next;
odd:
    sub.u32 %a, %a, 1;
next:
    add.u32 %d, %d, 1;
    bra loop;
done:
"""
    a = np.arange(128) * 37 % 256
    expected = [max(int(v).bit_length() - 1, 0) + int(v).bit_count() for v in a]
    same(evaluate(code, "u32", a=u32(a), b=u32(a)), expected)


def test_labels_and_registers_belong_to_their_block(evaluate: Any) -> None:
    part = """
    { .reg .u32 %count; .reg .pred %more;
    mov.u32 %count, 3;
again:
    add.u32 %d, %d, %a;
    sub.u32 %count, %count, 1;
    setp.ne.u32 %more, %count, 0;
@%more bra again; }
"""
    same(evaluate("mov.u32 %d, 0;" + part + part, "u32", a=u32(range(32))), np.arange(32) * 6)


def test_named_barriers_split_producers_and_consumers(evaluate: Any) -> None:
    code = """
    { .shared .b32 box[32]; .reg .u32 %at, %lane;
    mov.u32 %at, box;
    and.b32 %lane, %thread, 31;
    shl.b32 %lane, %lane, 2;
    add.u32 %at, %at, %lane;
    setp.ge.u32 %p, %thread, 32;
@%p bra consume;
    mul.lo.u32 %d, %a, 10;
    st.shared.u32 [%at], %d;
    bar.arrive 1, 64;
    bra done;
consume:
    bar.sync 1, 64;
    ld.shared.u32 %d, [%at];
done: }
"""
    expected = np.tile(np.arange(32) * 10, 2)
    same(evaluate(code, "u32", a=u32(range(64))), expected)


def test_a_barrier_that_a_thread_cannot_reach_is_an_error() -> None:
    code = "setp.eq.u32 %p, %a, 40; @%p exit; bar.sync 0; mov.u32 %d, 1;"
    with pytest.raises(PtxError, match="left before a barrier"):
        Snippet(code, "u32", {"a": u32(range(64))}).interpret()


def test_warps_at_different_barriers_wait_for_ever() -> None:
    code = """
    setp.ge.u32 %p, %a, 32;
@%p bar.sync 1;
@!%p bar.sync 2;
    mov.u32 %d, 1;
"""
    with pytest.raises(Deadlock, match=r"wait for each other: .*snippet\.ptx"):
        Snippet(code, "u32", {"a": u32(range(64))}).interpret()


def test_an_endless_loop_is_an_error() -> None:
    with pytest.raises(Deadlock, match="does not end"):
        Snippet("again: bra again; mov.u32 %d, 0;", "u32", {"a": u32(range(32))}).interpret(500)


def test_clocks_advance() -> None:
    for register, type_ in [("%clock", "u32"), ("%clock64", "u64"), ("%globaltimer", "u64")]:
        code = f"""
    {{ .reg .{type_} %start, %now;
    mov.{type_} %start, {register};
again:
    mov.{type_} %now, {register};
    sub.{type_} %now, %now, %start;
    setp.lt.{type_} %p, %now, 100;
@%p bra again;
    cvt.u32.{type_} %d, %now; }}
"""
        result = Snippet(code, "u32", {"a": u32(range(32))}).interpret()
        assert (result >= 100).all()


def test_a_missing_ret_is_an_error() -> None:
    text = f"{HEAD}.visible .entry k()\n{{\n    .reg .u32 %x;\n    mov.u32 %x, 1;\n}}\n"
    with pytest.raises(Deadlock, match="ret is missing"):
        load(text)["k"].launch(Memory(4096), (1,), (32,), [])


POLL = f"""{HEAD}.visible .entry poll(.param .u64 box)
{{
    .reg .u64 %box;
    .reg .u32 %x, %thread;
    .reg .pred %more, %other;
    ld.param.u64 %box, [box];
    mov.u32 %thread, %tid.x;
    setp.ne.u32 %other, %thread, 0;
@%other bra out;
    st.release.sys.global.u32 [%box], 1;
wait:
    ld.acquire.sys.global.u32 %x, [%box+4];
    setp.eq.u32 %more, %x, 0;
@%more bra wait;
    add.u32 %x, %x, 1;
    st.global.u32 [%box+8], %x;
out:
    bar.sync 0;
    ld.global.u32 %x, [%box+8];
    ret;
}}
"""


def test_a_thread_that_polls_meets_the_host_s_answer() -> None:
    memory = Memory(4096)
    box = memory.place(np.zeros(3, np.uint32))
    polls = []

    def host() -> None:
        polls.append(int(memory.read(box, np.uint32, 1)[0]))
        if len(polls) == 3:
            memory.write(box + 4, np.array([41], np.uint32))

    kernel = load(POLL)["poll"]
    kernel.launch(memory, (1,), (64,), [box], host=host)

    assert memory.read(box, np.uint32, 3).tolist() == [1, 41, 42]
    assert polls[0] == 1 and len(polls) <= 4
    assert not kernel.never_executed()


def test_blocks_may_wait_for_one_another() -> None:
    text = f"""{HEAD}.visible .entry k(.param .u64 box)
{{
    .reg .u64 %box;
    .reg .u32 %x, %block;
    .reg .pred %more, %first;
    ld.param.u64 %box, [box];
    mov.u32 %block, %ctaid.x;
    setp.eq.u32 %first, %block, 0;
@!%first bra answer;
wait:
    ld.volatile.global.u32 %x, [%box];
    setp.lt.u32 %more, %x, 96;
@%more bra wait;
    ret;
answer:
    red.release.gpu.global.add.u32 [%box], 1;
    ret;
}}
"""
    memory = Memory(4096)
    box = memory.place(np.zeros(1, np.uint32))
    load(text)["k"].launch(memory, (4,), (32,), [box])
    assert memory.read(box, np.uint32, 1)[0] == 96


def test_large_grids_run_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_module, "THREADS_AT_ONCE", 64)
    a = np.arange(500)
    snippet = Snippet("add.u32 %d, %a, 3;", "u32", {"a": u32(a)})
    same(snippet.interpret(), a + 3)


def test_instructions_that_never_ran_are_named() -> None:
    code = "mov.u32 %d, 1; setp.ge.u32 %p, %a, 500;\n@%p add.u32 %d, %d, 1;"
    snippet = Snippet(code, "u32", {"a": u32(range(32))})
    memory = Memory(4096)
    kernel = load(snippet.text, "s.ptx")["snippet"]
    args = [memory.reserve(128), 31, memory.place(np.arange(32, dtype=np.uint32))]
    kernel.launch(memory, (1,), (32,), args)
    line = snippet.text[: snippet.text.index("add.u32 %d, %d")].count("\n") + 1
    assert kernel.never_executed() == [f"s.ptx:{line}: add.u32 %d , %d , 1"]


def test_launches_are_checked() -> None:
    text = f"{HEAD}.visible .entry k(.param .u32 n)\n.maxntid 64, 1, 1\n{{\n    ret;\n}}\n"
    kernel = load(text)["k"]
    with pytest.raises(PtxError, match="takes 1 arguments"):
        kernel.launch(Memory(4096), (1,), (32,), [])
    with pytest.raises(PtxError, match=r"\.maxntid"):
        kernel.launch(Memory(4096), (1,), (128,), [1])


def test_line_markers_name_the_file_that_a_person_edits() -> None:
    text = f'{HEAD}.visible .entry k()\n{{\n# 40 "inc/part.inc.ptx"\n    what.b32 ;\n    ret;\n}}\n'
    with pytest.raises(PtxError, match=r"^inc/part\.inc\.ptx:40: what\.b32 is not supported"):
        load(text)["k"].launch(Memory(4096), (1,), (32,), [])


def test_a_small_product_is_quick() -> None:
    """64 rows x 512 int8, a warp a row: tests of real kernels depend on this."""
    text = f"""{HEAD}.visible .entry k(.param .u64 w, .param .u64 x, .param .u64 y)
{{
    .reg .u64 %w, %x, %y, %at;
    .reg .u32 %i, %lane, %row, %k;
    .reg .b32 %a, %b, %sum;
    .reg .pred %more, %other;
    mov.u32 %i, %tid.x;
    and.b32 %lane, %i, 31;
    shr.u32 %row, %i, 5;
    ld.param.u64 %w, [w];
    ld.param.u64 %x, [x];
    ld.param.u64 %y, [y];
rows:
    mov.u32 %k, %lane;
    mov.b32 %sum, 0;
columns:
    mad.lo.u32 %i, %row, 128, %k;
    mad.wide.u32 %at, %i, 4, %w;
    ld.global.nc.b32 %a, [%at];
    mad.wide.u32 %at, %k, 4, %x;
    ld.global.nc.b32 %b, [%at];
    dp4a.s32.s32 %sum, %a, %b, %sum;
    add.u32 %k, %k, 32;
    setp.lt.u32 %more, %k, 128;
@%more bra columns;
    redux.sync.add.s32 %sum, %sum, 0xFFFFFFFF;
    setp.ne.u32 %other, %lane, 0;
    mad.wide.u32 %at, %row, 4, %y;
@!%other st.global.b32 [%at], %sum;
    add.u32 %row, %row, 4;
    setp.lt.u32 %more, %row, 64;
@%more bra rows;
    ret;
}}
"""
    text = text.replace(
        "%a, %b, %sum;\n    .reg .pred", "%a, %b;\n    .reg .s32 %sum;\n    .reg .pred"
    )
    generator = np.random.default_rng(0)
    w = generator.integers(-127, 128, (64, 512), np.int8)
    x = generator.integers(-127, 128, 512, np.int8)
    memory = Memory(1 << 20)
    y = memory.reserve(256)
    kernel = load(text)["k"]
    args = [memory.place(w), memory.place(x), y]
    start = time.process_time()
    kernel.launch(memory, (1,), (128,), args)
    elapsed = time.process_time() - start

    same(memory.read(y, np.int32, 64), w.astype(np.int32) @ x.astype(np.int32))
    assert elapsed < 1.0
