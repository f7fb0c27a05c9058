"""Loads, stores, atomics and asynchronous copies, and what the sanitizer catches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.ptx import Memory, MemoryFault, PtxError, Race, UninitialisedRead, load
from tests.support.ptx.snippet import Snippet, edge_values, same

N = 64
INDEX = np.arange(N, dtype=np.uint32)

HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n"


def u32(values: Any) -> tuple[str, Any]:
    return "u32", np.asarray(values, np.uint32)


def launch(body: str, out_words: int, *arrays: Any, block: int = 64, **options: Any) -> Any:
    """Run `body`, with %i the thread, %out and %in<k> the addresses; u32[out_words] at %out."""
    names = [f"in{k}" for k in range(len(arrays))]
    params = "".join(f", .param .u64 {name}" for name in names)
    loads = "".join(f"ld.param.u64 %{n}, [{n}];\n" for n in names)
    registers = "".join(f", %{name}" for name in names)
    text = f"""{HEAD}.visible .entry k(.param .u64 out{params})
{{
    .reg .u64 %out, %at{registers};
    .reg .u32 %i, %x, %y, %z, %w, %s;
    .reg .pred %p;
    mov.u32 %i, %tid.x;
    ld.param.u64 %out, [out];
{loads}{body}
    mad.wide.u32 %at, %i, 4, %out;
    st.global.u32 [%at], %x;
    ret;
}}
"""
    memory = Memory(1 << 20)
    out = memory.place(np.zeros(out_words, np.uint32))
    kernel = load(text, "k.ptx")["k"]
    kernel.launch(memory, (1,), (block,), [out, *map(memory.place, arrays)], **options)
    assert not kernel.never_executed()
    return memory.read(out, np.uint32, out_words)


def test_narrow_loads_extend_by_their_sign(evaluate: Any) -> None:
    for type_, dtype in [("s8", np.int8), ("u8", np.uint8), ("s16", np.int16), ("u16", np.uint16)]:
        values = edge_values(type_, 64, 1)
        code = f"mad.wide.u32 %at, %thread, {values.itemsize}, %a; ld.global.{type_} %d, [%at];"
        memory = Memory(1 << 20)
        address = memory.place(values)
        snippet = Snippet(code, "s32", {"a": ("u64", np.full(64, address))})
        kernel = load(snippet.text, "s.ptx")["snippet"]
        result = memory.reserve(256)
        args = [result, 64, memory.place(np.full(64, address, np.uint64))]
        kernel.launch(memory, (1,), (64,), args)
        same(memory.read(result, np.int32, 64), values.astype(dtype).astype(np.int32))


def test_vectors_go_through_registers_and_memory() -> None:
    values = edge_values("u32", 4 * N, 2)
    body = """
    mad.wide.u32 %at, %i, 16, %in0;
    ld.global.nc.L1::no_allocate.v4.u32 {%x, %y, _, %w}, [%at];
    mad.wide.u32 %at, %i, 8, %in1;
    st.global.v2.u32 [%at], {%w, %y};
    ld.global.u32 %x, [%at+4];
"""
    result = launch(body, N, values, np.zeros(2 * N, np.uint32))
    same(result, values[1::4])


def test_narrow_stores_keep_their_neighbours() -> None:
    body = """
    cvt.u64.u32 %at, %i;
    add.u64 %at, %at, %in0;
    st.global.u8 [%at], %i;
    bar.sync 0;
    and.b32 %y, %i, 15;
    mad.wide.u32 %at, %y, 4, %in0;
    ld.global.u32 %x, [%at];
"""
    same(launch(body, N, np.zeros(N, np.uint8)), np.tile(np.arange(64, dtype="u1").view("u4"), 4))


def test_parameters_constants_and_arrays() -> None:
    text = f"""{HEAD}
.const .align 4 .f32 table[4] = {{ 1.0, 0f40000000, -3.0, 4.5 }};
.global .u32 counter = 7;
.visible .entry k(.param .u64 out, .param .u8 small, .param .align 8 .b8 pair[16], .param .f32 f)
{{
    .reg .u64 %out, %at;
    .reg .u32 %i, %a, %b;
    .reg .f32 %x, %y;
    mov.u32 %i, %tid.x;
    ld.param.u64 %out, [out];
    mad.wide.u32 %at, %i, 4, %out;
    ld.param.v2.u32 {{%a, %b}}, [pair+8];
    add.u32 %a, %a, %b;
    ld.param.u8 %b, [small];
    add.u32 %a, %a, %b;
    ld.global.u32 %b, [counter];
    add.u32 %a, %a, %b;
    cvt.rn.f32.u32 %x, %a;
    ld.param.f32 %y, [f];
    add.rn.f32 %x, %x, %y;
    st.global.f32 [%at], %x;
    mov.u64 %at, table;
    and.b32 %i, %i, 3;
    mad.wide.u32 %at, %i, 4, %at;
    ld.const.f32 %y, [%at];
    ld.const.f32 %x, [table+4];
    mul.rn.f32 %y, %y, %x;
    mov.u32 %i, %tid.x;
    mad.wide.u32 %at, %i, 4, %out;
    st.global.f32 [%at+256], %y;
    ret;
}}
"""
    memory = Memory(1 << 20)
    out = memory.reserve(512)
    pair = np.array([1, 2, 30, 400], np.uint32).tobytes()
    load(text)["k"].launch(memory, (1,), (64,), [out, 250, pair, 0.5])
    result = memory.read(out, np.float32, (2, 64))
    assert (result[0] == 30 + 400 + 250 + 7 + 0.5).all()
    assert (result[1] == np.tile(np.float32([2, 4, -6, 9]), 16)).all()


def test_shared_memory_is_each_block_s_own() -> None:
    text = f"""{HEAD}.visible .entry k(.param .u64 out)
{{
    .reg .u64 %out;
    .reg .u32 %i, %b, %x, %at;
    .shared .align 4 .b32 first[64];
    .extern .shared .align 16 .b8 rest[];
    mov.u32 %i, %tid.x;
    mov.u32 %b, %ctaid.x;
    mad.lo.u32 %x, %b, 1000, %i;
    shl.b32 %at, %i, 2;
    st.shared.u32 [rest], %x;
    ret;
}}
"""
    text = text.replace("    .extern .shared .align 16 .b8 rest[];\n", "").replace(
        ".visible", ".extern .shared .align 16 .b8 rest[];\n.visible"
    )
    text = text.replace(
        "    st.shared.u32 [rest], %x;\n",
        """    .reg .u32 %base;
    mov.u32 %base, rest;
    add.u32 %base, %base, %at;
    st.shared.u32 [%base], %x;
    bar.sync 0;
    xor.b32 %at, %at, 252;
    mov.u32 %base, rest;
    add.u32 %base, %base, %at;
    ld.shared.u32 %x, [%base];
    ld.param.u64 %out, [out];
    mad.lo.u32 %i, %b, 64, %i;
    mad.wide.u32 %out, %i, 4, %out;
    st.global.u32 [%out], %x;
""",
    )
    memory = Memory(1 << 20)
    out = memory.reserve(4 * 64 * 5)
    load(text)["k"].launch(memory, (5,), (64,), [out], dynamic_shared=256)
    expected = np.arange(5)[:, None] * 1000 + np.arange(64)[::-1]
    same(memory.read(out, np.uint32, (5, 64)), expected)


@pytest.mark.parametrize(
    ("operation", "start", "expected"),
    [
        ("add.u32", 5, 5 + sum(range(64))),
        ("max.s32", 5, 63),
        ("min.u32", 99, 0),
        ("or.b32", 0, 63),
        ("xor.b32", 1, 1),
        ("inc.u32", 0, 1),
        ("exch.b32", 3, 63),
    ],
)
def test_atomics(operation: str, start: int, expected: int) -> None:
    if operation == "inc.u32":
        operand, expected = "9", (64 - 0) % 10
    else:
        operand = "%i"
    body = f"""
    atom.global.{operation} %x, [%in0], {operand};
    bar.sync 0;
    ld.global.u32 %x, [%in0];
"""
    assert (launch(body, N, np.full(1, start, np.uint32)) == expected).all()


def test_atomics_return_the_value_before() -> None:
    body = "atom.acq_rel.gpu.global.add.u32 %x, [%in0], 1;"
    assert sorted(launch(body, N, np.zeros(1, np.uint32))) == list(range(64))


def test_compare_and_swap_lets_one_thread_win() -> None:
    body = """
    atom.relaxed.sys.global.cas.b32 %x, [%in0], 0, 1;
    red.global.add.u32 [%in0+4], 1;
"""
    result = launch(body, N, np.zeros(2, np.uint32))
    assert sorted(result) == [0] + [1] * 63


def test_atomics_on_shared_memory_and_floats() -> None:
    body = """
    { .shared .align 4 .f32 total; .reg .f32 %f;
    setp.eq.u32 %p, %i, 0;
@%p st.shared.f32 [total], 0f3F800000;
    bar.sync 0;
    red.shared.add.f32 [total], 0f40000000;
    bar.sync 0;
    ld.shared.f32 %f, [total];
    cvt.rzi.u32.f32 %x, %f; }
"""
    assert (launch(body, N) == 129).all()


COPY = """
    {{ .shared .align 16 .b8 tile[1024];
    shl.b32 %s, %i, 4;
    mov.u32 %y, tile;
    add.u32 %s, %s, %y;
    mad.wide.u32 %at, %i, 16, %in0;
    cp.async.cg.shared.global [%s], [%at], 16;
    cp.async.commit_group;
{wait}
    ld.shared.u32 %x, [%s+8]; }}
"""


def test_an_asynchronous_copy_arrives_at_its_wait() -> None:
    values = edge_values("u32", 4 * N, 2)
    for wait in ("cp.async.wait_group 0;", "cp.async.wait_all;"):
        same(launch(COPY.format(wait=wait), N, values), values[2::4])


def test_reading_an_asynchronous_copy_too_early_is_caught() -> None:
    with pytest.raises(UninitialisedRead, match=r"k\.ptx:\d+: .* not brought yet .* thread 0,0,0"):
        launch(COPY.format(wait="cp.async.wait_group 1;"), N, np.zeros(4 * N, np.uint32))


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        ("ld.global.u32 %x, [%in0+256];", MemoryFault, "reads 4 bytes at .* 0 bytes from the end"),
        ("ld.global.u32 %x, [%in0-4];", MemoryFault, "bytes from the end of allocation 0"),
        ("ld.global.u32 %x, [%in0+2];", MemoryFault, "misaligned"),
        ("ld.global.v2.u32 {%x, %y}, [%in0+4];", MemoryFault, "8 bytes at the misaligned"),
        ("cvt.u32.u64 %x, %in0; ld.global.u32 %x, [%x];", MemoryFault, "before every"),
        ("add.u32 %x, %y, 1;", UninitialisedRead, "reads %y, which was never written"),
        ("setp.eq.u32 %p, %i, 1; @!%p mov.u32 %y, 1; mov.u32 %x, %y;", UninitialisedRead,
         "%y, .* thread 1,0,0"),
        ("{ .shared .b32 t[4]; ld.shared.u32 %x, [t]; }", UninitialisedRead, "never written"),
        ("{ .shared .b32 t[4]; st.shared.u32 [t+16], %i; mov.u32 %x, 0; }", MemoryFault,
         "16 bytes"),
        ("{ .shared .b32 t[4]; st.shared.u32 [t], %i; mov.u32 %x, 0; }", Race, "another thread"),
        ("ld.param.u64 %at, [out+8]; mov.u32 %x, 0;", PtxError,
         "bytes 8 to 16 of a parameter of 8 bytes"),
        ("trap; mov.u32 %x, 0;", PtxError, "the kernel traps"),
    ],
)  # fmt: skip
def test_the_sanitizer(body: str, error: type[PtxError], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        launch(f"    {body}", N, np.zeros(64, np.uint32), strict=True)
    assert str(caught.value).startswith("k.ptx:")


def test_writing_read_only_memory_is_caught() -> None:
    memory = Memory(1 << 20)
    snippet = Snippet("st.global.u32 [%a], 1; mov.u32 %d, 0;", "u32", {"a": ("u64", INDEX)})
    kernel = load(snippet.text)["snippet"]
    address = memory.place(np.zeros(4, np.uint32), writable=False)
    args = [memory.reserve(256), N, memory.place(np.full(N, address, np.uint64))]
    with pytest.raises(MemoryFault, match="read-only"):
        kernel.launch(memory, (1,), (64,), args)


def test_bytes_that_were_never_written_cannot_be_read_by_the_host() -> None:
    memory = Memory(1 << 20)
    with pytest.raises(UninitialisedRead):
        memory.read(memory.reserve(16), np.uint32, 4)


EXCHANGE = """
    {{ .shared .b32 t[64];
    mov.u32 %y, t;
    shl.b32 %s, %i, 2;
    add.u32 %s, %s, %y;
    st.shared.u32 [%s], %i;
{between}
    xor.b32 %z, %i, {distance};
    shl.b32 %z, %z, 2;
    add.u32 %z, %z, %y;
    ld.shared.u32 %x, [%z];
{after}
    st.shared.u32 [%s], %i; }}
"""


@pytest.mark.parametrize(
    ("between", "distance", "after", "races"),
    [
        ("bar.sync 0;", 32, "bar.sync 0;", False),
        ("", 32, "bar.sync 0;", True),
        ("bar.sync 0;", 32, "", True),
        ("bar.warp.sync 0xFFFFFFFF;", 1, "bar.warp.sync 0xFFFFFFFF;", False),
        ("bar.warp.sync 0xFFFFFFFF;", 32, "bar.sync 0;", True),
        ("bar.warp.sync 0xFFFFFFFF;", 1, "", True),
        ("", 0, "", False),
    ],
)
def test_races_in_shared_memory(between: str, distance: int, after: str, races: bool) -> None:
    body = EXCHANGE.format(between=between, distance=distance, after=after)
    if races:
        with pytest.raises(Race):
            launch(body, N)
    else:
        same(launch(body, N), INDEX ^ distance)
