"""hand_over, take_over, take_tokens: what they wrote after the other side was there, or was not.

The result of a case is all that the kernel may write.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ops.exchange import failed_number
from ops.gpu.handover import (
    BEAT,
    FAILED,
    STOP,
    WORDS_BYTES,
    blocks,
    hand_over,
    hand_over_reference,
    take_over,
    take_over_reference,
    take_tokens,
    take_tokens_reference,
)
from ops.gpu.kernel import Kernel
from ops.gpu.step_io import RING
from tests.support.cases.case import Array, Case, Outcome
from tests.support.machines import Machine

LINK = 5
PATIENCE_NS = 65536


@dataclass(frozen=True)
class Shape:
    """n_tokens rows of a graph for `most_tokens`.

    behind   how many steps the flag that is waited for is behind what it has to be; < 0: ahead
    stopped  the host says that there is no hope
    """

    n_tokens: int
    most_tokens: int
    row_bytes: int
    epoch: int
    behind: int = 0
    stopped: bool = False
    n_blocks: int = 0


SMALL = {
    "one token": Shape(1, 1, 272, 1),
    "three of four": Shape(3, 4, 2064, 6, behind=-1, n_blocks=1),
    "three blocks": Shape(2, 2, 8208, 4, n_blocks=3),
    "around the end of the numbers": Shape(2, 2, 64, 1, behind=-2, n_blocks=2),
    "stopped": Shape(1, 2, 32, 9, behind=1, stopped=True),
    "in vain": Shape(2, 2, 64, 2**32 - 1, behind=3, n_blocks=2),
}
LARGE = {
    "one token, 2048": Shape(1, 1, 8192, 3),
    "512 tokens, 7168": Shape(512, 512, 28672, 4),
}


def gave_up(words: NDArray[np.uint32], epoch: int) -> None:
    """What a GPU says that has waited in vain."""
    words[FAILED // 4 + 2 * (epoch % 2) :][:2] = failed_number(epoch), LINK


class Sides:
    """What both kernels' cases have in common, placed."""

    def __init__(self, shape: Shape, machine: Machine) -> None:
        rng = np.random.default_rng(shape.row_bytes)
        self.shape, self.machine = shape, machine
        self.there = shape.behind <= 0
        n_bytes = shape.most_tokens * shape.row_bytes
        self.x = rng.integers(0, 256, (shape.most_tokens, shape.row_bytes), np.uint8)
        self.landing = rng.integers(0, 256, (2, n_bytes + 16), np.uint8)
        self.words = np.zeros(WORDS_BYTES // 4, np.uint32)
        self.words[BEAT // 4], self.words[STOP // 4] = 77, shape.stopped
        self.counter = machine.place(np.zeros(1, np.uint32))
        self.words_at = machine.place(self.words)
        if not self.there:
            gave_up(self.words, shape.epoch)

    def launch(self, kernel: Kernel, **arguments: int) -> None:
        shape, place = self.shape, self.machine.place
        self.machine.launch(
            kernel,
            (shape.n_blocks or blocks(shape.most_tokens, shape.row_bytes),),
            {
                "epoch": place(np.array([shape.epoch], np.uint32), writable=False),
                "count": place(np.array([shape.n_tokens], np.uint32), writable=False),
                "row_bytes": shape.row_bytes,
                "stride": self.landing.shape[1],
                "counter": self.counter,
                "words": self.words_at,
                "patience": PATIENCE_NS,
                "link": LINK,
                **arguments,
            },
        )

    def outcome(self, rows: int, expected: Array, flag: int) -> Outcome:
        """Rows at an address, then the flag that was set, the counter and the words."""
        read = self.machine.read
        result = [
            read(rows, np.uint8, expected.size),
            *(read(at, np.uint8, 4) for at in (flag, self.counter)),
            read(self.words_at, np.uint8, WORDS_BYTES),
        ]
        scalars = np.array([self.shape.epoch, 0], np.uint32)
        parts = [expected.reshape(-1), scalars.view(np.uint8), self.words.view(np.uint8)]
        return Outcome(np.concatenate(result), np.concatenate(parts))

    def number(self, wanted: int) -> Array:
        """A flag that is so far behind the wanted number."""
        return np.array([(wanted - self.shape.behind) % 2**32], np.uint32)


def run_hand_over(shape: Shape, kernel: Kernel, machine: Machine) -> Outcome:
    """Into memory whose other half must stay as it is."""
    sides = Sides(shape, machine)
    target, given = machine.place(sides.landing), machine.place(np.zeros(1, np.uint32))
    taken = machine.place(sides.number(shape.epoch - 2), writable=False)
    x = machine.place(sides.x, writable=False)
    sides.launch(kernel, x=x, target=target, given=given, taken=taken)
    rows = sides.x[: shape.n_tokens]
    expected = hand_over_reference(rows, sides.landing, shape.epoch, free=sides.there)
    return sides.outcome(target, expected, given)


def run_take_over(shape: Shape, machine: Machine) -> Outcome:
    """Into rows of which those of no token must stay as they are."""
    sides = Sides(shape, machine)
    x, taken = machine.place(sides.x), machine.place(np.zeros(1, np.uint32))
    given = machine.place(sides.number(shape.epoch), writable=False)
    source = machine.place(sides.landing, writable=False)
    sides.launch(take_over(), x=x, source=source, given=given, taken=taken)
    expected = take_over_reference(
        sides.landing, sides.x, shape.epoch, shape.n_tokens, here=sides.there
    )
    return sides.outcome(x, expected, taken)


@dataclass(frozen=True)
class Choice:
    """A step whose tokens are known, or stand for rows of the step before.

    behind   how many steps the last GPU's word is behind that one; < 0: ahead
    """

    token_ids: tuple[int, ...]
    epoch: int
    behind: int = 0
    stopped: bool = False


CHOICES = {
    "one token": Choice((-1,), 1),
    "some of four, one known": Choice((-2, 7, -4), 6, behind=-1),
    "more than threads": Choice(tuple(range(-40, 0)), 2),
    "around the end of the numbers": Choice((-3, -1), 0, behind=-2),
    "all known": Choice((5, 0), 9, behind=1),
    "stopped": Choice((-1, -2), 9, behind=1, stopped=True),
    "in vain": Choice((-2,), 2**32 - 1, behind=3),
}


def run_take_tokens(choice: Choice, machine: Machine) -> Outcome:
    """Into a row of tokens of which the others must stay as they are, and so the words."""
    rng, n_rows = np.random.default_rng(7), 48
    here = choice.behind <= 0
    source = rng.integers(0, 1 << 30, (RING, n_rows), np.int32)
    tokens = rng.integers(0, 1 << 30, n_rows, np.int32)
    words = np.zeros(WORDS_BYTES // 4, np.uint32)
    words[BEAT // 4], words[STOP // 4] = 77, choice.stopped
    ids = np.array(choice.token_ids, np.int32)
    count = np.array([len(ids)], np.uint32)
    done = np.array([(choice.epoch - 1 - choice.behind) % 2**32], np.uint32)
    place = partial(machine.place, writable=False)
    tokens_at, words_at = machine.place(tokens), machine.place(words)
    machine.launch(
        take_tokens(),
        (1,),
        {
            "epoch": place(np.array([choice.epoch], np.uint32)),
            "count": place(count),
            "token_ids": place(ids),
            "done": place(done),
            "source": place(source),
            "stride": 4 * n_rows,
            "tokens": tokens_at,
            "words": words_at,
            "patience": PATIENCE_NS,
            "link": LINK,
        },
    )
    expected = take_tokens_reference(source, tokens, ids, choice.epoch, here=here)
    if not here and min(choice.token_ids) < 0:
        gave_up(words, choice.epoch)
    result = [machine.read(at, np.uint8, n) for at, n in ((tokens_at, 4 * n_rows), (words_at, 128))]
    return Outcome(
        np.concatenate(result), np.concatenate([expected.view(np.uint8), words.view(np.uint8)])
    )


def cases() -> Iterator[Case]:
    """Small ones for the interpreter; real sizes for a GPU."""
    for shapes, large in ((SMALL, False), (LARGE, True)):
        for name, shape in shapes.items():
            yield Case(name, take_over(), partial(run_take_over, shape), large)
            for overlapped in (False, True):
                kernel = hand_over(overlapped=overlapped)
                yield Case(name, kernel, partial(run_hand_over, shape, kernel), large)
    for name, choice in CHOICES.items():
        yield Case(name, take_tokens(), partial(run_take_tokens, choice))
