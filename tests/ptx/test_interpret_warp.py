"""Lane exchanges, votes, reductions and tensor-core products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.ptx import Memory, PtxError, UninitialisedRead, load
from tests.support.ptx.snippet import Snippet, edge_values, same

THREADS = np.arange(64, dtype=np.uint32)
LANE = THREADS % 32


def u32(values: Any) -> tuple[str, Any]:
    return "u32", np.asarray(values, np.uint32)


VALUES = edge_values("u32", 64, 3)

SHUFFLES: list[tuple[str, Callable[[Any], Any]]] = [
    ("bfly.b32 %d|%p, %a, 5, 31", lambda lane: lane ^ 5),
    ("bfly.b32 %d|%p, %a, 16, 31", lambda lane: lane ^ 16),
    ("idx.b32 %d|%p, %a, 7, 31", lambda lane: lane * 0 + 7),
    ("idx.b32 %d|%p, %a, 3, 0x181F", lambda lane: lane // 8 * 8 + 3),
    ("down.b32 %d|%p, %a, 4, 31", lambda lane: np.where(lane + 4 < 32, lane + 4, lane)),
    ("down.b32 %d|%p, %a, 2, 0x181F",
     lambda lane: np.where(lane % 8 + 2 < 8, lane + 2, lane)),
    ("up.b32 %d|%p, %a, 3, 0", lambda lane: np.where(lane >= 3, lane - 3, lane)),
]  # fmt: skip


@pytest.mark.parametrize(("operands", "origin"), SHUFFLES, ids=[s[0] for s in SHUFFLES])
def test_shfl(evaluate: Any, operands: str, origin: Callable[[Any], Any]) -> None:
    source = origin(LANE.astype(int))
    code = f"shfl.sync.{operands}, 0xFFFFFFFF;"

    same(evaluate(code, "u32", a=u32(VALUES)), VALUES[THREADS // 32 * 32 + source])

    flag = evaluate(f"{code} selp.u32 %d, 1, 0, %p;", "u32", a=u32(VALUES))
    if "idx" not in operands and "bfly" not in operands:
        same(flag, source != LANE)
    else:
        assert flag.all()


def test_shfl_takes_its_lane_from_a_register(evaluate: Any) -> None:
    code = "shfl.sync.idx.b32 %d, %a, %b, 31, -1;"
    lanes = edge_values("u32", 64, 8)
    expected = VALUES[THREADS // 32 * 32 + lanes % 32]
    same(evaluate(code, "u32", a=u32(VALUES), b=u32(lanes)), expected)


def test_lanes_that_parted_meet_at_a_shuffle(evaluate: Any) -> None:
    code = """
    setp.lt.u32 %p, %a, 8;
@%p bra few;
    add.u32 %a, %a, 100;
    bra joined;
few:
    add.u32 %a, %a, 1000;
joined:
    shfl.sync.bfly.b32 %d, %a, 8, 31, 0xFFFFFFFF;
"""
    moved = np.where(LANE < 8, LANE + 1000, LANE + 100)
    same(evaluate(code, "u32", a=u32(LANE)), moved[THREADS ^ 8])


def test_half_a_warp_may_shuffle_alone(evaluate: Any) -> None:
    code = """
    setp.lt.u32 %p, %a, 16;
    mov.u32 %d, 0;
@!%p bra out;
    shfl.sync.bfly.b32 %d, %a, 1, 31, 0x0000FFFF;
out:
"""
    same(evaluate(code, "u32", a=u32(LANE)), np.where(LANE < 16, LANE ^ 1, 0))


def test_a_lane_that_takes_no_part_cannot_be_read() -> None:
    code = """
    setp.lt.u32 %p, %a, 16;
    mov.u32 %d, 0;
@!%p bra out;
    shfl.sync.bfly.b32 %d, %a, 16, 31, 0x0000FFFF;
out:
"""
    with pytest.raises(UninitialisedRead, match="takes no part"):
        Snippet(code, "u32", {"a": u32(LANE)}).interpret()


def test_a_lane_outside_its_own_mask_is_an_error() -> None:
    code = "shfl.sync.bfly.b32 %d, %a, 1, 31, 0x0000FFFF;"
    with pytest.raises(PtxError, match="does not name the lane itself"):
        Snippet(code, "u32", {"a": u32(LANE)}).interpret()


def test_lanes_that_leave_are_not_waited_for(evaluate: Any) -> None:
    code = """
    setp.lt.u32 %p, %a, 8;
    mov.u32 %d, %a;
@!%p bra shuffle;
    bra out;
shuffle:
    shfl.sync.idx.b32 %d, %a, 9, 31, 0xFFFFFFFF;
out:
"""
    same(evaluate(code, "u32", a=u32(LANE)), np.where(LANE < 8, LANE, 9))


def test_waiting_for_a_lane_that_never_comes_is_an_error() -> None:
    code = """
    setp.eq.u32 %p, %a, 5;
spin:
@%p bra spin;
    shfl.sync.bfly.b32 %d, %a, 1, 31, 0xFFFFFFFF;
"""
    with pytest.raises(PtxError, match="does not end"):
        Snippet(code, "u32", {"a": u32(LANE)}).interpret(max_steps=1000)


def per_warp(function: Callable[[Any], Any], values: Any) -> Any:
    return np.repeat([function(values[:32]), function(values[32:])], 32)


def test_votes(evaluate: Any) -> None:
    a = u32(np.where(LANE == 5, 1, THREADS // 32))
    set_p = "setp.ne.u32 %p, %a, 0; "
    ballot = evaluate(set_p + "vote.sync.ballot.b32 %d, %p, 0xFFFFFFFF;", "u32", a=a)
    same(ballot, np.repeat([1 << 5, 0xFFFFFFFF], 32))
    for mode, expected in [("all", [0, 1]), ("any", [1, 1]), ("uni", [0, 1])]:
        code = f"{set_p} vote.sync.{mode}.pred %q, %p, 0xFFFFFFFF; selp.u32 %d, 1, 0, %q;"
        same(evaluate(code, "u32", a=a), np.repeat(expected, 32))
    mask = "setp.lt.u32 %p, %a, 9; mov.u32 %d, 0; @%p activemask.b32 %d;"
    same(evaluate(mask, "u32", a=u32(LANE)), np.where(LANE < 9, 0x1FF, 0))


def test_match(evaluate: Any) -> None:
    a = THREADS % 3
    masks = [sum(1 << j for j in range(32) if a[i // 32 * 32 + j] == a[i]) for i in range(64)]
    same(evaluate("match.any.sync.b32 %d, %a, 0xFFFFFFFF;", "u32", a=u32(a)), masks)
    code = "match.all.sync.b32 %d|%p, %a, 0xFFFFFFFF; @%p add.u32 %d, %d, 2;"
    expected = np.where(THREADS < 32, 1, 0)
    b = np.where(THREADS < 32, 7, THREADS)
    same(evaluate(code, "u32", a=u32(b)), expected)


@pytest.mark.parametrize(
    ("name", "function"),
    [("add", np.sum), ("min", np.min), ("max", np.max)],
)
def test_redux(evaluate: Any, name: str, function: Callable[[Any], Any]) -> None:
    code = f"redux.sync.{name}.s32 %d, %a, 0xFFFFFFFF;"
    values = edge_values("s32", 64, 3)
    expected = per_warp(lambda v: np.int64(function(v.astype(np.int64))), values)
    same(evaluate(code, "s32", a=("s32", values)), expected.astype(np.int32))


def test_redux_of_bits(evaluate: Any) -> None:
    for name in ("and", "or", "xor"):
        function = getattr(np, f"bitwise_{name}").reduce
        code = f"redux.sync.{name}.b32 %d, %a, 0xFFFFFFFF;"
        same(evaluate(code, "u32", a=u32(VALUES)), per_warp(function, VALUES))


def place(matrix: Any, registers: int, rows: Any, columns: Any) -> list[Any]:
    """Registers u32[32] from a matrix of small elements: element i of register r of a lane is
    matrix[rows(lane, r, i), columns(lane, r, i)]."""
    n = 4 // matrix.itemsize
    lane = np.arange(32)[:, None]
    i = np.arange(n)[None, :]
    return [
        np.ascontiguousarray(matrix[rows(lane, r, i), columns(lane, r, i)]).view(np.uint32)[:, 0]
        for r in range(registers)
    ]


INTEGER_KINDS = ("s8.s8", "u8.s8", "s8.u8", "u8.u8")


@pytest.mark.parametrize("k", [16, 32])
@pytest.mark.parametrize("kinds", INTEGER_KINDS)
def test_integer_mma_is_the_matrix_product(evaluate: Any, k: int, kinds: str) -> None:
    generator = np.random.default_rng(k)
    a_type, b_type = (np.int8 if t == "s8" else np.uint8 for t in kinds.split("."))
    a = generator.integers(0, 256, (16, k), np.uint8).view(a_type)
    b = generator.integers(0, 256, (k, 8), np.uint8).view(b_type)
    c = generator.integers(-1000, 1000, (16, 8), np.int32)
    # the ISA's figures: lane 4 g + t; A of 8-bit values, then B, then the accumulators
    a_regs = place(a, k // 8, lambda t, r, i: t // 4 + 8 * (r & 1),
                   lambda t, r, i: t % 4 * 4 + i + 16 * (r >> 1))  # fmt: skip
    b_regs = place(b, k // 16, lambda t, r, i: t % 4 * 4 + i + 16 * r, lambda t, r, i: t // 4)
    check_mma(evaluate, f"m16n8k{k}.row.col.s32.{kinds}.s32", "s32", a_regs, b_regs, c,
              a.astype(np.int64) @ b.astype(np.int64) + c)  # fmt: skip


@pytest.mark.parametrize("k", [8, 16])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_float_mma_is_the_matrix_product(evaluate: Any, k: int, kind: str) -> None:
    generator = np.random.default_rng(k)
    a = generator.integers(-8, 8, (16, k)).astype(np.float32)
    b = generator.integers(-8, 8, (k, 8)).astype(np.float32)
    c = generator.integers(-99, 99, (16, 8)).astype(np.float32)

    def halves(x: Any) -> Any:
        return x.astype(np.float16) if kind == "f16" else (x.view(np.uint32) >> 16).astype("u2")

    a_regs = place(halves(a), k // 4, lambda t, r, i: t // 4 + 8 * (r & 1),
                   lambda t, r, i: t % 4 * 2 + i + 8 * (r >> 1))  # fmt: skip
    b_regs = place(halves(b), k // 8, lambda t, r, i: t % 4 * 2 + i + 8 * r, lambda t, r, i: t // 4)
    check_mma(evaluate, f"m16n8k{k}.row.col.f32.{kind}.{kind}.f32", "f32", a_regs, b_regs, c,
              a @ b + c)  # fmt: skip


def check_mma(
    evaluate: Any, shape: str, out: str, a: list[Any], b: list[Any], c: Any, expected: Any
) -> None:
    lane = np.arange(32)
    for wanted in range(4):
        inputs = {f"a{i}": ("b32", value) for i, value in enumerate(a)}
        inputs |= {f"b{i}": ("b32", value) for i, value in enumerate(b)}
        spots = [(lane // 4 + 8 * (r >> 1), lane % 4 * 2 + (r & 1)) for r in range(4)]
        inputs |= {f"c{r}": (out, c[spots[r]]) for r in range(4)}
        lists = [",".join(f"%{x}{i}" for i in range(n)) for x, n in (("a", len(a)), ("b", len(b)))]
        code = (
            f"{{ .reg .{out} %e<4>;\n"
            f"mma.sync.aligned.{shape} {{%e0, %e1, %e2, %e3}}, {{{lists[0]}}}, {{{lists[1]}}}, "
            f"{{%c0, %c1, %c2, %c3}};\nmov.b32 %d, %e{wanted}; }}"
        )
        result = evaluate(code, out, **inputs)
        same(result, expected[spots[wanted]].astype(result.dtype))


@pytest.mark.parametrize("suffix", ["", ".trans"])
def test_ldmatrix_gives_each_lane_two_values_of_a_row(evaluate: Any, suffix: str) -> None:
    words = edge_values("u32", 128, 4)
    matrices = words.view(np.uint16).reshape(4, 8, 8)
    lane = np.arange(32)
    for m in range(4):
        code = f"""
    {{ .shared .align 16 .b8 tile[512]; .reg .b32 %base, %x0, %x1, %x2, %x3;
    mov.u32 %base, tile;
    shl.b32 %d, %thread, 4;
    add.u32 %base, %base, %d;
    st.shared.v4.b32 [%base], {{%a, %b, %c, %e}};
    bar.sync 0;
    ldmatrix.sync.aligned.m8n8.x4{suffix}.shared.b16 {{%x0, %x1, %x2, %x3}}, [%base];
    mov.b32 %d, %x{m}; }}
"""
        rows = words.reshape(32, 4)
        names = {"a": 0, "b": 1, "c": 2, "e": 3}
        result = evaluate(code, "u32", **{n: u32(rows[:, i]) for n, i in names.items()})
        matrix = matrices[m].T if suffix else matrices[m]
        pairs = np.stack([matrix[lane // 4, lane % 4 * 2], matrix[lane // 4, lane % 4 * 2 + 1]], 1)
        same(result, np.ascontiguousarray(pairs).view(np.uint32)[:, 0])


def test_mma_needs_the_whole_warp() -> None:
    code = """
    setp.eq.u32 %p, %a, 5;
@%p ret;
    { .reg .b32 %e<4>;
    mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%e0, %e1, %e2, %e3}, {%a, %a}, {%a},
        {%a, %a, %a, %a};
    mov.b32 %d, %e0; }
"""
    with pytest.raises(PtxError, match="needs all 32 lanes"):
        Snippet(code, "b32", {"a": ("b32", LANE)}).interpret()


def test_special_registers() -> None:
    code = """.version 8.0
.target sm_80
.address_size 64
.visible .entry where(.param .u64 out)
{
    .reg .u64 %out;
    .reg .u32 %x, %y, %z, %nx, %ny, %id, %at;
    mov.u32 %x, %tid.x;
    mov.u32 %y, %tid.y;
    mov.u32 %z, %tid.z;
    mov.u32 %nx, %ntid.x;
    mov.u32 %ny, %ntid.y;
    mad.lo.u32 %id, %z, %ny, %y;
    mad.lo.u32 %id, %id, %nx, %x;
    mov.u32 %x, %ctaid.x;
    mov.u32 %y, %ctaid.y;
    mov.u32 %nx, %nctaid.x;
    mad.lo.u32 %at, %y, %nx, %x;
    mad.lo.u32 %at, %at, 24, %id;
    ld.param.u64 %out, [out];
    mad.wide.u32 %out, %at, 4, %out;
    mov.u32 %x, %laneid;
    st.global.u32 [%out], %x;
    ret;
}
"""
    memory = Memory(1 << 20)
    out = memory.reserve(4 * 24 * 6)
    load(code)["where"].launch(memory, (3, 2), (4, 3, 2), [out])
    same(memory.read(out, np.uint32, (6, 24)), np.tile(np.arange(24), (6, 1)))
