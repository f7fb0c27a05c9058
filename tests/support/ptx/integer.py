"""Integer arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.ptx.elementwise import Builder, Function, elementwise, simple
from tests.support.ptx.errors import PtxError
from tests.support.ptx.frame import DTYPES, Frame, Step, only
from tests.support.ptx.syntax import SIZES, Instruction

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


def build_add(instruction: Instruction, frame: Frame) -> Step:
    only(instruction, "sat")
    sign = 1 if instruction.stem == "add" else -1
    type_ = instruction.type
    if "sat" not in instruction.modifiers:
        function: Function = np.add if sign == 1 else np.subtract
    elif type_ == "s32":

        def function(a: Any, b: Any) -> Any:
            return np.clip(np.int64(a) + sign * np.int64(b), INT32_MIN, INT32_MAX)
    else:
        raise PtxError(f".sat is for s32, not {type_}")
    return elementwise(instruction, frame, function, type_, type_, type_)


def product(a: Any, b: Any, part: str, type_: str) -> Any:
    """The low, high or whole double-width product."""
    if part == "lo":
        return a * b
    bits = 8 * SIZES[type_]
    if bits == 64:
        exact = np.asarray(a).astype(object) * np.asarray(b).astype(object)
        return np.asarray(exact >> 64).astype(DTYPES[type_])
    wide = DTYPES[f"{type_[0]}{2 * bits}"]
    exact = np.asarray(a).astype(wide) * np.asarray(b).astype(wide)
    return exact if part == "wide" else (exact >> wide(bits)).astype(DTYPES[type_])


def build_mul(instruction: Instruction, frame: Frame) -> Step:
    """mul and mad, with .lo, .hi and .wide."""
    only(instruction, "lo", "hi", "wide")
    part, type_ = instruction.modifiers[0], instruction.type
    out = f"{type_[0]}{16 * SIZES[type_]}" if part == "wide" else type_
    if part not in ("lo", "hi", "wide"):
        raise PtxError("an integer product needs .lo, .hi or .wide")
    if instruction.stem == "mul":
        return elementwise(
            instruction, frame, lambda a, b: product(a, b, part, type_), out, type_, type_
        )
    return elementwise(
        instruction, frame, lambda a, b, c: product(a, b, part, type_) + c, out, type_, type_, out
    )


def build_div(instruction: Instruction, frame: Frame) -> Step:
    only(instruction)

    def divide(a: Any, b: Any) -> Any:
        if np.any(b == 0):
            raise PtxError("divides by zero")
        rest = np.fmod(a, b)
        return rest if instruction.stem == "rem" else (a - rest) // b

    return elementwise(instruction, frame, divide, *[instruction.type] * 3)


def build_dot(instruction: Instruction, frame: Frame) -> Step:
    """dp4a and dp2a."""
    only(instruction, "lo", "hi")
    a_type, b_type = [m for m in instruction.modifiers if m in ("u32", "s32")]
    pairs = instruction.stem == "dp2a"
    first = 2 if "hi" in instruction.modifiers else 0
    out = "u32" if a_type == b_type == "u32" else "s32"

    def parts(values: Any, type_: str, dtype_size: int) -> Any:
        flat = np.ascontiguousarray(np.atleast_1d(values))
        return (
            flat.view(f"{'i' if type_ == 's32' else 'u'}{dtype_size}")
            .reshape(len(flat), -1)
            .astype(np.int64)
        )

    def dot(a: Any, b: Any, c: Any) -> Any:
        x, y = parts(a, a_type, 2 if pairs else 1), parts(b, b_type, 1)
        if pairs:
            y = y[:, first : first + 2]
        total = (x * y).sum(axis=1) + np.int64(c)
        return (total & 0xFFFF_FFFF).astype(np.uint32).view(DTYPES[out])

    return elementwise(instruction, frame, dot, out, a_type, b_type, out)


BUILDERS: dict[str, Builder] = {
    "add": build_add, "sub": build_add, "mul": build_mul, "mad": build_mul,
    "div": build_div, "rem": build_div, "dp4a": build_dot, "dp2a": build_dot,
    "abs": simple(1, np.abs), "neg": simple(1, np.negative),
    "min": simple(2, np.minimum), "max": simple(2, np.maximum),
}  # fmt: skip
