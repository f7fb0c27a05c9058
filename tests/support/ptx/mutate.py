"""Small seeded faults in a PTX text, to see whether the tests would notice them."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """A text with one fault."""

    text: str
    line: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.before.strip()} -> {self.after.strip()}"


SWAPS = {
    "add": "sub", "sub": "add", "min": "max", "max": "min", "and": "or", "or": "and",
    "shl": "shr", "shr": "shl", "lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne",
    "ne": "eq", "bfly": "down", "down": "up", "up": "down", "lo": "hi", "hi": "lo",
    "s8": "u8", "u8": "s8", "div": "mul", "xor": "or",
}  # fmt: skip
"""What one part of an opcode becomes."""

_INSTRUCTION = re.compile(r"^(?P<guard>\s*@!?%[\w$]+)?\s*(?P<opcode>[a-z][\w.:]*)\s+[^;]*;")
_NUMBER = re.compile(r"(?<![\w%.])(0[fF][0-9a-fA-F]{8}|0x[0-9a-fA-F]+|\d+)(?![\w.])")
_REGISTER = re.compile(r"%[A-Za-z_][\w$]*(?![\w.]*\.[xyz])")
_DECLARATION = re.compile(r"\.reg\s+\.(\w+)\s+([^;]*);")


def mutations(text: str, seed: int, n: int) -> list[Mutation]:
    """`n` different texts with one fault each, the same for the same seed.

    A fault changes a part of an opcode, a constant by one bit, or a register to another of its
    type; turns a guard around; or deletes an instruction that has an effect on memory. Some do not
    change what a kernel computes, or make it illegal; which ones survive is for the test to judge.

    Raises:
        ValueError: the text has fewer than `n` places to change.
    """
    generator = random.Random(seed)
    lines = text.split("\n")
    candidates = [
        (number, after) for number, line in enumerate(lines) for after in _faults(line, text)
    ]
    if len(candidates) < n:
        raise ValueError(f"the text has {len(candidates)} places to change, not {n}")
    result = []
    for number, after in generator.sample(candidates, n):
        changed = "\n".join([*lines[:number], after, *lines[number + 1 :]])
        result.append(Mutation(changed, number + 1, lines[number], after))
    return result


def _faults(line: str, text: str) -> Iterator[str]:
    match = _INSTRUCTION.match(line)
    if match is None or match["opcode"] in ("ret", "bra.uni", "prefetch"):
        return
    if match["guard"]:
        flip = ("@!", "@") if "@!" in line else ("@", "@!")
        yield line.replace(*flip, 1)
    start, end = match.span("opcode")
    code_end = match.end()
    if match["opcode"].startswith(("st.", "red.", "atom.", "bar.")):
        yield ""
    for part in re.finditer(r"[a-z0-9]+", match["opcode"]):
        after = fault_of(part[0])
        if after != part[0]:
            yield line[: start + part.start()] + after + line[start + part.end() :]
    for number in _NUMBER.finditer(line, end, code_end):
        yield line[: number.start()] + _next_number(number[0]) + line[number.end() :]
    yield from _other_registers(line, end, code_end, text)


def fault_of(part: str) -> str:
    """What a part of an opcode becomes; itself where nothing fits."""
    return SWAPS.get(part, part)


def _next_number(number: str) -> str:
    if number[:2] in ("0f", "0F"):
        return f"0f{int(number[2:], 16) ^ 0x00400000:08X}"
    return str(int(number, 0) ^ 1)


def _other_registers(line: str, start: int, end: int, text: str) -> Iterator[str]:
    """The line with one source register replaced by the next of its declaration."""
    following: dict[str, str] = {}
    for declaration in _DECLARATION.finditer(text):
        names = [name.strip() for name in declaration[2].split(",") if "<" not in name]
        following |= {a: b for a, b in zip(names, names[1:] + names[:1], strict=True) if a != b}
    for i, register in enumerate(_REGISTER.finditer(line, start, end)):
        if i and register[0] in following:
            yield line[: register.start()] + following[register[0]] + line[register.end() :]
