"""Conversions between types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.support.ptx.elementwise import Builder, Function, elementwise
from tests.support.ptx.errors import PtxError
from tests.support.ptx.floats import canonical, flush, saturated
from tests.support.ptx.frame import DTYPES, Frame, Step, is_float, only
from tests.support.ptx.syntax import SIZES, Instruction

ROUNDINGS: dict[str, Callable[[Any], Any]] = {
    "rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil,
}  # fmt: skip


def build_cvt(instruction: Instruction, frame: Frame) -> Step:
    if "pack" in instruction.modifiers:
        return build_pack(instruction, frame)
    only(instruction, "rn", "rz", "rm", "rp", *ROUNDINGS, "sat", "ftz", "relu")
    to, from_ = instruction.modifiers[-2:]
    if from_ not in SIZES or to not in (*SIZES, "bf16x2"):
        raise PtxError("cvt needs two types")
    rounding = next((m for m in instruction.modifiers if m in (*ROUNDINGS, "rn", "rz")), None)
    if to in ("f16x2", "bf16x2"):
        return _pack_halves(instruction, frame, to)
    convert = _conversion(to, from_, rounding, instruction.modifiers)
    target = frame.target(instruction.operands[0], to, loose=True)
    source = frame.source(instruction.operands[1], from_, loose=True)
    return lambda s: target(s, convert(source(s)))


def _conversion(to: str, from_: str, rounding: str | None, modifiers: list[str]) -> Function:
    sat, ftz, relu = ("sat" in modifiers, "ftz" in modifiers, "relu" in modifiers)
    if not is_float(to) and to != "bf16":
        if is_float(from_):
            if rounding not in ROUNDINGS:
                raise PtxError(f"a conversion from {from_} to {to} needs .rni, .rzi, .rmi or .rpi")
            round_ = ROUNDINGS[rounding]
            return lambda a: to_integer(round_(np.float64(flush(a) if ftz else a)), to, from_)
        return lambda a: _between_integers(a, to, sat)
    if not is_float(from_) and from_ != "bf16":
        if rounding != "rn":
            raise PtxError(f"a conversion from {from_} to {to} needs .rn")
        return lambda a: round_float(np.asarray(a), to, "rn")
    narrower = SIZES[to] < SIZES[from_]
    if narrower and rounding not in ("rn", "rz"):
        raise PtxError(f"a conversion from {from_} to {to} needs .rn or .rz")

    def floats(a: Any) -> Any:
        value = bf16_values(a) if from_ == "bf16" else a
        value = flush(value) if ftz else value
        if rounding in ROUNDINGS:
            value = ROUNDINGS[rounding](value)
        if sat:
            value = saturated(value)
        if relu:
            value = np.where(value > 0, value, np.where(np.isnan(value), value, 0))
        return round_float(np.asarray(value), to, rounding or "rn")

    return floats


def to_integer(values: Any, to: str, from_: str) -> Any:
    """Whole f64 to an integer type, clamped; a NaN is 0, or the top bit alone in 64 bits."""
    limits = np.iinfo(DTYPES[to])
    nan_bits = 1 << 63 if from_ == "f64" or SIZES[to] == 8 else 0
    values = np.atleast_1d(values)
    inside = (values > limits.min) & (values < float(limits.max))
    result = np.where(inside, values, 0).astype(DTYPES[to])
    result = np.where(values <= limits.min, limits.min, result).astype(DTYPES[to])
    result = np.where(values >= float(limits.max), limits.max, result).astype(DTYPES[to])
    if np.isnan(values).any():
        nan = np.array(nan_bits >> (64 - 8 * SIZES[to]), f"u{SIZES[to]}").view(DTYPES[to])
        result = np.where(np.isnan(values), nan, result).astype(DTYPES[to])
    return result


def _between_integers(values: Any, to: str, sat: bool) -> Any:
    if not sat:
        return np.asarray(values).astype(DTYPES[to])
    limits = np.iinfo(DTYPES[to])
    exact = np.asarray(values)
    low = max(int(limits.min), int(np.iinfo(exact.dtype).min))
    high = min(int(limits.max), int(np.iinfo(exact.dtype).max))
    return np.clip(exact, exact.dtype.type(low), exact.dtype.type(high)).astype(DTYPES[to])


def round_float(values: Any, to: str, rounding: str) -> Any:
    """A float or integer array in a float type; bf16 as its bits."""
    if to == "bf16":
        wide = np.asarray(values, np.float32)
        bits = np.atleast_1d(wide).view(np.uint32)
        if rounding == "rn":
            bits = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        halves = (bits >> np.uint32(16)).astype(np.uint16)
        return np.where(np.isnan(np.atleast_1d(wide)), np.uint16(0x7FFF), halves)
    result = np.atleast_1d(values).astype(DTYPES[to])
    if rounding == "rz" and values.dtype.kind == "f":
        away = np.abs(result.astype(np.float64)) > np.abs(np.float64(values))
        result = np.where(away, np.nextafter(result, DTYPES[to](0)), result)
    return canonical(result)


def bf16_values(bits: Any) -> Any:
    """f32 of bf16 bits."""
    return (np.atleast_1d(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def _pack_halves(instruction: Instruction, frame: Frame, to: str) -> Step:
    """d = {a in the upper half, b in the lower half}."""
    rounding = "rz" if "rz" in instruction.modifiers else "rn"
    half, relu = to.removesuffix("x2"), "relu" in instruction.modifiers

    def pack(a: Any, b: Any) -> Any:
        words = []
        for value in (a, b):
            value = np.where(value < 0, np.float32(0), value) if relu else np.asarray(value)
            bits = np.atleast_1d(round_float(value, half, rounding)).view(np.uint16)
            words.append(bits.astype(np.uint32))
        return (words[0] << np.uint32(16)) | words[1]

    return elementwise(instruction, frame, pack, "b32", "f32", "f32")


def build_pack(instruction: Instruction, frame: Frame) -> Step:
    """cvt.pack.sat: a above b, each clamped, and with a third operand its low bits above those."""
    only(instruction, "pack", "sat")
    to = instruction.modifiers[2]
    limits, size = np.iinfo(DTYPES[to]), np.uint32(8 * SIZES[to])
    mask = np.uint32((1 << int(size)) - 1)

    def narrow(values: Any) -> Any:
        return (
            np.clip(np.int64(values), limits.min, limits.max).astype(np.int32).astype(np.uint32)
            & mask
        )

    def pack(a: Any, b: Any, *rest: Any) -> Any:
        pair = (narrow(a) << size) | narrow(b)
        return (rest[0] << np.uint32(2 * size)) | pair if rest else pair

    types = ["s32", "s32", *["b32"] * (len(instruction.operands) - 3)]
    return elementwise(instruction, frame, pack, "b32", *types)


BUILDERS: dict[str, Builder] = {"cvt": build_cvt}
