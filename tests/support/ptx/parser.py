"""From PTX text to kernels: declarations, scopes, labels and instructions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ptx import Entry, entries
from tests.support.ptx.errors import PtxError
from tests.support.ptx.syntax import (
    SIZES,
    Address,
    Body,
    Float,
    Instruction,
    Int,
    Name,
    Not,
    Operand,
    Pair,
    Reg,
    Sink,
    Special,
    Token,
    Variable,
    Vector,
    constant,
    literal,
    tokenize,
)

_LIMITS = ("maxntid", "reqntid", "minnctapersm", "maxnreg")
_IGNORED = (".pragma", ".loc", ".file")


@dataclass(eq=False)
class KernelText:
    """A parsed kernel."""

    entry: Entry
    body: Body
    limits: dict[str, tuple[int, ...]]


@dataclass(eq=False)
class ModuleText:
    """A parsed PTX module."""

    kernels: dict[str, KernelText] = field(default_factory=dict)
    variables: dict[tuple[int, str], Variable] = field(default_factory=dict)


def parse(text: str, name: str) -> ModuleText:
    """Read an expanded PTX text.

    Raises:
        PtxError: something is not understood or not declared; the message says where.
    """
    try:
        parser = _Parser(tokenize(text, name), {e.name: e for e in entries(text)})
    except ValueError as error:
        raise PtxError(f"{name}: {error}") from error
    try:
        parser.module()
    except (ValueError, IndexError, KeyError) as error:
        place = parser.tokens[min(parser.position, len(parser.tokens)) - 1].place
        raise PtxError(f"{place}: cannot be read ({error!r})") from error
    return parser.result


class _Parser:
    def __init__(self, tokens: list[Token], kernels: dict[str, Entry]) -> None:
        self.tokens = tokens
        self.position = 0
        self.entries = kernels
        self.result = ModuleText()
        self.body = Body()
        self.scopes: tuple[int, ...] = (0,)
        self.registers: dict[tuple[int, str], str] = {}
        self.n_scopes = 0

    def peek(self) -> Token:
        if self.position >= len(self.tokens):
            last = self.tokens[-1].place if self.tokens else "?"
            raise PtxError(f"{last}: the text ends too early")
        return self.tokens[self.position]

    def next(self, expected: str | None = None) -> Token:
        token = self.peek()
        if expected is not None and token.text != expected:
            raise PtxError(f"{token.place}: expected {expected!r}, found {token.text!r}")
        self.position += 1
        return token

    def until(self, end: str) -> list[Token]:
        """The tokens before the next `end`, which is taken too."""
        tokens = []
        while self.peek().text != end:
            tokens.append(self.next())
        self.next(end)
        return tokens

    def module(self) -> None:
        while self.position < len(self.tokens):
            token = self.next()
            match token.text:
                case ".version" | ".address_size" | ".target":
                    self.next()
                    while self.position < len(self.tokens) and self.peek().text == ",":
                        self.position += 2
                case ".visible" | ".weak" | ".extern":
                    pass
                case ".entry":
                    self.kernel()
                case ".shared" | ".const" | ".global":
                    variable = self.variable(token.text[1:], self.until(";"))
                    self.result.variables[0, variable.name] = variable
                case text if text in _IGNORED:
                    self.until(";")
                case _:
                    raise PtxError(f"{token.place}: {token.text!r} is not supported here")

    def kernel(self) -> None:
        name = self.next()
        if self.peek().text == "(":
            self.until(")")
        limits: dict[str, tuple[int, ...]] = {}
        for declaration in _split(self.until("{"), _LIMITS):
            numbers = [t for t in declaration[1:] if t.text != ","]
            limits[declaration[0].text[1:]] = tuple(constant([t]) for t in numbers)
        self.body, self.scopes, self.registers, self.n_scopes = Body(), (0, 1), {}, 1
        while len(self.scopes) > 1:
            self.statement()
        kernel = KernelText(self.entries[name.text], self.body, limits)
        self.result.kernels[name.text] = kernel

    def statement(self) -> None:
        token = self.next()
        match token.kind, token.text:
            case _, "{":
                self.n_scopes += 1
                self.scopes = (*self.scopes, self.n_scopes)
            case _, "}":
                self.scopes = self.scopes[:-1]
            case _, ";":
                pass
            case _, ".reg":
                self.declare(self.until(";"))
            case _, ".shared":
                variable = self.variable("shared", self.until(";"))
                self.body.variables[self.scopes[-1], variable.name] = variable
            case _, text if text in _IGNORED:
                self.until(";")
            case "word", text if self.peek().text == ":":
                self.next(":")
                if (self.scopes[-1], text) in self.body.labels:
                    raise PtxError(f"{token.place}: the label {text} is there already")
                self.body.labels[self.scopes[-1], text] = len(self.body.instructions)
            case "word" | "mark", _ if token.kind == "word" or token.text == "@":
                self.position -= 1
                self.instruction()
            case _:
                raise PtxError(f"{token.place}: {token.text!r} is not supported here")

    def declare(self, tokens: list[Token]) -> None:
        type_ = tokens[0].text[1:]
        if type_ not in SIZES:
            raise PtxError(f"{tokens[0].place}: registers of type {type_} are not supported")
        for name, *count in _commas(tokens[1:]):
            names = [name.text]
            if count:
                names = [f"{name.text}{i}" for i in range(constant(count[1:-1]))]
            for register in names:
                key = (self.scopes[-1], register)
                if key in self.registers:
                    raise PtxError(f"{name.place}: {register} is declared already")
                unique = register if key[0] == 1 else f"{register}#{key[0]}"
                self.registers[key] = unique
                self.body.registers[unique] = type_

    def variable(self, space: str, tokens: list[Token]) -> Variable:
        """`.align 16 .b8 name[4] = {...}`."""
        align, values = None, None
        if tokens[0].text == ".align":
            align, tokens = constant(tokens[1:2]), tokens[2:]
        type_, name = tokens[0].text[1:], tokens[1]
        if type_ not in SIZES:
            raise PtxError(f"{name.place}: variables of type {type_} are not supported")
        texts = [t.text for t in tokens]
        if "=" in texts:
            start = texts.index("=")
            items = [t for t in tokens[start + 1 :] if t.text not in "{}"]
            values = tuple(_number(item) for item in _commas(items))
            tokens = tokens[:start]
        count = 1
        if len(tokens) > 2:
            size = tokens[3:-1]
            count = constant(size) if size else len(values) if values else 0
        return Variable(name.text, space, type_, count, align or SIZES[type_], values)

    def instruction(self) -> None:
        predicate: Reg | Not | None = None
        if self.peek().text == "@":
            self.next()
            negated = self.peek().text == "!"
            if negated:
                self.next()
            register = self.register(self.next())
            predicate = Not(register) if negated else register
        opcode = self.next()
        tokens = self.until(";")
        operands = tuple(self.operand(part) for part in _commas(tokens))
        code = " ".join([opcode.text, " ".join(t.text for t in tokens)]).strip()
        self.body.instructions.append(
            Instruction(
                len(self.body.instructions), opcode.text, operands, predicate, opcode.place, code
            )
        )

    def register(self, token: Token) -> Reg:
        for scope in reversed(self.scopes):
            if name := self.registers.get((scope, token.text)):
                return Reg(name)
        raise PtxError(f"{token.place}: {token.text} is not declared")

    def operand(self, tokens: list[Token]) -> Operand:
        first, *rest = tokens
        match first.kind, first.text, [t.text for t in rest]:
            case _, "{", [*_, "}"]:
                return Vector(tuple(self.operand(part) for part in _commas(rest[:-1])))
            case _, "[", [*_, "]"]:
                return self.address(rest[:-1])
            case _, "!", [_]:
                return Not(self.register(rest[0]))
            case "register", _, ["|", other]:
                second = Sink() if other == "_" else self.register(rest[1])
                return Pair(self.register(first), second)
            case "register", name, []:
                known = any((scope, name) in self.registers for scope in self.scopes)
                if not known and (name.startswith(SPECIAL_PREFIXES)):
                    return Special(name)
                return self.register(first)
            case _, "_", []:
                return Sink()
            case "word", name, []:
                return Name(name, self.scopes)
        return _number(tokens)

    def address(self, tokens: list[Token]) -> Address:
        first = tokens[0]
        if first.kind == "register":
            base: Reg | Name | None = self.register(first)
        elif first.kind == "word":
            base = Name(first.text, self.scopes)
        else:
            return Address(None, constant(tokens))
        return Address(base, constant(tokens[1:]) if tokens[1:] else 0)


SPECIAL_PREFIXES = (
    *("%tid", "%ntid", "%ctaid", "%nctaid", "%laneid", "%warpid", "%nwarpid", "%lanemask_"),
    *("%clock", "%globaltimer", "%smid", "%nsmid", "%gridid"),
    *("%total_smem_size", "%dynamic_smem_size"),
)


def _number(tokens: list[Token]) -> Int | Float:
    match [t.kind for t in tokens], [t.text for t in tokens]:
        case ["float"], _:
            return literal(tokens[0])
        case ["mark", "float"], ["-", _]:
            return literal(tokens[1], negative=True)
    return Int(constant(tokens))


def _commas(tokens: list[Token]) -> Iterator[list[Token]]:
    """The parts between commas outside every bracket."""
    part: list[Token] = []
    depth = 0
    for token in tokens:
        depth += (token.text in "{[(") - (token.text in "}])")
        if token.text == "," and depth == 0:
            yield part
            part = []
        else:
            part.append(token)
    if part:
        yield part


def _split(tokens: list[Token], directives: tuple[str, ...]) -> Iterator[list[Token]]:
    """The launch limits between a parameter list and the body, one directive each."""
    part: list[Token] = []
    for token in tokens:
        if token.kind == "directive":
            if token.text[1:] not in directives:
                raise PtxError(f"{token.place}: {token.text} is not supported here")
            if part:
                yield part
            part = []
        part.append(token)
    if part:
        yield part
