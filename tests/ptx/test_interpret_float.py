"""Floating-point instructions against exact rational arithmetic and NumPy."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from tests.support.ptx.frame import DTYPES
from tests.support.ptx.snippet import edge_values, same

N = 512


def f32(values: Any) -> tuple[str, Any]:
    return "f32", np.asarray(values, np.float32)


def nearest(exact: Fraction, dtype: Any) -> Any:
    """The float nearest to a rational number, ties to even."""
    guess = dtype(float(exact))
    near = [guess, np.nextafter(guess, dtype(np.inf)), np.nextafter(guess, dtype(-np.inf))]
    finite = [x for x in near if np.isfinite(x)]
    unsigned = f"u{np.dtype(dtype).itemsize}"
    return min(finite, key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(unsigned)) & 1))


@pytest.mark.parametrize("type_", ["f32", "f16"])
def test_fma_rounds_once(evaluate: Any, type_: str) -> None:
    a, b, c = (edge_values(type_, N, seed) for seed in (1, 2, 3))
    with np.errstate(over="ignore", invalid="ignore"):
        c[100:] = (-a[100:].astype(np.float64) * b[100:] * 1.0001).astype(c.dtype)
    inputs = {"a": (type_, a), "b": (type_, b), "c": (type_, c)}

    result = evaluate(f"fma.rn.{type_} %d, %a, %b, %c;", type_, **inputs)

    dtype, limit = DTYPES[type_], float(np.finfo(DTYPES[type_]).max)
    n_checked = 0
    for x, y, z, got in zip(a, b, c, result, strict=True):
        if np.isfinite([x, y, z]).all():
            exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
            if 0 < abs(exact) <= limit:
                assert got == nearest(exact, dtype), (x, y, z)
                n_checked += 1
    assert n_checked > N // 2


def test_fma_of_infinities_and_a_product_just_off_a_tie(evaluate: Any) -> None:
    one, eps = np.float32(1), np.float32(2**-23)
    a = [np.inf, np.inf, one + eps, 3e38]
    b = [0, 1, one + eps, 10]
    c = [1, -np.inf, np.float32(2**-47), -np.inf]
    padded = [np.resize(x, 32) for x in (a, b, c)]
    result = evaluate("fma.rn.f32 %d, %a, %b, %c;", "f32", a=f32(padded[0]), b=f32(padded[1]),
                      c=f32(padded[2]))  # fmt: skip
    same(result[:4], [np.nan, np.nan, one + 2 * eps, -np.inf])


def minimum(a: Any, b: Any) -> Any:
    return np.where(np.isnan(a), b, np.where(np.isnan(b), a, np.where(
        (a == b) & np.signbit(a), a, np.where(a == b, b, np.where(a < b, a, b)))))  # fmt: skip


def flushed(x: Any) -> Any:
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


BINARY: list[tuple[str, Callable[..., Any]]] = [
    ("add.rn.f32 %d, %a, %b;", np.add),
    ("add.f32 %d, %a, %b;", np.add),
    ("sub.rn.f32 %d, %a, %b;", np.subtract),
    ("mul.rn.f32 %d, %a, %b;", np.multiply),
    ("mul.rn.ftz.f32 %d, %a, %b;", lambda a, b: flushed(flushed(a) * flushed(b))),
    ("div.rn.f32 %d, %a, %b;", np.divide),
    ("min.f32 %d, %a, %b;", minimum),
    ("max.f32 %d, %a, %b;", lambda a, b: -minimum(-a, -b)),
    ("min.NaN.f32 %d, %a, %b;",
     lambda a, b: np.where(np.isnan(a) | np.isnan(b), np.nan, minimum(a, b))),
    ("max.NaN.f32 %d, %a, %b;",
     lambda a, b: np.where(np.isnan(a) | np.isnan(b), np.nan, -minimum(-a, -b))),
    ("copysign.f32 %d, %a, %b;", lambda a, b: np.copysign(b, a)),
    ("abs.f32 %d, %a; add.rn.f32 %d, %d, %b;", lambda a, b: np.abs(a) + b),
    ("neg.f32 %d, %a; mul.rn.f32 %d, %d, %b;", lambda a, b: -a * b),
    ("setp.lt.f32 %p, %a, %b; selp.f32 %d, %a, %b, %p;", lambda a, b: np.where(a < b, a, b)),
    ("setp.geu.f32 %p, %a, %b; selp.f32 %d, %a, %b, %p;", lambda a, b: np.where(a < b, b, a)),
    ("setp.ne.f32 %p, %a, %a; selp.f32 %d, %a, %b, %p;", lambda a, b: b),
    ("setp.neu.f32 %p, %a, %a; selp.f32 %d, 1.0, %b, %p;",
     lambda a, b: np.where(np.isnan(a), 1, b)),
    ("setp.num.f32 %p, %a, %b; selp.f32 %d, %a, 2.5, %p;",
     lambda a, b: np.where(np.isnan(a) | np.isnan(b), 2.5, a)),
    ("testp.subnormal.f32 %p, %a; selp.f32 %d, 1.0, %b, %p;",
     lambda a, b: np.where((a != 0) & (np.abs(a) < np.finfo(np.float32).tiny), 1, b)),
    ("testp.finite.f32 %p, %a; selp.f32 %d, 1.0, %b, %p;",
     lambda a, b: np.where(np.isfinite(a), 1, b)),
]  # fmt: skip


@pytest.mark.parametrize(("code", "reference"), BINARY, ids=[c[0] for c in BINARY])
def test_f32_instruction(evaluate: Any, code: str, reference: Callable[..., Any]) -> None:
    a, b = edge_values("f32", N, 1), edge_values("f32", N, 2)
    b[:40] = np.repeat(np.float32([0, -0.0, np.nan, np.inf, 1e-40]), 8)
    a[:40] = np.tile(np.float32([0, -0.0, np.nan, np.inf, -np.inf, 1, 3e38, 1e-40]), 5)
    with np.errstate(all="ignore"):
        expected = np.asarray(reference(a, b)).astype(np.float32)

    same(evaluate(code, "f32", a=("f32", a), b=("f32", b)), expected)


UNARY: list[tuple[str, str, str, Callable[[Any], Any], float]] = [
    ("sqrt.rn.f32 %d, %a;", "f32", "f32", np.sqrt, 0),
    ("rcp.rn.f32 %d, %a;", "f32", "f32", lambda a: np.float32(1) / a, 0),
    ("rcp.approx.f32 %d, %a;", "f32", "f32", lambda a: np.float32(1) / a, 3e-7),
    ("rsqrt.approx.f32 %d, %a;", "f32", "f32", lambda a: 1 / np.sqrt(np.float64(a)), 3e-7),
    ("ex2.approx.f32 %d, %a;", "f32", "f32", lambda a: np.exp2(np.float64(a)), 3e-7),
    ("cvt.sat.f32.f32 %d, %a;", "f32", "f32", lambda a: np.where(a > 0, np.minimum(a, 1), 0), 0),
    ("cvt.rni.f32.f32 %d, %a;", "f32", "f32", np.rint, 0),
    ("cvt.rzi.f32.f32 %d, %a;", "f32", "f32", np.trunc, 0),
    ("cvt.f32.f16 %d, %a;", "f32", "f16", lambda a: a.astype(np.float32), 0),
    ("cvt.rn.f16.f32 %d, %a;", "f16", "f32", lambda a: a.astype(np.float16), 0),
    ("cvt.rn.f32.s32 %d, %a;", "f32", "s32", lambda a: a.astype(np.float32), 0),
    ("cvt.rn.f32.u32 %d, %a;", "f32", "u32", lambda a: a.astype(np.float32), 0),
    ("cvt.rn.f32.s8 %d, %a;", "f32", "s32", lambda a: a.astype(np.int8).astype(np.float32), 0),
    ("cvt.rn.f32.s64 %d, %a;", "f32", "s64", lambda a: a.astype(np.float32), 0),
    ("cvt.rn.f16.s32 %d, %a;", "f16", "s32", lambda a: a.astype(np.float16), 0),
    ("cvt.f64.f32 %d, %a;", "f64", "f32", lambda a: a.astype(np.float64), 0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "out", "type_", "reference", "relative"), UNARY, ids=[c[0] for c in UNARY]
)
def test_one_operand(
    evaluate: Any, code: str, out: str, type_: str, reference: Callable[..., Any], relative: float
) -> None:
    a = edge_values(type_, N, 1)
    with np.errstate(all="ignore"):
        expected = np.asarray(reference(a)).astype(DTYPES[out])

    result = evaluate(code, out, relative=relative, a=(type_, a))

    same(result, expected, relative)


@pytest.mark.parametrize(
    ("code", "bounds", "rounding"),
    [
        ("cvt.rni.s32.f32 %d, %a;", (-(2**31), 2**31 - 1), np.rint),
        ("cvt.rzi.s32.f32 %d, %a;", (-(2**31), 2**31 - 1), np.trunc),
        ("cvt.rmi.s32.f32 %d, %a;", (-(2**31), 2**31 - 1), np.floor),
        ("cvt.rpi.s32.f32 %d, %a;", (-(2**31), 2**31 - 1), np.ceil),
        ("cvt.rni.s8.f32 %d, %a;", (-128, 127), np.rint),
        ("cvt.rni.sat.s8.f32 %d, %a;", (-128, 127), np.rint),
        ("cvt.rni.u8.f32 %d, %a;", (0, 255), np.rint),
    ],
)
def test_floats_become_integers_by_clamping(
    evaluate: Any, code: str, bounds: tuple[int, int], rounding: Callable[..., Any]
) -> None:
    a = edge_values("f32", N, 1)
    a[:8] = [0.5, 1.5, 2.5, -0.5, -1.5, 127.5, 3e9, -3e9]
    with np.errstate(invalid="ignore"):
        clamped = np.clip(np.nan_to_num(rounding(a.astype(np.float64))), *bounds)

    result = evaluate(code, "s32", a=("f32", a))

    same(result, clamped.astype(np.int64).astype(np.int32))


def test_nan_becomes_zero_or_the_top_bit(evaluate: Any) -> None:
    a = f32(np.full(32, np.nan))
    assert (evaluate("cvt.rzi.u32.f32 %d, %a;", "u32", a=a) == 0).all()
    assert (evaluate("cvt.rzi.s64.f32 %d, %a;", "s64", a=a) == -(2**63)).all()


def bf16_nearest(a: Any) -> Any:
    """bf16 bits by comparing the two neighbours."""
    low = a.view(np.uint32) & np.uint32(0xFFFF0000)
    high = low + np.uint32(0x10000)
    exact = np.abs(a.astype(np.float64))
    below = np.abs(low.view(np.float32).astype(np.float64))
    above = np.abs(high.view(np.float32).astype(np.float64))
    above = np.where(np.isfinite(above), above, 2.0**128)
    up = (above - exact < exact - below) | (
        (above - exact == exact - below) & (low & np.uint32(0x10000) != 0)
    )
    return (np.where(up, high, low) >> np.uint32(16)).astype(np.uint32)


def test_bf16_rounds_to_nearest_even(evaluate: Any) -> None:
    a = edge_values("f32", N, 5)
    a[:64] = (np.arange(64, dtype=np.uint32) * 0x8000 + 0x3F800000).view(np.float32)
    a = a[np.isfinite(a)][:384]
    code = "{ .reg .b16 %h; cvt.rn.bf16.f32 %h, %a; cvt.u32.u16 %d, %h; }"
    same(evaluate(code, "u32", a=f32(a)), bf16_nearest(a))


def test_halves_pack_with_the_first_operand_above(evaluate: Any) -> None:
    a, b = edge_values("f32", N, 1) * np.float32(0.01), edge_values("f32", N, 2)
    a, b = np.nan_to_num(a, posinf=2, neginf=3), np.nan_to_num(b, posinf=2, neginf=3)
    with np.errstate(over="ignore"):
        words = np.stack([b.astype(np.float16), a.astype(np.float16)], axis=1).view(np.uint32)
    same(evaluate("cvt.rn.f16x2.f32 %d, %a, %b;", "b32", a=f32(a), b=f32(b)), words[:, 0])


@pytest.mark.parametrize(
    ("name", "function"),
    [("add", np.add), ("sub", np.subtract), ("mul", np.multiply), ("min", np.fmin)],
)
def test_two_halves_at_once(evaluate: Any, name: str, function: Callable[..., Any]) -> None:
    a, b = (np.nan_to_num(edge_values("f16", 2 * N, seed), posinf=2, neginf=1) for seed in (1, 2))
    b[b == 0] = 1
    with np.errstate(over="ignore"):
        expected = function(a, b).astype(np.float16)
    inputs = {"a": ("f16x2", a.view(np.uint32)), "b": ("f16x2", b.view(np.uint32))}
    result = evaluate(f"{name}.f16x2 %d, %a, %b;", "f16x2", **inputs)
    same(result.view(np.float16), expected)


def test_literals(evaluate: Any) -> None:
    a = f32(np.arange(32))
    assert (evaluate("mov.f32 %d, 0f3FC00000;", "f32", a=a) == 1.5).all()
    assert (evaluate("mov.f32 %d, -2.5;", "f32", a=a) == -2.5).all()
    assert (evaluate("mov.b32 %d, 0f7FC00001;", "b32", a=a) == 0x7FC00001).all()
    assert (evaluate("mov.f64 %d, 0d3FF8000000000000;", "f64", a=a) == 1.5).all()
    assert (evaluate("mov.u64 %d, 0xFFFFFFFFFF;", "u64", a=a) == 0xFFFFFFFFFF).all()
    assert (evaluate("mov.s32 %d, -7;", "s32", a=a) == -7).all()
