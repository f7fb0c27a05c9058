"""Instructions that compute each thread's result from its own operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.ptx.errors import PtxError
from tests.support.ptx.frame import Frame, Step, only
from tests.support.ptx.syntax import Instruction

Function = Callable[..., Any]

Builder = Callable[[Instruction, Frame], Step]


def elementwise(
    instruction: Instruction, frame: Frame, function: Function, out: str, *types: str
) -> Step:
    """d = function(a, b, ...): operand i + 1 has types[i]."""
    if len(instruction.operands) != len(types) + 1:
        raise PtxError(f"{instruction.stem} takes {len(types) + 1} operands")
    target = frame.target(instruction.operands[0], out)
    sources = [frame.source(o, t) for o, t in zip(instruction.operands[1:], types, strict=True)]
    match sources:
        case [a]:
            return lambda s: target(s, function(a(s)))
        case [a, b]:
            return lambda s: target(s, function(a(s), b(s)))
        case [a, b, c]:
            return lambda s: target(s, function(a(s), b(s), c(s)))
    return lambda s: target(s, function(*(source(s) for source in sources)))


def simple(n_operands: int, function: Function, *modifiers: str) -> Builder:
    """A builder for an instruction whose operands all have its type."""

    def build(instruction: Instruction, frame: Frame) -> Step:
        only(instruction, *modifiers)
        type_ = instruction.type
        return elementwise(instruction, frame, function, type_, *[type_] * n_operands)

    return build
