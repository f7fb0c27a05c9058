"""Loads, stores, atomics and asynchronous copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.support.ptx.elementwise import Builder
from tests.support.ptx.errors import PtxError
from tests.support.ptx.frame import DTYPES, Array, Frame, Step
from tests.support.ptx.memory import Memory, Shared
from tests.support.ptx.syntax import SIZES, Address, Instruction, Int, Name

SPACES = {"global", "shared", "const", "param"}
HINTS = {"ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "weak", "volatile"}
ORDERS = {"relaxed", "acquire", "release", "acq_rel", "sc", "cta", "cluster", "gpu", "sys"}
VECTORS = {"v2": 2, "v4": 4}


@dataclass
class Copy:
    """An asynchronous copy under way: each thread's group, destination and bytes."""

    threads: Array
    groups: Array
    addresses: Array
    values: Array


def _space(instruction: Instruction, frame: Frame) -> Memory | Shared:
    """Where the instruction goes; a generic address is one of global memory."""
    for modifier in instruction.modifiers:
        known = modifier in SPACES | HINTS | ORDERS or modifier in SIZES or modifier in VECTORS
        if not known and not modifier.startswith(("L1::", "L2::")):
            raise PtxError(f".{modifier} is not supported on {instruction.stem}")
    return frame.shared if "shared" in instruction.modifiers else frame.memory


def _count(instruction: Instruction) -> int:
    return next((VECTORS[m] for m in instruction.modifiers if m in VECTORS), 1)


def build_load(instruction: Instruction, frame: Frame) -> Step:
    space, type_, count = _space(instruction, frame), instruction.type, _count(instruction)
    targets = frame.targets(instruction.operands[0], type_, loose=True)
    if len(targets) != count:
        raise PtxError(f"loads {count} values into {len(targets)} registers")
    dtype = DTYPES[type_]
    if "param" in instruction.modifiers:
        return _load_param(instruction, frame, targets)
    addresses = frame.addresses_of(instruction.operands[1])

    def load(s: Any) -> None:
        values = space.load(frame.lanes(s), addresses(s), dtype, count)
        for i, target in enumerate(targets):
            target(s, values[:, i])

    return load


def _load_param(instruction: Instruction, frame: Frame, targets: list[Any]) -> Step:
    address, type_ = instruction.operands[1], instruction.type
    if not isinstance(address, Address) or not isinstance(address.base, Name):
        raise PtxError("a parameter is read by its name")
    if address.base.name not in frame.params:
        raise PtxError(f"there is no parameter {address.base.name}")
    offset, content = frame.params[address.base.name]
    start, end = address.offset, address.offset + SIZES[type_] * len(targets)
    if (offset + start) % (end - start) or start < 0 or end > len(content):
        raise PtxError(f"reads bytes {start} to {end} of a parameter of {len(content)} bytes")
    values = content[start:end].view(DTYPES[type_])

    def load(s: Any) -> None:
        for target, value in zip(targets, values, strict=True):
            target(s, value)

    return load


def build_store(instruction: Instruction, frame: Frame) -> Step:
    space, type_, count = _space(instruction, frame), instruction.type, _count(instruction)
    sources = frame.sources(instruction.operands[1], type_, loose=True)
    if len(sources) != count:
        raise PtxError(f"stores {count} values from {len(sources)} registers")
    addresses = frame.addresses_of(instruction.operands[0])

    def store(s: Any) -> None:
        threads = frame.lanes(s)
        values = np.empty((len(threads), count), DTYPES[type_])
        for i, source in enumerate(sources):
            values[:, i] = source(s)
        space.store(threads, addresses(s), values)

    return store


UPDATES: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda old, b: old + b,
    "min": min,
    "max": max,
    "and": lambda old, b: old & b,
    "or": lambda old, b: old | b,
    "xor": lambda old, b: old ^ b,
    "exch": lambda old, b: b,
    "inc": lambda old, b: old * 0 if old >= b else old + type(old)(1),
    "dec": lambda old, b: b if old == 0 or old > b else old - type(old)(1),
}


def build_atomic(instruction: Instruction, frame: Frame) -> Step:
    """atom and red: the threads of a selection go one after another."""
    names = [m for m in instruction.modifiers if m in UPDATES or m == "cas"]
    if len(names) != 1:
        raise PtxError(f"{instruction.opcode} is not supported")
    plain = Instruction(
        0,
        ".".join(["atom", *[m for m in instruction.modifiers if m not in names]]),
        (),
        None,
        "",
        "",
    )
    space, type_ = _space(plain, frame), instruction.type
    operands = list(instruction.operands)
    target = frame.target(operands.pop(0), type_) if instruction.stem == "atom" else None
    addresses = frame.addresses_of(operands.pop(0))
    sources = [frame.source(operand, type_) for operand in operands]
    if len(sources) != 1 + (names[0] == "cas"):
        raise PtxError(f"{instruction.stem}.{names[0]} has the wrong number of operands")
    update, size = UPDATES.get(names[0]), SIZES[type_]

    def step(s: Any) -> None:
        threads = frame.lanes(s)
        offsets = space.offsets(threads, addresses(s), size, write=True)
        old = space.bytes.get(offsets, DTYPES[type_], 1, threads)[:, 0]
        values = [np.broadcast_to(source(s), old.shape) for source in sources]
        view = space.bytes.data.view(DTYPES[type_])
        for i, index in enumerate(offsets // size):
            old[i] = view[index]
            if update is not None:
                view[index] = update(old[i], values[0][i])
            elif old[i] == values[0][i]:
                view[index] = values[1][i]
        if target is not None:
            target(s, old)

    return step


def build_copy(instruction: Instruction, frame: Frame) -> Step:
    """cp.async: the bytes are read now and arrive when the thread waits for their group."""
    match instruction.modifiers:
        case ["async", "commit_group"]:

            def commit(s: Any) -> None:
                frame.committed[s] += 1

            return commit
        case ["async", "wait_group" | "wait_all" as kind]:
            pending = instruction.operands[0] if kind == "wait_group" else Int(-1)
            if not isinstance(pending, Int):
                raise PtxError("cp.async.wait_group takes a constant")
            return lambda s: _complete(frame, frame.lanes(s), pending.value)
        case ["async", "ca" | "cg", "shared", "global", *hints] if all(
            hint.startswith("L2::") for hint in hints
        ):
            return _issue(instruction, frame)
    raise PtxError(f"{instruction.opcode} is not supported")


def _issue(instruction: Instruction, frame: Frame) -> Step:
    target, origin, size, *rest = instruction.operands
    if not isinstance(size, Int) or size.value not in (4, 8, 16):
        raise PtxError("cp.async copies 4, 8 or 16 bytes")
    n_bytes = size.value
    to, from_ = frame.addresses_of(target), frame.addresses_of(origin)
    given = frame.source(rest[0], "u32") if rest else None

    def step(s: Any) -> None:
        threads, addresses = frame.lanes(s), to(s)
        values = np.zeros((len(threads), n_bytes // 4), np.uint32)
        sizes = np.broadcast_to(n_bytes if given is None else given(s), threads.shape)
        if not np.isin(sizes, (0, n_bytes)).all():
            raise PtxError("cp.async of a part of its bytes is not supported")
        reading = sizes != 0
        if reading.any():
            values[reading] = frame.memory.load(
                threads[reading], from_(s)[reading], np.uint32, n_bytes // 4
            )
        frame.shared.expect(threads, addresses, n_bytes)
        frame.copies.append(Copy(threads, frame.committed[threads].copy(), addresses, values))

    return step


def _complete(frame: Frame, threads: Array, n_pending: int) -> None:
    """Let copies arrive: all but the last `n_pending` groups of each thread, or all if -1."""
    waiting = np.zeros(frame.n_threads, bool)
    waiting[threads] = True
    rest = []
    for copy in frame.copies:
        done = waiting[copy.threads]
        if n_pending >= 0:
            done = done & (copy.groups < frame.committed[copy.threads] - n_pending)
        if done.any():
            frame.shared.arrive(copy.threads[done], copy.addresses[done], copy.values[done])
        if not done.all():
            left = ~done
            rest.append(
                Copy(copy.threads[left], copy.groups[left], copy.addresses[left], copy.values[left])
            )
    frame.copies[:] = rest


def build_nothing(instruction: Instruction, frame: Frame) -> Step:
    """Fences, hints and the like: without effect where every access is seen at once."""
    return lambda s: None


def build_policy(instruction: Instruction, frame: Frame) -> Step:
    target = frame.target(instruction.operands[0], "b64")
    return lambda s: target(s, np.uint64(0))


BUILDERS: dict[str, Builder] = {
    "ld": build_load, "ldu": build_load, "st": build_store,
    "atom": build_atomic, "red": build_atomic, "cp": build_copy,
    "membar": build_nothing, "fence": build_nothing, "prefetch": build_nothing,
    "griddepcontrol": build_nothing, "nanosleep": build_nothing, "createpolicy": build_policy,
}  # fmt: skip
