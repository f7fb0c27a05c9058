"""The registers of all threads of a launch, and operands bound to them.

A register is one array with an element a thread. A selection says which threads act: a slice where
they are consecutive, else an array of thread numbers; both index a register.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.ptx.errors import PtxError, UninitialisedRead
from tests.support.ptx.memory import Memory, Shared
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
    Reg,
    Sink,
    Special,
    Vector,
)

Array = NDArray[Any]
Selection = slice | NDArray[np.intp]
Source = Callable[[Selection], Any]
Target = Callable[[Selection, Any], None]
Step = Callable[[Selection], None]

DTYPES: dict[str, Any] = {
    "pred": np.bool_, "b8": np.uint8, "u8": np.uint8, "s8": np.int8,
    "b16": np.uint16, "u16": np.uint16, "s16": np.int16, "f16": np.float16, "bf16": np.uint16,
    "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "f32": np.float32, "f16x2": np.uint32,
    "b64": np.uint64, "u64": np.uint64, "s64": np.int64, "f64": np.float64,
}  # fmt: skip

EVERY = slice(None)
"""The selection of all threads."""


class Register:
    """The value of one register in every thread, and which threads have written it."""

    def __init__(self, name: str, type_: str, n_threads: int) -> None:
        self.name = name
        self.type = type_
        self.bits = np.zeros(n_threads, _bits(type_))
        self.ready = np.zeros(n_threads, bool)
        self.all_ready = False
        self.selection: Selection | None = None
        """The last selection that wrote: reading through the same object needs no look."""

    def written(self, selection: Selection) -> None:
        if selection is EVERY:
            self.all_ready = True
        elif not self.all_ready:
            self.ready[selection] = True
            self.selection = selection

    def require(self, selection: Selection) -> None:
        """Raise unless every selected thread has written the register."""
        if not self.all_ready and self.selection is not selection:
            if not self.ready[selection].all():
                threads = np.arange(len(self.bits))[selection]
                raise UninitialisedRead(
                    f"reads {self.name}, which was never written",
                    threads[~self.ready[selection]],
                )
            self.selection = selection


@dataclass(eq=False)
class Frame:
    """What instructions are bound to: the state of the threads of a launch."""

    body: Body
    n_threads: int
    memory: Memory
    shared: Shared
    params: dict[str, tuple[int, Array]]
    """Each parameter's offset in the parameter block, and its bytes."""
    addresses: dict[tuple[int, str], int]
    """Variables in scope by (scope, name): their addresses."""
    specials: dict[str, Array]
    committed: Array
    """Groups of asynchronous copies that each thread has committed."""
    ticks: int = 0
    """Instructions carried out so far: what the clocks show."""
    copies: list[Any] = field(default_factory=list)
    """Asynchronous copies that have not arrived."""

    def __post_init__(self) -> None:
        self.threads = np.arange(self.n_threads)
        self.registers = {
            name: Register(name, type_, self.n_threads)
            for name, type_ in self.body.registers.items()
        }

    def lanes(self, selection: Selection) -> Array:
        """The selected threads' numbers."""
        return self.threads[selection]

    def source(self, operand: Operand, type_: str, *, loose: bool = False) -> Source:
        """A function from a selection to the operand's values, a scalar where it is constant.

        `loose` lets a register be wider than the type, as ld, st and cvt do.
        """
        match operand:
            case Reg(name):
                return self._register_source(self.registers[name], type_, loose)
            case Not(Reg(name)):
                inner = self._register_source(self.registers[name], "pred", False)
                return lambda selection: ~inner(selection)
            case Special("%clock" | "%clock64" | "%globaltimer"):
                return lambda selection: DTYPES[type_](self.ticks)
            case Special(name):
                values = self.specials.get(name)
                if values is None:
                    raise PtxError(f"the special register {name} is not supported")
                typed = values if loose else values.astype(DTYPES[type_])
                return lambda selection: typed[selection]
            case Int(value) if not is_float(type_):
                constant = np.array(value & _mask(type_), _bits(type_)).view(DTYPES[type_])[()]
            case Float() if is_float(type_) or type_[0] == "b":
                constant = _float_constant(operand, type_)
            case Name():
                constant = np.array(self.address_of(operand), np.uint64).astype(DTYPES[type_])[()]
            case _:
                raise PtxError(f"{operand} cannot be of type {type_}")
        return lambda selection: constant

    def target(self, operand: Operand, type_: str, *, loose: bool = False) -> Target:
        """A procedure that writes values of the type to the operand's register."""
        if isinstance(operand, Sink):
            return lambda selection, values: None
        if not isinstance(operand, Reg):
            raise PtxError(f"{operand} cannot be written")
        register = self.registers[operand.name]
        width, size = register.bits.itemsize, SIZES[type_]
        if not loose or width == size:
            _check_type(register, type_)
            view = register.bits.view(DTYPES[type_])
        elif width > size and not is_float(type_):
            view = register.bits.view(DTYPES[f"{type_[0]}{8 * width}"])
        else:
            raise PtxError(f"{register.name} of type {register.type} cannot hold {type_}")

        def write(selection: Selection, values: Any) -> None:
            view[selection] = values
            register.written(selection)

        return write

    def sources(self, operand: Operand, type_: str, *, loose: bool = False) -> list[Source]:
        """The sources of a vector operand, or of a single one."""
        items = operand.items if isinstance(operand, Vector) else (operand,)
        return [self.source(item, type_, loose=loose) for item in items]

    def targets(self, operand: Operand, type_: str, *, loose: bool = False) -> list[Target]:
        items = operand.items if isinstance(operand, Vector) else (operand,)
        return [self.target(item, type_, loose=loose) for item in items]

    def addresses_of(self, operand: Operand) -> Source:
        """A function from a selection to its threads' byte addresses, u64[n]."""
        if not isinstance(operand, Address):
            raise PtxError(f"{operand} is not an address")
        offset = np.uint64(operand.offset & 0xFFFF_FFFF_FFFF_FFFF)
        if not isinstance(operand.base, Reg):
            base = self.address_of(operand.base) if operand.base else 0
            constant = np.uint64(base) + offset
            return lambda selection: np.full(len(self.threads[selection]), constant)
        register = self.registers[operand.base.name]
        if register.type not in ("u32", "b32", "s32", "u64", "b64", "s64"):
            raise PtxError(f"{register.name} of type {register.type} cannot be an address")
        view = register.bits
        wrap = np.uint64(_mask(register.type))

        def addresses(selection: Selection) -> Any:
            register.require(selection)
            return (view[selection] + offset) & wrap

        return addresses

    def address_of(self, name: Operand) -> int:
        """The address of a variable of the kernel or of its module."""
        if isinstance(name, Name):
            for scope in reversed(name.scopes):
                if (scope, name.name) in self.addresses:
                    return self.addresses[scope, name.name]
            raise PtxError(f"{name.name} is not declared")
        raise PtxError(f"{name} has no address")

    def _register_source(self, register: Register, type_: str, loose: bool) -> Source:
        width, size = register.bits.itemsize, SIZES[type_]
        if loose and width > size:
            view = register.bits.view(DTYPES[type_])[:: width // size]
        else:
            _check_type(register, type_)
            view = register.bits.view(DTYPES[type_])

        def read(selection: Selection) -> Any:
            if not register.all_ready and register.selection is not selection:
                register.require(selection)
            return view[selection]

        return read


def is_float(type_: str) -> bool:
    return type_ in ("f16", "f32", "f64")


def only(instruction: Instruction, *allowed: str) -> None:
    """Raise if the instruction has a modifier that is neither a type nor one of `allowed`."""
    for modifier in instruction.modifiers:
        if modifier not in allowed and modifier not in SIZES:
            raise PtxError(f".{modifier} is not supported on {instruction.stem}")


def _check_type(register: Register, type_: str) -> None:
    if not _fits(register.type, type_):
        raise PtxError(f"{register.name} of type {register.type} is used as {type_}")


@cache
def _fits(declared: str, wanted: str) -> bool:
    """Whether a register declared as one type may be used as the other."""
    alike = SIZES[declared] == SIZES[wanted] and (declared == "pred") == (wanted == "pred")
    floats = is_float(declared), is_float(wanted)
    mixed = floats[0] != floats[1] and "b" not in (declared[0], wanted[0]) and wanted != "f16x2"
    return alike and not mixed


def _bits(type_: str) -> Any:
    return np.bool_ if type_ == "pred" else DTYPES[f"u{8 * SIZES[type_]}"]


def _mask(type_: str) -> int:
    return 1 if type_ == "pred" else (1 << 8 * SIZES[type_]) - 1


def _float_constant(operand: Float, type_: str) -> Any:
    size = SIZES[type_]
    if operand.bits is None:
        if not is_float(type_):
            raise PtxError(f"a decimal number cannot be of type {type_}")
        return DTYPES[type_](operand.value)
    if operand.size != size:
        raise PtxError(f"a {8 * operand.size}-bit literal cannot be of type {type_}")
    return np.array(operand.bits, f"u{size}").view(DTYPES[type_])[()]
