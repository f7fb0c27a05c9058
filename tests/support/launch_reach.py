"""What the launches of a plan reach before they have waited, held against those still running."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from runtime.engine.gpu.early_starts import early_starts
from runtime.engine.gpu.launch_plan import Join, LaunchPlan, PlannedLaunch, Room
from runtime.engine.gpu.plan_parts import PlanParts
from tests.support.ptx.kernel import load
from tests.support.ptx.reach import Reach, reach_of

OTHER_PARTS = {
    ("attention.ptx", "k_pages"): "keys before all of the step's",
    ("attention.ptx", "v_pages"): "their values",
}
"""What is read before the wait where launches that may still run write something else."""

TABLES = {"segments", "experts", "table"}
"""Arguments that lead to addresses of weights, which are read before the wait as well."""

ELSEWHERE = 1 << 60
"""Where nothing is."""

Range = tuple[int, int]


class SpreadRoom(Room):
    """A room where phases do not share memory, so that an address tells which place it is in."""

    def __init__(self, base: int = 0, n_bytes: int = 0) -> None:
        super().__init__(ELSEWHERE)
        self._ranges: list[Range] = []

    def place(self, name: str, n_bytes: int, phase: str = "") -> int:
        address = super().place(f"{phase} {name}", n_bytes)
        self._ranges.append((address, address + n_bytes))
        return address

    def range_of(self, address: int) -> Range:
        around = (place for place in self._ranges if place[0] <= address < place[1])
        return max(around, key=lambda place: place[1], default=(address, address + 1))


@dataclass
class Reached:
    """A launch of a plan.

    number  of it in the main branch; a side branch's has that of the launch that joins it
    ended   the highest number of which all launches have ended when this one starts
    """

    launch: PlannedLaunch
    number: int
    ended: int
    reach: Reach

    def ranges(self, room: SpreadRoom, names: set[str]) -> set[Range]:
        """The bytes that arguments of these names lead to: places of the room, elsewhere one."""
        addresses = {int(self.launch.arguments[name]) for name in names} - {0}
        return {room.range_of(address) for address in addresses}


def reached(plan: LaunchPlan) -> list[Reached]:
    """The launches in the plan's order.

    One that is overlapped starts when the one before has waited in turn, so two before it may still
    run; an early one starts when the one before does.
    """
    found: list[Reached] = []
    early = iter(early_starts(plan))
    beside: list[Reached] = []
    last: Reached | None = None
    number = 0
    for node in plan.nodes:
        if isinstance(node, Join):
            for side in beside:
                side.number = number
            beside = []
        if not isinstance(node, PlannedLaunch):
            continue
        reach, is_early = _reach(node), next(early)
        ended = number - 1
        if node.side:
            beside.append(Reached(node, number, ended, reach))
            found.append(beside[-1])
            continue
        if last is not None and (is_early or (node.overlapped and last.reach.goes_on_before)):
            ended = last.ended
        elif node.overlapped:
            ended = number - 2
        last = Reached(node, number, ended, reach)
        found.append(last)
        number += 1
    return found


def collisions(parts: PlanParts) -> Iterator[str]:
    """What launches read before their wait that is not made yet, or write that is still in use; of
    a plan in a `SpreadRoom`."""
    assert isinstance(parts.room, SpreadRoom)
    launches = reached(parts.plan)
    for n, here in enumerate(launches):
        if not here.launch.overlapped:
            continue
        source, reach = here.launch.kernel.source, here.reach
        direct = {name for name in reach.read_before if name[0] != "*"}
        reads = {name for name in direct if (source, name) not in OTHER_PARTS}
        for name in sorted(reach.read_before - direct - {f"*{table}" for table in TABLES}):
            yield f"{here.launch.name}: {name} before the wait"
        for before in launches[:n]:
            if before.number > here.ended:
                yield from _both(here, reads, before, before.reach.written, parts.room)
                used = before.reach.read | before.reach.written
                yield from _both(here, reach.written_before, before, used, parts.room)


def _both(
    here: Reached, names: set[str], before: Reached, others: set[str], room: SpreadRoom
) -> list[str]:
    """Each pair of arguments of these names that lead to the same bytes."""
    return [
        f"{here.launch.name}: {name} before the wait, {other} of {before.launch.name}"
        for name in sorted(names)
        for other in sorted(name for name in others if name[0] != "*")
        if any(
            start < other_end and other_start < end
            for start, end in here.ranges(room, {name})
            for other_start, other_end in before.ranges(room, {other})
        )
    ]


def _reach(launch: PlannedLaunch) -> Reach:
    """Of addresses it only matters whether they are 0, so layers share what was found."""
    types = dict(launch.kernel.params)
    decisive = {
        name: int(value != 0) if types[name] == "u64" else value
        for name, value in launch.arguments.items()
    }
    kernel = launch.kernel
    return _found(kernel.text, kernel.entry, tuple(sorted(decisive.items())))


@lru_cache(maxsize=2048)
def _found(text: str, entry: str, arguments: tuple[tuple[str, float], ...]) -> Reach:
    return reach_of(load(text)[entry].text, dict(arguments))
