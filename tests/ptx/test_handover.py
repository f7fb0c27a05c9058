"""Two sides of a hand-over at once: waiting as long as there is hope, and no longer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ops.gpu.handover import BEAT, FAILED, STOP, WORDS_BYTES, hand_over, take_over
from ops.gpu.kernel import Kernel
from tests.support.machines import InterpretedMachine

ROW_BYTES = 64
PATIENCE_NS = 4096
LOOKS = 12
"""How often the other side lets one look in vain; with ticks for nanoseconds, several patiences."""


class Link:
    """Memory of both sides, and a host that acts at every look of the waiting kernel."""

    def __init__(self, act: Callable[[Link, int], None]) -> None:
        self._act, self.n_looks = act, 0
        self.machine = InterpretedMachine(host=self._look)
        place = self.machine.place
        self.epoch = place(np.array([7], np.uint32))
        self.count = place(np.array([2], np.uint32))
        self.x = place(np.arange(2 * ROW_BYTES, dtype=np.uint8))
        self.landing = place(np.zeros((2, 2 * ROW_BYTES), np.uint8))
        self.given, self.taken = (place(np.array([n], np.uint32)) for n in (6, 6))
        self.counter, self.words = place(np.zeros(1, np.uint32)), place(np.zeros(32, np.uint32))

    def _look(self) -> None:
        self.n_looks += 1
        self._act(self, self.n_looks)

    def store(self, address: int, *words: int) -> None:
        self.machine.memory.write(address, np.array(words, np.uint32))

    def launch(self, kernel: Kernel, **own: int) -> None:
        common = {"epoch": self.epoch, "count": self.count, "x": self.x, "row_bytes": ROW_BYTES}
        common |= {"stride": 2 * ROW_BYTES, "given": self.given, "taken": self.taken}
        common |= {"counter": self.counter, "words": self.words, "link": 3}
        self.machine.launch(kernel, (1,), {**common, "patience": PATIENCE_NS, **own})

    def take(self) -> list[int]:
        self.launch(take_over(), source=self.landing)
        return self.machine.read(self.x, np.uint8, 2 * ROW_BYTES).tolist()

    @property
    def failed(self) -> list[int]:
        words = self.machine.read(self.words, np.uint32, WORDS_BYTES // 4)
        return words[FAILED // 4 :][:4].tolist()


def give(link: Link) -> None:
    """What the GPU before does, at last."""
    rows = np.full(2 * ROW_BYTES, 9, np.uint8)
    link.machine.memory.write(link.landing + 2 * ROW_BYTES, rows)
    link.store(link.given, 7)


def test_a_beating_host_is_waited_for_beyond_any_patience() -> None:
    def act(link: Link, look: int) -> None:
        link.machine.memory.write(link.words + BEAT, np.array([look], np.uint32))
        if link.machine.loaded and look * 20 > LOOKS * PATIENCE_NS // 20:
            give(link)

    link = Link(act)
    assert link.take() == [9] * (2 * ROW_BYTES)
    assert link.failed == [0, 0, 0, 0]
    assert link.machine.read(link.taken, np.uint32, 1) == 7


@pytest.mark.parametrize("stops", [False, True])
def test_nobody_waits_without_hope(stops: bool) -> None:
    def act(link: Link, look: int) -> None:
        if stops:
            link.machine.memory.write(link.words + STOP, np.array([1], np.uint32))

    link = Link(act)
    assert link.take() == [0] * (2 * ROW_BYTES)
    assert link.failed == [0, 0, 7, 3]
    assert (link.n_looks < 20) == stops


def test_rows_that_nobody_took_are_not_overwritten_until_they_are() -> None:
    def act(link: Link, look: int) -> None:
        landing = link.machine.read(link.landing, np.uint8, 4 * ROW_BYTES)
        if look <= LOOKS:
            assert not landing.any()
            assert link.machine.read(link.given, np.uint32, 1) == 6
        if look == LOOKS:
            link.store(link.taken, 5)

    link = Link(act)
    link.store(link.taken, 4)
    link.launch(hand_over(), target=link.landing)
    landing = link.machine.read(link.landing, np.uint8, 4 * ROW_BYTES)
    assert landing.tolist() == [0] * (2 * ROW_BYTES) + list(range(2 * ROW_BYTES))
    assert link.machine.read(link.given, np.uint32, 1) == 7
    assert link.n_looks in (LOOKS, LOOKS + 1)


def test_both_sides_through_several_steps() -> None:
    link = Link(lambda link, look: None)
    for epoch in range(7, 12):
        rows = np.full((2, ROW_BYTES), epoch, np.uint8)
        link.store(link.epoch, epoch)
        link.machine.memory.write(link.x, rows)
        link.launch(hand_over(), target=link.landing)
        link.machine.memory.write(link.x, np.zeros_like(rows))
        assert link.take() == rows.reshape(-1).tolist()
    assert link.failed == [0, 0, 0, 0]
