"""Where a launch reads and writes before it waits for its predecessor, and where at all: from its
text and its arguments, without running it.

A forward analysis: of each register the number that is certain, and the parameters whose address
may be in it. Branches that arguments decide are decided, of others both ways are gone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tests.support.ptx.errors import PtxError
from tests.support.ptx.parser import KernelText
from tests.support.ptx.syntax import (
    Address,
    Instruction,
    Int,
    Name,
    Not,
    Operand,
    Pair,
    Reg,
    Vector,
)

N_STATES = 8
"""Kept apart of each label before the wait, so that short loops are counted; behind it one."""

POINTERS = ("u64", "b64")
WRITES = ("st", "atom", "red")
LEAVES = ("ret", "exit", "trap")
WITHOUT_RESULT = ("st", "red", "cp", "bar", "barrier", "griddepcontrol", "fence", "membar")

COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le,
    "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip
RESULTS: dict[str, Callable[[int, int], int]] = {
    "add": operator.add, "sub": operator.sub, "or": operator.or_, "and": operator.and_,
}  # fmt: skip


@dataclass(frozen=True)
class Value:
    """What a register holds.

    known  the number, where it is certain
    bases  parameters whose address it may be made of; `*x` is an address that was read through x
    """

    known: int | None = None
    bases: frozenset[str] = frozenset()

    def __or__(self, other: Value) -> Value:
        known = self.known if self.known == other.known else None
        return Value(known, self.bases | other.bases)


UNKNOWN = Value()
State = dict[str, Value]


@dataclass
class Reach:
    """Names of the parameters through which global memory is reached.

    read, written                whenever
    read_before, written_before  where the predecessor may not have ended yet
    goes_on_before               the successor may start before that has ended
    """

    read: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)
    read_before: set[str] = field(default_factory=set)
    written_before: set[str] = field(default_factory=set)
    goes_on_before: bool = False


def reach_of(kernel: KernelText, arguments: Mapping[str, float]) -> Reach:
    """Of a launch with these arguments; of addresses it only matters whether they are 0.

    Raises:
        PtxError: an address that comes from no parameter.
    """
    found, in_shared = Reach(), frozenset[str]()
    while True:
        walk = _Walk(kernel, arguments, in_shared, found)
        walk.run()
        if walk.in_shared == in_shared:
            if walk.lost:
                raise PtxError(f"{walk.lost} is at no parameter's address")
            return found
        in_shared = walk.in_shared


class _Walk:
    """in_shared  addresses that may lie in shared memory, at first those of the walk before
    lost       an instruction with an address from nowhere
    """

    def __init__(
        self,
        kernel: KernelText,
        arguments: Mapping[str, float],
        in_shared: frozenset[str],
        found: Reach,
    ) -> None:
        self._body, self._arguments, self._found = kernel.body, arguments, found
        self._types = {param.name: param.type for param in kernel.entry.params}
        self._labels = set(kernel.body.labels.values())
        self._seen: dict[tuple[int, bool], list[State]] = {}
        self._todo: list[tuple[int, bool, State]] = [(0, False, {})]
        self.in_shared, self.lost = in_shared, ""

    def run(self) -> None:
        while self._todo:
            self._follow(*self._todo.pop())

    def _enter(self, index: int, waited: bool, state: State) -> None:
        """Go on at a label, unless all that can be there was there before."""
        seen = self._seen.setdefault((index, waited), [])
        if any(_joined(old, state) == old for old in seen):
            return
        if len(seen) < (1 if waited else N_STATES):
            seen.append(dict(state))
        else:
            seen[-1] = _joined(seen[-1], state)
        self._todo.append((index, waited, dict(seen[-1])))

    def _follow(self, index: int, waited: bool, state: State) -> None:
        """From here to the next label; changes the state."""
        first = index
        while index < len(self._body.instructions):
            if index in self._labels and index != first:
                self._enter(index, waited, state)
                return
            instruction = self._body.instructions[index]
            index += 1
            certain = _truth(instruction.predicate, state)
            if certain is False:
                continue
            if instruction.stem == "bra":
                self._enter(self._target(instruction), waited, state)
            if instruction.stem in ("bra", *LEAVES):
                if certain:
                    return
                continue
            self._note(instruction, state, waited)
            waited = waited or instruction.opcode == "griddepcontrol.wait"
            self._change(instruction, state, maybe=certain is None)

    def _target(self, instruction: Instruction) -> int:
        (name,) = instruction.operands
        assert isinstance(name, Name)
        labels, scopes = self._body.labels, reversed(name.scopes)
        return next(labels[scope, name.name] for scope in scopes if (scope, name.name) in labels)

    def _note(self, instruction: Instruction, state: State, waited: bool) -> None:
        """What the instruction reaches in memory."""
        stem, modifiers, found = instruction.stem, instruction.modifiers, self._found
        if instruction.opcode == "griddepcontrol.launch_dependents":
            found.goes_on_before |= not waited
        places = [operand for operand in instruction.operands if isinstance(operand, Address)]
        if not places or stem not in ("ld", "ldu", "cp", *WRITES) or "param" in modifiers:
            return
        if stem != "cp" and "shared" in modifiers:
            if stem == "st":
                self.in_shared |= _bases(instruction.operands[1:], state)
            return
        bases = _value(places[-1].base, state).bases
        if not bases:
            self.lost = f"{instruction.place}: `{instruction.code}`"
        if stem == "cp":
            self.in_shared |= _beyond(bases)
        if stem != "st":
            found.read |= bases
            found.read_before |= frozenset() if waited else bases
        if stem in WRITES:
            found.written |= bases
            found.written_before |= frozenset() if waited else bases

    def _change(self, instruction: Instruction, state: State, *, maybe: bool) -> None:
        if instruction.stem in WITHOUT_RESULT or not instruction.operands:
            return
        value = self._result(instruction, state)
        for name in _registers(instruction.operands[0]):
            state[name] = value | state[name] if maybe and name in state else value

    def _result(self, instruction: Instruction, state: State) -> Value:
        stem, (_, *operands) = instruction.stem, instruction.operands
        if stem in ("ld", "ldu", "atom"):
            return self._loaded(instruction, state)
        values = [_value(operand, state) for operand in operands]
        known = [value.known for value in values]
        if stem == "setp":
            if operands[0] == operands[1]:
                known[:2] = 0, 0
            return Value(_compared(instruction.modifiers, known))
        if stem == "mov":
            return values[0]
        if stem == "selp" and known[2] is not None:
            return values[0] if known[2] else values[1]
        number = None
        if stem in RESULTS and known[0] is not None and known[1] is not None:
            number = RESULTS[stem](known[0], known[1])
        return Value(number, _bases(operands, state))

    def _loaded(self, instruction: Instruction, state: State) -> Value:
        place = instruction.operands[1]
        assert isinstance(place, Address)
        if "param" in instruction.modifiers:
            assert isinstance(place.base, Name)
            name = place.base.name
            type_ = self._types[name]
            known = int(self._arguments[name]) if type_[0] in "us" else None
            return Value(known, frozenset({name} if type_ in POINTERS else ()))
        if instruction.type not in POINTERS:
            return UNKNOWN
        if "shared" in instruction.modifiers:
            return Value(None, self.in_shared)
        return Value(None, _beyond(_value(place.base, state).bases))


def _beyond(bases: frozenset[str]) -> frozenset[str]:
    """Of addresses that are read through these; what is read through them in turn is no other."""
    return frozenset(base if base[0] == "*" else f"*{base}" for base in bases)


def _bases(operands: tuple[Operand, ...] | list[Operand], state: State) -> frozenset[str]:
    return frozenset[str]().union(*(_value(operand, state).bases for operand in operands))


def _value(operand: Operand | None, state: State) -> Value:
    match operand:
        case Int(number):
            return Value(number)
        case Reg(name):
            return state.get(name, UNKNOWN)
        case Not(register):
            known = _value(register, state).known
            return Value(None if known is None else int(not known))
        case Vector(items):
            return Value(None, _bases(items, state))
    return UNKNOWN


def _truth(predicate: Reg | Not | None, state: State) -> bool | None:
    known = 1 if predicate is None else _value(predicate, state).known
    return None if known is None else bool(known)


def _compared(modifiers: list[str], known: list[int | None]) -> int | None:
    """The result of a setp of these operands, where it is certain."""
    compare, a, b = COMPARISONS.get(modifiers[0]), known[0], known[1]
    result: int | None = None
    if compare and a is not None and b is not None:
        result = int(compare(a, b))
    elif b == 0 and modifiers[-1][0] == "u" and modifiers[0] in ("lt", "ge"):
        result = int(modifiers[0] == "ge")
    if len(known) == 2:
        return result
    decides = {"and": 0, "or": 1}.get(modifiers[1])
    if decides is not None and decides in (result, known[2]):
        return decides
    return None if decides is None or None in (result, known[2]) else 1 - decides


def _joined(old: State, new: State) -> State:
    return old | {name: value | old.get(name, value) for name, value in new.items()}


def _registers(target: Operand) -> list[str]:
    match target:
        case Reg(name):
            return [name]
        case Vector(items):
            return [name for item in items for name in _registers(item)]
        case Pair(first, second):
            return [*_registers(first), *_registers(second)]
    return []
