"""Comparisons, choices and moves."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.ptx.elementwise import Builder, Function, elementwise
from tests.support.ptx.errors import PtxError
from tests.support.ptx.frame import DTYPES, Frame, Step, is_float, only
from tests.support.ptx.syntax import SIZES, Instruction, Pair, Sink, Vector

_ORDERED: dict[str, Function] = {
    "eq": np.equal, "ne": lambda a, b: (a < b) | (a > b), "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip

_INTEGER = _ORDERED | {"ne": np.not_equal}

_UNSIGNED_NAMES = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}

_UNORDERED_NAMES = {f"{name}u": name for name in _ORDERED}

_JOINS: dict[str, Function] = {
    "and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor,
}  # fmt: skip


def comparison(name: str, type_: str) -> Function:
    """The function of a setp's comparison."""
    if not is_float(type_):
        name = _UNSIGNED_NAMES.get(name, name)
        if name in _INTEGER:
            return _INTEGER[name]
    elif name in _ORDERED:
        return _ORDERED[name]
    elif name in _UNORDERED_NAMES:
        function = _ORDERED[_UNORDERED_NAMES[name]]
        return lambda a, b: function(a, b) | np.isnan(a) | np.isnan(b)
    elif name in ("num", "nan"):
        return lambda a, b: (np.isnan(a) | np.isnan(b)) == (name == "nan")
    raise PtxError(f"there is no comparison .{name} of {type_}")


def build_setp(instruction: Instruction, frame: Frame) -> Step:
    name, *rest = [m for m in instruction.modifiers if m != "ftz"]
    type_ = instruction.type
    compare = comparison(name, type_)
    join = _JOINS.get(rest[0]) if len(rest) > 1 else None
    if len(rest) > 1 and join is None:
        raise PtxError(f".{rest[0]} is not supported on setp")
    first, *operands = instruction.operands
    targets = (first.first, first.second) if isinstance(first, Pair) else (first, Sink())
    p, q = (frame.target(target, "pred") for target in targets)
    a, b = frame.source(operands[0], type_), frame.source(operands[1], type_)
    if join is None:

        def step(s: Any) -> None:
            result = compare(a(s), b(s))
            p(s, result)
            q(s, ~result)

        return step
    c = frame.source(operands[2], "pred")

    def joined(s: Any) -> None:
        result, other = compare(a(s), b(s)), c(s)
        both = join(result, other), join(~result, other)  # c may be p itself
        p(s, both[0])
        q(s, both[1])

    return joined


def build_selp(instruction: Instruction, frame: Frame) -> Step:
    only(instruction)
    type_ = instruction.type
    return elementwise(
        instruction, frame, lambda a, b, p: np.where(p, a, b), type_, type_, type_, "pred"
    )


def build_slct(instruction: Instruction, frame: Frame) -> Step:
    only(instruction)
    type_, choice = instruction.modifiers[-2:]
    return elementwise(
        instruction, frame, lambda a, b, c: np.where(c >= 0, a, b), type_, type_, type_, choice
    )


def build_mov(instruction: Instruction, frame: Frame) -> Step:
    """mov, and its packing and unpacking of vectors."""
    only(instruction)
    target, source = instruction.operands
    type_ = instruction.type
    if isinstance(source, Vector):
        size = SIZES[type_] // len(source.items)
        parts = frame.sources(source, f"b{8 * size}")
        write = frame.target(target, type_)

        def pack(s: Any) -> None:
            columns = np.broadcast_arrays(*(part(s) for part in parts))
            packed = np.stack([np.atleast_1d(c) for c in columns], axis=1)
            write(s, packed.view(DTYPES[type_])[:, 0])

        return pack
    if isinstance(target, Vector):
        size = SIZES[type_] // len(target.items)
        writes = frame.targets(target, f"b{8 * size}")
        read = frame.source(source, type_)

        def unpack(s: Any) -> None:
            whole = np.ascontiguousarray(np.atleast_1d(read(s)))
            parts = whole.view(DTYPES[f"b{8 * size}"]).reshape(len(whole), -1)
            for i, write_part in enumerate(writes):
                write_part(s, parts[:, i])

        return unpack
    return elementwise(instruction, frame, lambda a: a, type_, type_)


def build_cvta(instruction: Instruction, frame: Frame) -> Step:
    """Generic addresses are those of global memory."""
    only(instruction, "to", "global", "const")
    return elementwise(instruction, frame, lambda a: a, instruction.type, instruction.type)


BUILDERS: dict[str, Builder] = {
    "setp": build_setp, "selp": build_selp, "slct": build_slct,
    "mov": build_mov, "cvta": build_cvta,
}  # fmt: skip
