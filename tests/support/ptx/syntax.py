"""The parts of a PTX text as data, and the tokens they are read from."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from tests.support.ptx.errors import PtxError

SIZES = {"b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2, "f16x2": 4}
SIZES |= {"b32": 4, "u32": 4, "s32": 4, "f32": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8}
SIZES |= {"pred": 1}


@dataclass(frozen=True)
class Token:
    kind: str
    text: str
    place: str


@dataclass(frozen=True)
class Reg:
    """A register of the kernel, its name unique over scopes."""

    name: str


@dataclass(frozen=True)
class Special:
    """%tid.x and its like."""

    name: str


@dataclass(frozen=True)
class Int:
    value: int


@dataclass(frozen=True)
class Float:
    """A literal: `bits` of an exact 0f or 0d form, `value` of a decimal one."""

    value: float
    bits: int | None = None
    size: int = 8


@dataclass(frozen=True)
class Name:
    """A variable, a parameter or a label; `scopes` are the scopes it is looked up in."""

    name: str
    scopes: tuple[int, ...]


@dataclass(frozen=True)
class Sink:
    """The operand `_`."""


@dataclass(frozen=True)
class Not:
    register: Reg


@dataclass(frozen=True)
class Pair:
    """`%p|%q`."""

    first: Reg
    second: Reg | Sink


@dataclass(frozen=True)
class Vector:
    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Address:
    base: Reg | Name | None
    offset: int


Operand = Reg | Special | Int | Float | Name | Sink | Not | Pair | Vector | Address


@dataclass(frozen=True)
class Instruction:
    index: int
    opcode: str
    operands: tuple[Operand, ...]
    predicate: Reg | Not | None
    place: str
    code: str

    @cached_property
    def stem(self) -> str:
        return self.opcode.split(".")[0]

    @cached_property
    def modifiers(self) -> list[str]:
        return self.opcode.split(".")[1:]

    @cached_property
    def type(self) -> str:
        """The last type of the opcode."""
        return self.opcode.rsplit(".", 1)[-1]


@dataclass(frozen=True)
class Variable:
    """A variable in shared, constant or global memory; no initial values means undefined ones."""

    name: str
    space: str
    type: str
    count: int
    align: int
    values: tuple[Int | Float, ...] | None = None

    @property
    def n_bytes(self) -> int:
        return SIZES[self.type] * self.count


@dataclass
class Body:
    """What the braces of a kernel hold.

    kinds, targets  of each instruction, once a launch has found all of them sound; see `Machine`
    """

    registers: dict[str, str] = field(default_factory=dict)
    labels: dict[tuple[int, str], int] = field(default_factory=dict)
    variables: dict[tuple[int, str], Variable] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)


_LEXER = re.compile(
    r"""(?P<skip>[ \t\r]+|//[^\n]*)
  | (?P<newline>\n)
  | (?P<string>"[^"]*")
  | (?P<register>%[\w$]+(?:\.[xyzw])?)
  | (?P<float>0[fF][0-9a-fA-F]{8}\b|0[dD][0-9a-fA-F]{16}\b|\d+\.\d*(?:[eE][+-]?\d+)?)
  | (?P<int>0[xX][0-9a-fA-F]+U?|0[bB][01]+U?|\d+U?)
  | (?P<directive>\.[a-z]\w*)
  | (?P<word>[A-Za-z_$](?:[\w$.]|::)*)
  | (?P<mark><<|>>|[{}()\[\],;:@!|+\-*/%~&^=<>])
""",
    re.VERBOSE,
)
_MARKER = re.compile(r'#\s*(?:line\s+)?(\d+)\s+"([^"]*)"')


def tokenize(text: str, name: str) -> list[Token]:
    """Tokens with the place they come from, which line markers in the text may set.

    Raises:
        PtxError: a character that starts no token.
    """
    tokens: list[Token] = []
    file, number = name, 0
    for line in text.splitlines():
        number += 1
        if marker := _MARKER.match(line):
            file, number = marker[2], int(marker[1]) - 1
            continue
        position = 0
        while position < len(line):
            match = _LEXER.match(line, position)
            if match is None:
                raise PtxError(f"{file}:{number}: cannot read {line[position:].strip()!r}")
            position = match.end()
            if match.lastgroup not in ("skip", "newline"):
                tokens.append(Token(str(match.lastgroup), match[0], f"{file}:{number}"))
    return tokens


_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: int(a / b),
    ast.Mod: lambda a, b: a - b * int(a / b),
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}
_UNARY: dict[type[ast.unaryop], Callable[[int], int]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: operator.invert,
}


def constant(tokens: list[Token]) -> int:
    """The value of an integer constant expression."""
    source = " ".join(t.text.rstrip("U") if t.kind == "int" else t.text for t in tokens)

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int() as number):
                return number
            case ast.BinOp(left, op, right) if type(op) in _BINARY:
                return int(_BINARY[type(op)](value(left), value(right)))
            case ast.UnaryOp(op, operand) if type(op) in _UNARY:
                return int(_UNARY[type(op)](value(operand)))
        raise PtxError(f"{tokens[0].place}: cannot read the constant {source!r}")

    try:
        return value(ast.parse(source, mode="eval").body)
    except SyntaxError:
        place = tokens[0].place if tokens else "?"
        raise PtxError(f"{place}: cannot read the operand {source!r}") from None


def literal(token: Token, negative: bool = False) -> Float:
    """A floating-point literal."""
    sign = -1 if negative else 1
    text = token.text.lower()
    if text[:2] == "0f":
        return Float(0.0, int(text[2:], 16) ^ (0x80000000 if negative else 0), 4)
    if text[:2] == "0d":
        return Float(0.0, int(text[2:], 16) ^ ((1 << 63) if negative else 0), 8)
    return Float(sign * float(text))
