"""Shifts, logic, bit fields, byte permutation and bit counts."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.ptx.elementwise import Builder, Function, elementwise, simple
from tests.support.ptx.errors import PtxError
from tests.support.ptx.frame import DTYPES, Frame, Step, only
from tests.support.ptx.syntax import SIZES, Instruction, Int


def shift_left(a: Any, n: Any) -> Any:
    """a << n of an unsigned type; 0 where n is the width or more."""
    width = 8 * a.dtype.itemsize
    n = np.asarray(n, a.dtype)
    return np.where(n < width, a << np.minimum(n, width - 1), a.dtype.type(0))


def shift_right(a: Any, n: Any) -> Any:
    """a >> n; 0, or the sign of a signed type, where n is the width or more."""
    width = 8 * a.dtype.itemsize
    clamped = np.minimum(n, width - 1).astype(a.dtype)
    if a.dtype.kind == "i":
        return a >> clamped
    return np.where(np.asarray(n) < width, a >> clamped, a.dtype.type(0))


def build_shift(instruction: Instruction, frame: Frame) -> Step:
    only(instruction)
    function = shift_left if instruction.stem == "shl" else shift_right
    return elementwise(instruction, frame, function, instruction.type, instruction.type, "u32")


def build_shf(instruction: Instruction, frame: Frame) -> Step:
    """The funnel shift: a is the low word, b the high one."""
    only(instruction, "l", "r", "wrap", "clamp")
    left, wrap = "l" in instruction.modifiers, "wrap" in instruction.modifiers

    def funnel(a: Any, b: Any, c: Any) -> Any:
        n = (c & np.uint32(31)) if wrap else np.minimum(c, np.uint32(32))
        both = (np.uint64(b) << np.uint64(32)) | np.uint64(a)
        shifted = (both << np.uint64(n)) >> np.uint64(32) if left else both >> np.uint64(n)
        return (shifted & np.uint64(0xFFFF_FFFF)).astype(np.uint32)

    return elementwise(instruction, frame, funnel, *["b32"] * 4)


def low_mask(n: Any, dtype: Any) -> Any:
    """n low bits set."""
    return shift_left(np.ones_like(n, dtype), n) - dtype(1)


def field_bounds(values: Any, width: int) -> Any:
    """The low 8 bits of a position or length.

    The ISA says so of 64-bit fields too; an H200 looks at all bits there, so more is refused.
    """
    if width == 64 and np.any(np.asarray(values) > 255):
        raise PtxError("a position or length beyond 255 means nothing in 64 bits")
    return np.asarray(values & np.uint32(255))


def build_bfe(instruction: Instruction, frame: Frame) -> Step:
    only(instruction)
    type_ = instruction.type
    width, unsigned = 8 * SIZES[type_], DTYPES[f"u{8 * SIZES[type_]}"]

    def extract(a: Any, position: Any, length: Any) -> Any:
        start, length = field_bounds(position, width), field_bounds(length, width)
        field = shift_right(a, start) & low_mask(length, unsigned)
        if type_[0] == "u":
            return field
        top = np.minimum(np.maximum(start + length, 1) - 1, width - 1)
        negative = (length > 0) & (shift_right(a, top) & unsigned(1) == 1)
        kept = np.minimum(length, width - np.minimum(start, width))
        filled = np.where(negative, field | ~low_mask(kept, unsigned), field)
        return filled.view(DTYPES[type_])

    operands = (f"b{width}", "u32", "u32")
    return elementwise(instruction, frame, extract, type_, *operands)


def build_bfi(instruction: Instruction, frame: Frame) -> Step:
    only(instruction)
    dtype = DTYPES[instruction.type]

    def insert(a: Any, b: Any, position: Any, length: Any) -> Any:
        width = 8 * np.dtype(dtype).itemsize
        start, length = field_bounds(position, width), field_bounds(length, width)
        field = shift_left(low_mask(length, dtype), start)
        return (b & ~field) | (shift_left(np.asarray(a), start) & field)

    type_ = instruction.type
    return elementwise(instruction, frame, insert, type_, type_, type_, "u32", "u32")


_PRMT_MODES: dict[str, list[list[int]]] = {
    "f4e": [[0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6]],
    "b4e": [[0, 7, 6, 5], [1, 0, 7, 6], [2, 1, 0, 7], [3, 2, 1, 0]],
    "rc8": [[0] * 4, [1] * 4, [2] * 4, [3] * 4],
    "ecl": [[0, 1, 2, 3], [1, 1, 2, 3], [2, 2, 2, 3], [3, 3, 3, 3]],
    "ecr": [[0, 0, 0, 0], [0, 1, 1, 1], [0, 1, 2, 2], [0, 1, 2, 3]],
    "rc16": [[0, 1, 0, 1], [2, 3, 2, 3], [0, 1, 0, 1], [2, 3, 2, 3]],
}


def build_prmt(instruction: Instruction, frame: Frame) -> Step:
    """Four bytes chosen from the eight of {b, a}."""
    only(instruction, *_PRMT_MODES)
    mode = next((m for m in instruction.modifiers if m in _PRMT_MODES), None)

    def permute(a: Any, b: Any, c: Any) -> Any:
        both = np.asarray(np.uint64(b) << np.uint64(32) | np.uint64(a))
        result: Any = np.uint32(0)
        for i in range(4):
            if mode:
                choice = np.asarray(_PRMT_MODES[mode])[c & np.uint32(3), i].astype(np.uint64)
                sign = np.bool_(False)
            else:
                nibble = np.uint32(c) >> np.uint32(4 * i)
                choice, sign = np.uint64(nibble & np.uint32(7)), (nibble & np.uint32(8)) != 0
            byte = (both >> (choice * np.uint64(8))) & np.uint64(0xFF)
            byte = np.where(sign, np.where(byte >= 128, 0xFF, 0), byte).astype(np.uint32)
            result = result | (byte << np.uint32(8 * i))
        return result

    return elementwise(instruction, frame, permute, *["b32"] * 4)


def build_lop3(instruction: Instruction, frame: Frame) -> Step:
    only(instruction)
    table = instruction.operands[4]
    if not isinstance(table, Int):
        raise PtxError("lop3 takes a constant table")

    def logic(a: Any, b: Any, c: Any, _: Any) -> Any:
        result = np.uint32(0)
        for i in range(8):
            if table.value >> i & 1:
                term = a if i & 4 else ~a
                term = term & (b if i & 2 else ~b)
                result = result | (term & (c if i & 1 else ~c))
        return result

    return elementwise(instruction, frame, logic, *["b32"] * 4, "u32")


def leading_zeros(a: Any) -> Any:
    width = 8 * a.dtype.itemsize
    high = (a >> a.dtype.type(width // 2)).astype(np.float64)
    low = (a & a.dtype.type((1 << width // 2) - 1)).astype(np.float64)
    length = np.where(high > 0, np.frexp(high)[1] + width // 2, np.frexp(low)[1])
    return (width - length).astype(np.uint32)


def reverse_bits(a: Any) -> Any:
    dtype = a.dtype.type
    result = dtype(0)
    for i in range(8 * a.dtype.itemsize):
        result = (result << dtype(1)) | ((a >> dtype(i)) & dtype(1))
    return result


def build_count(instruction: Instruction, frame: Frame) -> Step:
    """popc, clz and bfind: a u32 of a b32 or b64."""
    only(instruction)
    stem, type_ = instruction.stem, instruction.type
    functions: dict[str, Function] = {
        "popc": lambda a: np.bitwise_count(a).astype(np.uint32),
        "clz": leading_zeros,
        "bfind": lambda a: np.uint32(8 * a.dtype.itemsize - 1) - leading_zeros(a),
    }
    if stem == "bfind" and type_[0] != "u":
        raise PtxError("bfind is supported for unsigned types")
    return elementwise(instruction, frame, functions[stem], "u32", type_)


BUILDERS: dict[str, Builder] = {
    "and": simple(2, np.bitwise_and), "or": simple(2, np.bitwise_or),
    "xor": simple(2, np.bitwise_xor), "not": simple(1, np.invert),
    "shl": build_shift, "shr": build_shift, "shf": build_shf,
    "bfe": build_bfe, "bfi": build_bfi, "prmt": build_prmt, "lop3": build_lop3,
    "popc": build_count, "clz": build_count, "bfind": build_count,
    "brev": simple(1, reverse_bits),
}  # fmt: skip
