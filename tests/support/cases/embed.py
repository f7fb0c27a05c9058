"""`embed` against `ops.quants`: four of five tokens of a small vocabulary.

One of them was chosen on the device, one has no id."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from ops.gpu.embed import embed, embed_reference, grid, shared_bytes
from ops.gpu.row_launch import GPU_FORMATS
from ops.quants import FORMATS, BlockFormat
from tests.support.blocks import random_rows
from tests.support.cases.case import Case, Outcome
from tests.support.cases.expert import UNTOUCHED, place_matrix, place_table
from tests.support.machines import Machine

SMALL_N, LARGE_N = 2304, 4096
"""More than a block's values, not a whole number of blocks."""

TOKEN_IDS = (6, -2, 3, -1, 1)
SAMPLED = (-1, 5)
RESULTING_IDS = (6, 5, 3, 0)
N_COUNTED = 4
N_VOCAB = 7


def run_embed(fmt: BlockFormat, n: int, m: Machine) -> Outcome:
    """x f32[5, n]; the last token is beyond the count."""
    matrix = random_rows(fmt, N_VOCAB, n, seed=4)
    expected = np.full((len(TOKEN_IDS), n), UNTOUCHED)
    expected[:N_COUNTED] = embed_reference(fmt, matrix[list(RESULTING_IDS)])
    x = m.place(np.full(expected.shape, UNTOUCHED))
    m.launch(
        embed(fmt, overlapped=True),
        grid(n, len(TOKEN_IDS)),
        {
            "token_ids": m.place(np.array(TOKEN_IDS, np.int32), writable=False),
            "sampled": m.place(np.array(SAMPLED, np.int32), writable=False),
            "weights": place_matrix(m, matrix),
            "table": place_table(m, fmt),
            "x": x,
            "count": m.place(np.array([N_COUNTED], np.uint32), writable=False),
            "n": n,
        },
        shared_bytes=shared_bytes(fmt),
    )
    return Outcome(m.read(x, np.float32, expected.shape), expected)


def cases() -> Iterator[Case]:
    """Every format."""
    for name in GPU_FORMATS:
        fmt = FORMATS[name]
        for n, large in ((SMALL_N, False), (LARGE_N, True)):
            kernel = embed(fmt, overlapped=True)
            yield Case(f"rows of {n}", kernel, partial(run_embed, fmt, n), large)
