"""Runs a kernel's instructions over all threads of many blocks at once.

Every thread has its own place in the program. The threads at the lowest place run together until
they meet others, part ways or wait, so divergent paths come together again by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.support.ptx import access, bitwise, convert, floats, integer, select, warp
from tests.support.ptx.elementwise import Builder
from tests.support.ptx.errors import Deadlock, PtxError, UnknownInstruction
from tests.support.ptx.frame import EVERY, Array, Frame, Selection, Source, Step
from tests.support.ptx.syntax import Body, Instruction, Int, Name, Not, Operand, Reg

LANES = 32
FULL_MASK = 0xFFFF_FFFF

PLAIN, BRANCH, LEAVE, YIELD, WARP, BARRIER = range(6)
KINDS = {
    "bra": BRANCH, "ret": LEAVE, "exit": LEAVE, "trap": LEAVE, "nanosleep": YIELD,
    "shfl": WARP, "vote": WARP, "match": WARP, "redux": WARP, "mma": WARP, "ldmatrix": WARP,
    "bar": BARRIER, "barrier": BARRIER,
}  # fmt: skip
WHOLE_WARP = ("mma", "ldmatrix")
POLLS = {"volatile", "relaxed", "acquire", "cas"}
"""An instruction with one of these may be waiting for another thread: let others run first."""


def kind_of(instruction: Instruction) -> int:
    """How the machine treats the instruction."""
    if instruction.stem in ("bar", "barrier") and "warp" in instruction.modifiers:
        return WARP
    if instruction.stem in ("ld", "atom") and POLLS & set(instruction.modifiers):
        return YIELD
    return KINDS.get(instruction.stem, PLAIN)


def bind(instruction: Instruction, frame: Frame) -> Step:
    """The procedure that carries the instruction out for a selection of threads.

    Raises:
        PtxError: unknown instruction, modifier or operand; it is located.
    """
    stem, type_ = instruction.stem, instruction.type
    builder: Builder | None = None
    if type_ == "f16x2" and stem != "cvt":
        builder = floats.build_pairs
    elif type_ in ("f16", "f32", "f64"):
        builder = floats.BUILDERS.get(stem)
    builder = builder or OTHERS.get(stem)
    if builder is None:
        raise UnknownInstruction(
            f"{instruction.place}: {instruction.opcode} is not supported in `{instruction.code}`"
        )
    try:
        return builder(instruction, frame)
    except PtxError as error:
        error.locate(instruction.place, instruction.code, "")
        raise
    except (ValueError, IndexError, KeyError) as error:
        problem = UnknownInstruction(f"cannot read its modifiers or operands ({error!r})")
        problem.locate(instruction.place, instruction.code, "")
        raise problem from error


OTHERS: dict[str, Builder] = {
    **integer.BUILDERS, **bitwise.BUILDERS, **select.BUILDERS, **convert.BUILDERS,
    **access.BUILDERS, **warp.BUILDERS, "testp": floats.build_testp,
    **dict.fromkeys(("bra", "ret", "exit", "trap", "bar", "barrier"), access.build_nothing),
}  # fmt: skip


class Machine:
    """The threads of a launch, from the first instruction until all have left."""

    def __init__(
        self,
        body: Body,
        frame: Frame,
        alive: Array,
        executed: Array,
        host: Callable[[], None] | None,
        max_steps: int,
    ) -> None:
        self.body, self.frame, self.executed, self.host = body, frame, executed, host
        self.alive = alive
        self.place = np.zeros(frame.n_threads, np.int64)
        self.waiting = np.zeros(frame.n_threads, bool)
        self.yielded = np.zeros(frame.n_threads, bool)
        self.at_barrier = np.full(frame.n_threads, -1)
        self.max_steps = max_steps
        self.arrivals: dict[tuple[int, int], int] = {}
        """Threads that passed `bar.arrive`, by (block, barrier)."""
        self.block_size = np.bincount(frame.shared.block_of[alive])
        n = len(body.instructions)
        self.steps: list[Step | None] = [None] * n
        self.predicates: list[Source | None] = [None] * n
        self.masks: list[Source | None] = [None] * n
        if not body.kinds:  # the first launch looks at every instruction, others at what they reach
            kinds = [kind_of(instruction) for instruction in body.instructions]
            body.targets = [self._target(instruction) for instruction in body.instructions]
            for place in range(n):
                self._bind(place)
            body.kinds = kinds
        self.kinds, self.targets = body.kinds, body.targets

    def run(self) -> None:
        """Run until every thread has left.

        Raises:
            PtxError: located at the instruction; Deadlock where threads wait in vain.
        """
        with np.errstate(all="ignore"):
            while self.alive.any():
                self._run_lowest()

    def _step(self, place: int) -> Step:
        return self.steps[place] or self._bind(place)

    def _bind(self, place: int) -> Step:
        """Bind the instruction, its predicate and its mask to the frame."""
        instruction = self.body.instructions[place]
        step = self.steps[place] = bind(instruction, self.frame)
        if instruction.predicate is not None:
            self.predicates[place] = self.frame.source(instruction.predicate, "pred")
        self.masks[place] = self._mask(instruction)
        return step

    def _run_lowest(self) -> None:
        ready = self.alive & ~self.waiting
        if not ready.any():
            self._stuck("the threads wait for each other")
        first = ready & ~self.yielded
        if not first.any():
            self.yielded[:] = False
            if self.host is not None:
                self.host()
            first = ready
        places = self.place[first]
        place = int(places.min())
        group = np.flatnonzero(ready & (self.place == place))
        self.yielded[group] = False
        later = places[places > place]
        self._run(group, place, int(later.min()) if len(later) else len(self.steps))

    def _run(self, group: Array, place: int, meeting: int) -> None:
        """Run the threads at `place` until they reach `meeting`, part or wait."""
        selection = self._selection(group)
        while place < meeting:
            self.frame.ticks += 1
            if self.frame.ticks > self.max_steps:
                self._stuck("the kernel does not end")
            kind, step = self.kinds[place], self._step(place)
            predicate = self.predicates[place]
            try:
                if predicate is None:
                    acting, active = group, selection
                else:
                    chosen = predicate(selection)
                    acting = group if chosen.all() else group[chosen]
                    active = selection if acting is group else self._selection(acting)
                if len(acting):
                    self.executed[place] += 1
                if kind == PLAIN:
                    if len(acting):
                        step(active)
                    place += 1
                    continue
                after = self._special(kind, place, group, acting, active)
            except PtxError as error:
                self._locate(error, place, group)
                raise
            if after is None:
                return
            place = after
        self.place[group] = place
        if place >= len(self.steps):
            self._stuck("the threads run past the last instruction: a ret is missing")

    def _special(
        self, kind: int, place: int, group: Array, acting: Array, active: Selection
    ) -> int | None:
        """Run a control instruction: where the whole group goes on, or None if it is left to
        the next choice of threads."""
        if len(acting) == 0:
            return place + 1
        self.place[group] = place + 1
        together = acting is group
        if kind == BRANCH:
            target = self.targets[place]
            self.place[acting] = target
            return target if together else None
        if kind == LEAVE:
            if self.body.instructions[place].stem == "trap":
                raise PtxError("the kernel traps", acting)
            self.alive[acting] = False
            self.waiting[self.waiting & (self.at_barrier == -1)] = False  # who is missing changed
            return None
        if kind == YIELD:
            self._step(place)(active)
            self.yielded[acting] = True
            return None
        if kind == WARP:
            after = self._meet(place, acting, active)
            return after if together else None
        self._barrier(place, acting)
        return None

    def _meet(self, place: int, acting: Array, active: Selection) -> int | None:
        """Run a warp instruction once all the lanes that it names are here."""
        instruction = self.body.instructions[place]
        source = self.masks[place]
        lanes = np.full(len(acting), FULL_MASK) if source is None else source(active)
        simple = active is EVERY and np.all(lanes == FULL_MASK)
        if simple:
            self._exchange(instruction, place, active)
            return place + 1
        here = acting
        if (parked := self.waiting & (self.place == place) & (self.at_barrier == -1)).any():
            here = np.union1d(acting, np.flatnonzero(parked))
            lanes = 0 if source is None else source(here)
        lanes = np.broadcast_to(FULL_MASK if source is None else lanes, here.shape)
        lanes = lanes.astype(np.int64)
        bit = np.int64(1) << (here % LANES)
        if (outside := lanes & bit == 0).any():
            raise PtxError("the member mask does not name the lane itself", here[outside])
        arrived = np.zeros(self.frame.n_threads, bool)
        arrived[here] = True
        missing = warp.bits((self.alive & ~arrived).reshape(-1, LANES)).astype(np.int64)
        complete = (missing[here // LANES] & lanes) == 0
        if instruction.stem in WHOLE_WARP:
            n_here = arrived.reshape(-1, LANES).sum(axis=1)
            if (short := complete & (n_here[here // LANES] < LANES)).any():
                raise PtxError("needs all 32 lanes of the warp", here[short])
        incomplete = here[~complete]
        self.waiting[incomplete] = True
        self.place[incomplete] = place
        ready = here[complete]
        if len(ready):
            self._exchange(instruction, place, self._selection(ready))
            self.waiting[ready] = False
            self.place[ready] = place + 1
        return place + 1 if len(ready) == len(here) == len(acting) else None

    def _exchange(self, instruction: Instruction, place: int, active: Selection) -> None:
        if self.kinds[place] == WARP and instruction.stem in ("bar", "barrier"):
            self.frame.shared.epoch[active] += 1
        else:
            self._step(place)(active)

    def _barrier(self, place: int, acting: Array) -> None:
        """A barrier of the block: wait, or let all go on if these are the last."""
        instruction = self.body.instructions[place]
        known = {"sync", "arrive", "aligned", "cta"} >= set(instruction.modifiers)
        first, *rest = instruction.operands or [Int(0)]
        counts = [o.value for o in rest if isinstance(o, Int)]
        if not known or len(rest) > len(counts) or not isinstance(first, (Int, Reg)):
            raise PtxError(f"{instruction.opcode} is not supported with these operands")
        which = np.broadcast_to(self.frame.source(first, "u32")(acting), acting.shape)
        for barrier in np.unique(which):
            self._arrive(instruction, acting[which == barrier], int(barrier), counts)

    def _arrive(
        self, instruction: Instruction, acting: Array, barrier: int, counts: list[int]
    ) -> None:
        """These threads are at barrier number `barrier`, of so many threads or of all."""
        arrive = "arrive" in instruction.modifiers
        if arrive > len(counts):
            raise PtxError(f"{instruction.opcode} is not supported with these operands")
        block_of = self.frame.shared.block_of
        if not arrive:
            self.waiting[acting] = True
            self.at_barrier[acting] = barrier
        for block in np.unique(block_of[acting]):
            mine = block_of == block
            if arrive:
                count = int(np.count_nonzero(block_of[acting] == block))
                self.arrivals[block, barrier] = self.arrivals.get((block, barrier), 0) + count
            n_expected = counts[0] if counts else int(self.block_size[block])
            if not counts and np.count_nonzero(mine & self.alive) < n_expected:
                raise PtxError("a thread left before a barrier of all threads", acting)
            here = mine & (self.at_barrier == barrier)
            n_here = np.count_nonzero(here) + self.arrivals.get((block, barrier), 0)
            if n_here > n_expected:
                raise PtxError(f"{n_here} threads at a barrier of {n_expected}", acting)
            if n_here == n_expected:
                self._release(instruction, here, block)
                self.arrivals.pop((block, barrier), None)

    def _release(self, instruction: Instruction, here: Array, block: int) -> None:
        places = np.where(here, self.place, -1).reshape(-1, LANES)
        split = (places != places.max(axis=1)[:, None]) & (places >= 0)
        aligned = instruction.stem == "bar" or "aligned" in instruction.modifiers
        if aligned and split.any():
            raise PtxError("lanes of one warp meet at different barriers", np.flatnonzero(split))
        self.waiting[here] = False
        self.at_barrier[here] = -1
        self.frame.shared.block_barrier(block)

    def _selection(self, group: Array) -> Selection:
        if len(group) == self.frame.n_threads:
            return EVERY
        if len(group) and group[-1] - group[0] + 1 == len(group):
            return slice(int(group[0]), int(group[-1]) + 1)
        return group

    def _target(self, instruction: Instruction) -> int:
        """The index of the instruction that a branch goes to."""
        if instruction.stem != "bra":
            return -1
        name = instruction.operands[0]
        if isinstance(name, Name):
            for scope in reversed(name.scopes):
                if (scope, name.name) in self.body.labels:
                    return self.body.labels[scope, name.name]
        raise PtxError(f"{instruction.place}: there is no such label in `{instruction.code}`")

    def _mask(self, instruction: Instruction) -> Source | None:
        """The member mask of a warp instruction, None where it is the whole warp."""
        if kind_of(instruction) != WARP or instruction.stem in WHOLE_WARP:
            return None
        operand: Operand = instruction.operands[-1]
        if isinstance(operand, Not) or "sync" not in instruction.modifiers:
            raise PtxError(
                f"{instruction.place}: needs .sync and a member mask: {instruction.code}"
            )
        return self.frame.source(operand, "b32")

    def _locate(self, error: PtxError, place: int, group: Array) -> None:
        instruction = self.body.instructions[place]
        threads = group if error.threads is None or not len(error.threads) else error.threads
        error.locate(instruction.place, instruction.code, self._thread(int(threads[0])))

    def _thread(self, thread: int) -> str:
        x, y, z = (int(self.frame.specials[f"%tid.{axis}"][thread]) for axis in "xyz")
        u, v, w = (int(self.frame.specials[f"%ctaid.{axis}"][thread]) for axis in "xyz")
        return f" (block {u},{v},{w} thread {x},{y},{z})"

    def _stuck(self, reason: str) -> Any:
        """Raise, saying where the threads are."""
        places, counts = np.unique(self.place[self.alive], return_counts=True)
        where = ", ".join(
            f"{count} after {self.body.instructions[max(int(place) - 1, 0)].place}"
            for place, count in zip(places, counts, strict=True)
        )
        raise Deadlock(f"{reason}: {where}")
