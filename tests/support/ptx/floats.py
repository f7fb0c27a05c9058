"""Floating-point instructions.

add, sub, mul, fma, div, sqrt and rcp with .rn give the bits that the PTX ISA defines. The .approx
forms are computed exactly and rounded once: a processor's differ in the last places, so a test of
them needs a tolerance.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ops import arithmetic
from tests.support.ptx.elementwise import Builder, Function, elementwise
from tests.support.ptx.errors import PtxError
from tests.support.ptx.frame import DTYPES, Frame, Step, only
from tests.support.ptx.syntax import Instruction

NAN_BITS = {"f16": 0x7FFF, "f32": 0x7FFFFFFF, "f64": 0xFFF8000000000000}
"""The NaN that arithmetic returns."""


def canonical(values: Any) -> Any:
    """The values with every NaN replaced by the processor's."""
    values = np.asarray(values)
    if (nan := np.isnan(values)).any():
        dtype = values.dtype
        bits = np.array(NAN_BITS[f"f{8 * dtype.itemsize}"], f"u{dtype.itemsize}")
        return np.where(nan, bits.view(dtype), values)
    return values


def flush(values: Any) -> Any:
    """Subnormal f32 become zeros of their sign."""
    tiny = np.abs(values) < np.finfo(np.float32).tiny
    return np.where(tiny, np.copysign(np.float32(0), values), values)


def saturated(values: Any) -> Any:
    """Clamped to [0, 1], a NaN to 0."""
    return np.where(values > 0, np.minimum(values, 1), 0).astype(values.dtype)


def fused(a: Any, b: Any, c: Any) -> Any:
    """a * b + c rounded once, of f32 or f16."""
    if a.dtype == np.float32:
        return arithmetic.fma(a, b, c)
    product = np.float64(a) * np.float64(b)
    total = np.atleast_1d(product + np.float64(c))
    part = total - product
    lost = (product - (total - part)) + (np.float64(c) - part)
    bits = total.view(np.int64)
    odd = (lost != 0) & (bits & 1 == 0) & np.isfinite(total)
    bits += np.where(odd, np.where((lost > 0) == (total > 0), 1, -1), 0)
    return total.astype(np.float16)


def pick(smaller: bool, keep_nan: bool) -> Function:
    """min or max: -0 is below +0, and a NaN loses unless it is to be kept."""

    def function(a: Any, b: Any) -> Any:
        first = (a < b) | ((a == b) & (np.signbit(a) >= np.signbit(b)))
        chosen = np.where(first == smaller, a, b)
        nan_a, nan_b = np.isnan(a), np.isnan(b)
        if keep_nan:
            return np.where(nan_a, a, np.where(nan_b, b, chosen))
        return np.where(nan_a, b, np.where(nan_b, a, chosen))

    return function


def _approximation(function: Function) -> Function:
    return lambda a: function(np.float64(a)).astype(np.float32)


FUNCTIONS: dict[str, tuple[int, Function]] = {
    "add": (2, np.add), "sub": (2, np.subtract), "mul": (2, np.multiply), "div": (2, np.divide),
    "fma": (3, fused), "mad": (3, fused), "sqrt": (1, np.sqrt),
    "rcp": (1, lambda a: a.dtype.type(1) / a),
    "rsqrt": (1, _approximation(lambda a: 1 / np.sqrt(a))),
    "ex2": (1, _approximation(np.exp2)), "lg2": (1, _approximation(np.log2)),
    "sin": (1, _approximation(np.sin)), "cos": (1, _approximation(np.cos)),
    "tanh": (1, _approximation(np.tanh)),
}  # fmt: skip

ROUNDED = ("add", "sub", "mul", "fma", "mad")
"""Round to nearest where nothing is said; the others must say .rn or .approx."""

APPROXIMATE = ("rsqrt", "ex2", "lg2", "sin", "cos", "tanh")


def build_arithmetic(instruction: Instruction, frame: Frame) -> Step:
    only(instruction, "rn", "approx", "full", "ftz", "sat")
    stem, type_ = instruction.stem, instruction.type
    n_operands, function = FUNCTIONS[stem]
    rough = not {"approx", "full"}.isdisjoint(instruction.modifiers)
    if stem not in ROUNDED and not rough and "rn" not in instruction.modifiers:
        raise PtxError(f"{stem}.{type_} needs a rounding")
    if stem in APPROXIMATE and not rough:
        raise PtxError(f"{stem} has only .approx")
    if type_ == "f64" and stem in (*APPROXIMATE, "fma", "mad"):
        raise PtxError(f"{stem}.f64 is not supported")
    ftz, sat = "ftz" in instruction.modifiers, "sat" in instruction.modifiers

    def compute(*operands: Any) -> Any:
        if ftz:
            operands = tuple(map(flush, operands))
        result = canonical(function(*operands))
        if sat:
            result = saturated(result)
        return flush(result) if ftz else result

    return elementwise(instruction, frame, compute, type_, *[type_] * n_operands)


def build_pick(instruction: Instruction, frame: Frame) -> Step:
    only(instruction, "NaN", "ftz")
    keep_nan = "NaN" in instruction.modifiers
    choose = pick(instruction.stem == "min", keep_nan)
    ftz = "ftz" in instruction.modifiers

    def compute(a: Any, b: Any) -> Any:
        return canonical(choose(flush(a), flush(b)) if ftz else choose(a, b))

    return elementwise(instruction, frame, compute, *[instruction.type] * 3)


def build_sign(instruction: Instruction, frame: Frame) -> Step:
    """abs and neg change one bit, of a NaN too; copysign takes it from the first operand."""
    only(instruction, "ftz")
    type_ = instruction.type
    functions: dict[str, Function] = {
        "abs": np.abs,
        "neg": np.negative,
        "copysign": lambda a, b: np.copysign(b, a),
    }
    n_operands = 2 if instruction.stem == "copysign" else 1
    function = functions[instruction.stem]
    if "ftz" in instruction.modifiers:
        return elementwise(instruction, frame, lambda a: flush(function(a)), type_, type_)
    return elementwise(instruction, frame, function, type_, *[type_] * n_operands)


def build_testp(instruction: Instruction, frame: Frame) -> Step:
    kind, type_ = instruction.modifiers
    tiny = np.finfo(DTYPES[type_]).tiny
    functions: dict[str, Function] = {
        "finite": np.isfinite, "infinite": np.isinf, "notanumber": np.isnan,
        "number": lambda a: ~np.isnan(a), "normal": lambda a: np.isfinite(a) & (np.abs(a) >= tiny),
        "subnormal": lambda a: (np.abs(a) < tiny) & (a != 0),
    }  # fmt: skip
    if kind not in functions:
        raise PtxError(f".{kind} is not supported on testp")
    return elementwise(instruction, frame, functions[kind], "pred", type_)


def build_pairs(instruction: Instruction, frame: Frame) -> Step:
    """Arithmetic on two f16 in a word."""
    only(instruction, "rn", "sat", "NaN")
    keep_nan = "NaN" in instruction.modifiers
    functions = {stem: FUNCTIONS[stem] for stem in ("add", "sub", "mul", "fma")}
    functions["min"], functions["max"] = (2, pick(True, keep_nan)), (2, pick(False, keep_nan))
    functions["neg"], functions["abs"] = (1, np.negative), (1, np.abs)
    if instruction.stem not in functions or "sat" in instruction.modifiers:
        raise PtxError(f"{instruction.opcode} is not supported")
    n_operands, function = functions[instruction.stem]

    def compute(*operands: Any) -> Any:
        halves = [np.ascontiguousarray(np.atleast_1d(o)).view(np.float16) for o in operands]
        result = function(*halves)
        if instruction.stem not in ("neg", "abs"):
            result = canonical(result)
        return np.ascontiguousarray(result).view(np.uint32)

    return elementwise(instruction, frame, compute, "f16x2", *["f16x2"] * n_operands)


BUILDERS: dict[str, Builder] = {
    **dict.fromkeys(FUNCTIONS, build_arithmetic),
    "min": build_pick, "max": build_pick,
    "abs": build_sign, "neg": build_sign, "copysign": build_sign,
}  # fmt: skip
