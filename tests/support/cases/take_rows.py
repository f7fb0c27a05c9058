"""take_rows: rows of a table that were there, came late, or did not come.

The result of a case is all that the kernel may write.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from ops.exchange import failed_number
from ops.gathering import FAILED, HEARTBEAT, READY, ROWS
from ops.gpu.take_rows import take_rows, take_rows_grid, take_rows_reference
from tests.support.cases.case import Case, Outcome
from tests.support.machines import Machine

PATIENCE_NS = 65536


@dataclass(frozen=True)
class Shape:
    """n_tokens rows of a graph for `most_tokens`.

    behind   how many steps the rows that are there are behind what they have to be; < 0: ahead
    gave_up  another kernel of the step has waited in vain
    """

    n_tokens: int
    most_tokens: int
    row_bytes: int
    epoch: int
    behind: int = 0
    gave_up: bool = False
    n_blocks: int = 0


SMALL = {
    "one token": Shape(1, 1, 1440, 1),
    "three of four": Shape(3, 4, 2064, 6, behind=-1, n_blocks=1),
    "three blocks": Shape(2, 2, 5136, 5, n_blocks=3),
    "around the end of the numbers": Shape(2, 2, 64, 0, behind=-2),
    "in vain": Shape(2, 2, 64, 2**32 - 1, behind=3),
    "given up": Shape(1, 1, 64, 8, behind=1, gave_up=True),
}
LARGE = {"128 tokens": Shape(128, 128, 1440, 7)}


def run_take_rows(shape: Shape, overlapped: bool, machine: Machine) -> Outcome:
    rng = np.random.default_rng(shape.row_bytes)
    n_bytes = shape.most_tokens * shape.row_bytes
    source = rng.integers(0, 256, (2, n_bytes + 16), np.uint8)
    target = rng.integers(0, 256, (shape.most_tokens, shape.row_bytes), np.uint8)
    words = np.zeros(ROWS // 4, np.uint32)
    words[HEARTBEAT // 4] = 77
    words[READY // 4] = (shape.epoch - shape.behind) % 2**32
    failed = words[FAILED // 4 + 2 * (shape.epoch % 2) :][:2]
    if shape.gave_up:
        failed[:] = failed_number(shape.epoch), 5
    place = partial(machine.place, writable=False)
    target_at, words_at = machine.place(target), machine.place(words)
    grid = take_rows_grid(shape.most_tokens, shape.row_bytes)
    machine.launch(
        take_rows(overlapped=overlapped),
        (shape.n_blocks,) if shape.n_blocks else grid,
        {
            "epoch": place(np.array([shape.epoch], np.uint32)),
            "count": place(np.array([shape.n_tokens], np.uint32)),
            "words": words_at,
            "source": place(source),
            "stride": source.shape[1],
            "target": target_at,
            "row_bytes": shape.row_bytes,
            "patience": PATIENCE_NS,
        },
    )
    here = shape.behind <= 0
    expected = take_rows_reference(source, target, shape.epoch, shape.n_tokens, here=here)
    if not here and not shape.gave_up:
        failed[:] = failed_number(shape.epoch), 0
    sizes = (target_at, target.size), (words_at, words.nbytes)
    result = [machine.read(at, np.uint8, n) for at, n in sizes]
    return Outcome(
        np.concatenate(result), np.concatenate([expected.reshape(-1), words.view(np.uint8)])
    )


def cases() -> Iterator[Case]:
    """Small ones for the interpreter; a batch for a GPU."""
    for overlapped in (False, True):
        for shapes, large in ((SMALL, False), (LARGE, True)):
            for name, shape in shapes.items():
                run = partial(run_take_rows, shape, overlapped)
                yield Case(name, take_rows(overlapped=overlapped), run, large)
