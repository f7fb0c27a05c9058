"""Integer and logical instructions against Python's integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.ptx import PtxError
from tests.support.ptx.frame import DTYPES
from tests.support.ptx.snippet import Snippet, edge_values, same

N = 256


def wrap(value: int, type_: str) -> int:
    bits = 8 * np.dtype(DTYPES[type_]).itemsize
    value &= (1 << bits) - 1
    return value - (1 << bits) if type_[0] == "s" and value >> (bits - 1) else value


def bytes_of(word: int, signed: bool) -> list[int]:
    values = [(word >> 8 * i) & 255 for i in range(4)]
    return [v - 256 if signed and v > 127 else v for v in values]


def dot4(a: int, b: int, a_signed: bool, b_signed: bool) -> int:
    return sum(x * y for x, y in zip(bytes_of(a, a_signed), bytes_of(b, b_signed), strict=True))


def dot2(a: int, b: int) -> int:
    """Signed halves of a, unsigned upper bytes of b."""
    upper = bytes_of(b, False)[2:]
    return wrap(a, "s16") * upper[0] + wrap(a >> 16, "s16") * upper[1]


def quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def permuted(a: int, b: int, c: int) -> int:
    source = bytes_of(a, False) + bytes_of(b, False)
    result = 0
    for i in range(4):
        nibble = c >> 4 * i & 15
        byte = source[nibble & 7]
        result |= (byte if nibble < 8 else 255 * (byte >> 7)) << 8 * i
    return result


def extracted(a: int, position: int, length: int, width: int, signed: bool) -> int:
    """The ISA's definition, bit by bit."""
    position, length = position & 255, length & 255
    bits = [a >> i & 1 for i in range(width)]
    sign = bits[min(position + length - 1, width - 1)] if signed and length else 0
    picked = [
        bits[position + i] if i < length and position + i < width else sign for i in range(width)
    ]
    return sum(bit << i for i, bit in enumerate(picked))


def inserted(a: int, b: int, position: int, length: int) -> int:
    for i in range(length & 255):
        if (position & 255) + i < 32:
            at = (position & 255) + i
            b = b & ~(1 << at) | (a >> i & 1) << at
    return b


def funnel_left(a: int, b: int, n: int) -> int:
    return (b << 32 | a) << n >> 32


CASES: list[tuple[str, str, Callable[..., int]]] = [
    ("add.s32 %d, %a, %b;", "s32 s32 s32", lambda a, b: a + b),
    ("add.sat.s32 %d, %a, %b;", "s32 s32 s32", lambda a, b: max(-(2**31), min(2**31 - 1, a + b))),
    ("sub.u16 %d, %a, %b;", "u16 u16 u16", lambda a, b: a - b),
    ("sub.s64 %d, %a, %b;", "s64 s64 s64", lambda a, b: a - b),
    ("sub.sat.s32 %d, %a, %b;", "s32 s32 s32", lambda a, b: max(-(2**31), min(2**31 - 1, a - b))),
    ("mul.lo.u32 %d, %a, %b;", "u32 u32 u32", lambda a, b: a * b),
    ("mul.hi.u32 %d, %a, %b;", "u32 u32 u32", lambda a, b: a * b >> 32),
    ("mul.hi.s32 %d, %a, %b;", "s32 s32 s32", lambda a, b: a * b >> 32),
    ("mul.hi.u64 %d, %a, %b;", "u64 u64 u64", lambda a, b: a * b >> 64),
    ("mul.wide.s32 %d, %a, %b;", "s64 s32 s32", lambda a, b: a * b),
    ("mul.wide.u16 %d, %a, %b;", "u32 u16 u16", lambda a, b: a * b),
    ("mad.lo.s32 %d, %a, %b, %c;", "s32 s32 s32 s32", lambda a, b, c: a * b + c),
    ("mad.hi.u32 %d, %a, %b, %c;", "u32 u32 u32 u32", lambda a, b, c: (a * b >> 32) + c),
    ("mad.wide.u32 %d, %a, 34, %b;", "u64 u32 u64", lambda a, b: a * 34 + b),
    ("or.b32 %b, %b, 1; div.s32 %d, %a, %b;", "s32 s32 b32",
     lambda a, b: quotient(a, wrap(b | 1, "s32"))),
    ("or.b32 %b, %b, 1; rem.u32 %d, %a, %b;", "u32 u32 b32", lambda a, b: a % (b | 1)),
    ("or.b32 %b, %b, 1; rem.s32 %d, %a, %b;", "s32 s32 b32",
     lambda a, b: a - quotient(a, wrap(b | 1, "s32")) * wrap(b | 1, "s32")),
    ("abs.s32 %d, %a;", "s32 s32", abs),
    ("neg.s32 %d, %a;", "s32 s32", lambda a: -a),
    ("min.s32 %d, %a, %b;", "s32 s32 s32", min),
    ("min.u32 %d, %a, %b;", "u32 u32 u32", min),
    ("max.s64 %d, %a, %b;", "s64 s64 s64", max),
    ("and.b32 %d, %a, %b;", "b32 b32 b32", lambda a, b: a & b),
    ("or.b64 %d, %a, %b;", "b64 b64 b64", lambda a, b: a | b),
    ("xor.b16 %d, %a, %b;", "b16 b16 b16", lambda a, b: a ^ b),
    ("not.b32 %d, %a;", "b32 b32", lambda a: ~a),
    ("shl.b32 %d, %a, %b;", "b32 b32 u32", lambda a, n: a << min(n, 32)),
    ("shl.b64 %d, %a, %b;", "b64 b64 u32", lambda a, n: a << min(n, 64)),
    ("shr.u32 %d, %a, %b;", "u32 u32 u32", lambda a, n: a >> min(n, 32)),
    ("shr.s32 %d, %a, %b;", "s32 s32 u32", lambda a, n: a >> min(n, 32)),
    ("shr.s64 %d, %a, 63;", "s64 s64", lambda a: a >> 63),
    ("shf.l.wrap.b32 %d, %a, %b, %c;", "b32 b32 b32 u32",
     lambda a, b, n: funnel_left(a, b, n & 31)),
    ("shf.r.clamp.b32 %d, %a, %b, %c;", "b32 b32 b32 u32",
     lambda a, b, n: (b << 32 | a) >> min(n, 32)),
    ("bfe.u32 %d, %a, %b, %c;", "u32 u32 u32 u32", lambda a, b, c: extracted(a, b, c, 32, False)),
    ("bfe.s32 %d, %a, %b, %c;", "s32 s32 u32 u32", lambda a, b, c: extracted(a, b, c, 32, True)),
    ("bfe.s32 %d, %a, 4, 4;", "s32 s32", lambda a: extracted(a, 4, 4, 32, True)),
    ("and.b32 %b, %b, 255; and.b32 %c, %c, 255; bfe.u64 %d, %a, %b, %c;", "u64 u64 u32 u32",
     lambda a, b, c: extracted(a, b, c, 64, False)),
    ("bfi.b64 %d, %a, %b, 60, 8;", "b64 b64 b64", lambda a, b: b & (1 << 60) - 1 | a << 60),
    ("bfi.b32 %d, %a, %b, %c, 5;", "b32 b32 b32 u32", lambda a, b, c: inserted(a, b, c, 5)),
    ("bfi.b32 %d, %a, %b, 7, %c;", "b32 b32 b32 u32", lambda a, b, c: inserted(a, b, 7, c)),
    ("prmt.b32 %d, %a, %b, %c;", "b32 b32 b32 b32", permuted),
    ("prmt.b32 %d, %a, %b, 0x5410;", "b32 b32 b32", lambda a, b: a & 0xFFFF | (b & 0xFFFF) << 16),
    ("prmt.b32.rc8 %d, %a, %b, %c;", "b32 b32 b32 b32",
     lambda a, b, c: (a >> 8 * (c & 3) & 255) * 0x01010101),
    ("prmt.b32.f4e %d, %a, %b, %c;", "b32 b32 b32 b32",
     lambda a, b, c: (b << 32 | a) >> 8 * (c & 3)),
    ("lop3.b32 %d, %a, %b, %c, 0xEA;", "b32 b32 b32 b32", lambda a, b, c: a & b | c),
    ("lop3.b32 %d, %a, %b, %c, 0x96;", "b32 b32 b32 b32", lambda a, b, c: a ^ b ^ c),
    ("popc.b32 %d, %a;", "u32 b32", int.bit_count),
    ("popc.b64 %d, %a;", "u32 b64", int.bit_count),
    ("clz.b32 %d, %a;", "u32 b32", lambda a: 32 - a.bit_length()),
    ("clz.b64 %d, %a;", "u32 b64", lambda a: 64 - a.bit_length()),
    ("bfind.u32 %d, %a;", "u32 u32", lambda a: a.bit_length() - 1),
    ("brev.b32 %d, %a;", "b32 b32", lambda a: int(f"{a:032b}"[::-1], 2)),
    ("dp4a.s32.s32 %d, %a, %b, %c;", "s32 b32 b32 s32",
     lambda a, b, c: c + dot4(a, b, True, True)),
    ("dp4a.u32.s32 %d, %a, %b, %c;", "s32 b32 b32 s32",
     lambda a, b, c: c + dot4(a, b, False, True)),
    ("dp4a.u32.u32 %d, %a, %b, %c;", "u32 b32 b32 u32",
     lambda a, b, c: c + dot4(a, b, False, False)),
    ("dp2a.hi.s32.u32 %d, %a, %b, %c;", "s32 b32 b32 s32",
     lambda a, b, c: c + dot2(a, b)),
    ("setp.lt.s32 %p, %a, %b; selp.b32 %d, %a, %b, %p;", "s32 s32 s32", min),
    ("setp.hi.u32 %p, %a, %b; selp.u32 %d, %a, %b, %p;", "u32 u32 u32", max),
    ("setp.ge.u32 %p, %b, 64; setp.eq.and.u32 %p|%q, %a, 1, %p;\n"
     "selp.u32 %d, 2, 0, %p; @%q add.u32 %d, %d, 1;", "u32 u32 u32",
     lambda a, b: 2 * (a == 1 and b >= 64) + (a != 1 and b >= 64)),
    ("setp.ne.s32 %p, %a, 0; setp.gt.or.s32 %p, %b, 5, !%p; selp.s32 %d, 1, 0, %p;", "s32 s32 s32",
     lambda a, b: int(b > 5 or a == 0)),
    ("setp.lt.s32 %p, %a, 0; not.pred %q, %p; xor.pred %p, %p, %q;\n"
     "@!%q and.pred %p, %q, %q; selp.s32 %d, 1, 0, %p;", "s32 s32", lambda a: int(a >= 0)),
    ("slct.u32.s32 %d, %a, %b, %c;", "u32 u32 u32 s32", lambda a, b, c: a if c >= 0 else b),
    ("{ .reg .b16 %lo, %hi; mov.b32 {%lo, %hi}, %a; mov.b32 %d, {%hi, %lo}; }", "b32 b32",
     lambda a: a >> 16 | a << 16),
    ("mov.b64 %d, {%a, %b};", "b64 b32 b32", lambda a, b: a | b << 32),
    ("cvt.s32.s8 %d, %a;", "s32 b32", lambda a: wrap(a, "s8")),
    ("cvt.u32.u16 %d, %a;", "u32 u16", lambda a: a),
    ("cvt.s64.s32 %d, %a;", "s64 s32", lambda a: a),
    ("cvt.u64.u32 %d, %a;", "u64 u32", lambda a: a),
    ("cvt.u32.u64 %d, %a;", "u32 u64", lambda a: a),
    ("cvt.sat.s8.s32 %d, %a;", "s32 s32", lambda a: max(-128, min(127, a))),
    ("cvt.sat.u8.s32 %d, %a;", "u32 s32", lambda a: max(0, min(255, a))),
    ("cvt.sat.u16.s64 %d, %a;", "u32 s64", lambda a: max(0, min(65535, a))),
    ("cvt.pack.sat.s8.s32.b32 %d, %a, %b, %c;", "b32 s32 s32 b32",
     lambda a, b, c: c << 16 | (max(-128, min(127, a)) & 255) << 8 | max(-128, min(127, b)) & 255),
    ("cvt.pack.sat.s16.s32 %d, %a, %b;", "b32 s32 s32",
     lambda a, b: (max(-32768, min(32767, a)) & 65535) << 16 | max(-32768, min(32767, b)) & 65535),
    ("mov.u32 %d, (3*34+2)/4; add.u32 %d, %d, %a;", "u32 u32", lambda a: a + 26),
]  # fmt: skip


@pytest.mark.parametrize(("code", "types", "reference"), CASES, ids=[c[0] for c in CASES])
def test_integer_instruction(
    evaluate: Any, code: str, types: str, reference: Callable[..., int]
) -> None:
    out, *inputs = types.split()
    values = {
        name: (type_, edge_values(type_, N, seed))
        for seed, (name, type_) in enumerate(zip("abc", inputs, strict=False))
    }
    columns = [[int(v) for v in array] for _, array in values.values()]
    expected = [wrap(reference(*row), out) for row in zip(*columns, strict=True)]

    result = evaluate(code, out, **values)

    same(result, np.array(expected, DTYPES[out]))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("frobnicate.b32 %d, %a;", "frobnicate.b32 is not supported"),
        ("add.cc.u32 %d, %a, %a;", ".cc is not supported on add"),
        ("add.u32 %d, %a;", "add takes 3 operands"),
        ("mul.u32 %d, %a, %a;", "needs .lo, .hi or .wide"),
        ("add.f32 %d, %a, %a;", "%d of type u32 is used as f32"),
        ("add.u64 %d, %a, %a;", "%d of type u32 is used as u64"),
        ("add.u32 %d, %a, %unknown;", "%unknown is not declared"),
        ("bra nowhere;", "there is no such label"),
        ("add.u32 , %a;", "cannot be read"),
        (".reg .u32 %n;", "%n is declared already"),
        ("add.u32 %d, %a, 1 +;", "cannot read the operand"),
        ("setp.leu.u32 %p, %a, %a;", "no comparison .leu of u32"),
        ("mov.u32 %d, %lanemask_all;", "%lanemask_all is not supported"),
        ("div.u32 %d, %a, 0;", "divides by zero"),
        ("cvt.rni.u32.f32 %d, %a;", "%a of type u32 is used as f32"),
    ],
)
def test_what_is_not_understood_says_where(code: str, message: str) -> None:
    snippet = Snippet(code, "u32", {"a": ("u32", np.arange(32))})
    line = snippet.text[: snippet.text.index(code)].count("\n") + 1

    with pytest.raises(PtxError) as caught:
        snippet.interpret()

    assert str(caught.value).startswith(f"snippet.ptx:{line}: ")
    assert message in str(caught.value)
