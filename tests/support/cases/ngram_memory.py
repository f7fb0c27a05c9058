"""ngram_gate and ngram_convolution: sequences that begin, go on and share a step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from ops.gpu.ngram_memory import (
    N_TAPS,
    convolution_reference,
    gate_reference,
    ngram_convolution,
    ngram_convolution_grid,
    ngram_gate,
)
from ops.gpu.streams import BLOCKS, N_STREAM, block_of
from tests.support.cases.case import Case, Outcome, normal_of
from tests.support.machines import Machine

TOLERANCE = 2e-5
EPS = 1e-6
UNTOUCHED = 7.5
Spans = tuple[tuple[int, int, int], ...]
SPANS: Spans = ((14, 0, 1), (1, 7, 0), (4, 3, 3), (0, 3, 2), (2, 20, 2))
"""(tokens, position of the first, slot) of each sequence."""


def run_gate(n: int, rows: int, block: int, overlapped: bool, m: Machine) -> Outcome:
    """The streams, and what is convolved."""
    normal = normal_of(np.random.default_rng(n))
    shape = (rows + 1, N_STREAM, n)
    x, keys, values = normal(*shape), normal(*shape), normal(rows + 1, n)
    keys[0, 1] = 0  # no product: the gate is a half
    norms = [normal(N_STREAM, n) for _ in range(3)]
    places = [m.place(array) for array in (x, np.full(shape, UNTOUCHED, np.float32))]
    names = ("key_norm", "query_norm", "conv_norm")
    m.launch(
        ngram_gate(block, overlapped=overlapped),
        (N_STREAM, rows + 1),
        {
            "count": m.place(np.array([rows], np.uint32), writable=False),
            "x": places[0],
            "keys": m.place(keys, writable=False),
            "values": m.place(values, writable=False),
            **{
                name: m.place(norm, writable=False) for name, norm in zip(names, norms, strict=True)
            },
            "u": places[1],
            "n": n,
            "eps": EPS,
        },
    )
    streams, u = gate_reference(x[:rows], keys[:rows], values[:rows], *norms, EPS)
    x[:rows] = streams
    wanted = np.concatenate([x, u, np.full((1, *shape[1:]), UNTOUCHED, np.float32)])
    result = np.concatenate([m.read(place, np.float32, shape) for place in places])
    return Outcome(result, wanted, TOLERANCE)


def run_convolution(
    n_channels: int, dilation: int, spans: Spans, overlapped: bool, m: Machine
) -> Outcome:
    """The streams, and the histories of all slots."""
    normal = normal_of(np.random.default_rng(n_channels))
    n, n_rows = sum(count for count, _, _ in spans), 3 * dilation
    u, x, taps = normal(n + 1, n_channels), normal(n + 1, n_channels), normal(n_channels, N_TAPS)
    slots = normal(4, n_rows * n_channels + 8)
    counts = np.array([n, 0, len(spans), 0], np.uint32)
    places: list[tuple[int, int, int, int]] = []
    rows: list[int] = []
    for row, (count, position, slot) in enumerate(spans):
        places.append((len(rows), count, position, slot))
        rows += [row] * count
    streams, states = m.place(x), m.place(slots)
    m.launch(
        ngram_convolution(overlapped=overlapped),
        ngram_convolution_grid(n_channels, n + 1),
        {
            "counts": m.place(counts, writable=False),
            "rows": m.place(np.array([*rows, 0], np.int32), writable=False),
            "spans": m.place(np.array(places, np.int32), writable=False),
            "states": states,
            "u": m.place(u, writable=False),
            "taps": m.place(taps, writable=False),
            "x": streams,
            "slot_bytes": slots.strides[0],
            "n_channels": n_channels,
            "dilation": dilation,
        },
    )
    for first, count, position, slot in places:
        if not count:
            continue
        tokens = slice(first, first + count)
        history = slots[slot, : n_rows * n_channels].reshape(n_rows, n_channels)
        order = np.arange(position, position + n_rows) % n_rows  # the oldest first
        before = history[order] * (np.arange(position - n_rows, position) >= 0)[:, None]
        x[tokens] += convolution_reference(u[tokens], before, taps, dilation)
        for i in range(max(0, count - n_rows), count):
            history[(position + i) % n_rows] = u[first + i]
    result = [m.read(streams, np.float32, x.shape), m.read(states, np.float32, slots.shape)]
    return Outcome(
        np.concatenate([part.reshape(-1) for part in result]),
        np.concatenate([x.reshape(-1), slots.reshape(-1)]),
        TOLERANCE,
    )


def cases() -> Iterator[Case]:
    """Small ones in every block, alone and overlapped, and real ones."""
    for overlapped in (False, True):
        for block in BLOCKS:
            kernel = ngram_gate(block, overlapped=overlapped)
            yield Case("2 rows of 72", kernel, partial(run_gate, 72, 2, block, overlapped))
        kernel = ngram_convolution(overlapped=overlapped)
        run = partial(run_convolution, 72, 3, SPANS, overlapped)
        yield Case("5 sequences, 72 channels", kernel, run)
    block = block_of(2560)
    run_large = partial(run_gate, 2560, 31, block, False)
    yield Case("31 rows of 2560", ngram_gate(block), run_large, large=True)
    run = partial(run_convolution, 10240, 3, SPANS, False)
    yield Case("5 sequences, 10240 channels", ngram_convolution(), run, large=True)
