"""refresh and report: what they copy, change and mark; that all else stays as it was."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from ops.gpu.kernel import Kernel
from ops.gpu.step_io import (
    DELTA_BYTES,
    DELTAS_HEADER_BYTES,
    RING,
    refresh,
    refresh_blocks,
    refresh_reference,
    report,
    report_blocks,
    report_reference,
)
from tests.support.cases.case import Array, Case, Outcome
from tests.support.machines import Machine

UNTOUCHED = 0x33
TABLE_ROWS = 300


def control_ring(n_bytes: int, n_deltas: int, max_deltas: int) -> Array:
    """RING control blocks of random bytes, each with changes of its own, for different rows."""
    rng = np.random.default_rng(n_bytes)
    stride = n_bytes + DELTAS_HEADER_BYTES + DELTA_BYTES * max_deltas
    ring = rng.integers(0, 256, (RING, stride), np.uint8)
    for block in ring:
        block[n_bytes : n_bytes + 4] = np.array([n_deltas], np.uint32).view(np.uint8)
        words = block[n_bytes + DELTAS_HEADER_BYTES :].view(np.uint32).reshape(max_deltas, 8)
        words[:, 0] = rng.permutation(TABLE_ROWS)[:max_deltas]
    return ring


def run_refresh(n_bytes: int, n_deltas: int, max_deltas: int, epoch: int, m: Machine) -> Outcome:
    """The control block, then the table."""
    ring = control_ring(n_bytes, n_deltas, max_deltas)
    table = np.random.default_rng(2).integers(0, 1 << 60, (TABLE_ROWS, 4), np.uint64)
    control = m.place(np.full(n_bytes, UNTOUCHED, np.uint8))
    placed = m.place(table)
    m.launch(
        refresh(),
        (refresh_blocks(n_bytes, max_deltas),),
        {
            "epoch": m.place(np.array([epoch], np.uint32), writable=False),
            "ring": m.place(ring, writable=False),
            "stride": ring.shape[1],
            "n_bytes": n_bytes,
            "control": control,
            "deltas_offset": n_bytes,
            "max_deltas": max_deltas,
            "table": placed,
        },
    )
    expected = refresh_reference(ring[epoch % RING], n_bytes, n_bytes, table)
    result = [m.read(control, np.uint8, n_bytes), m.read(placed, np.uint8, table.nbytes)]
    return Outcome(
        np.concatenate(result), np.concatenate([expected, table.view(np.uint8).reshape(-1)])
    )


def run_report(n_vocab: int, stride: int, shown: bool, kernel: Kernel, m: Machine) -> Outcome:
    """Two outputs in a grid for three; every array that is written, as bytes.

    The second output has an infinity in its last value, the first one only beyond its end.
    """
    epoch, n_outputs, rows = 41, 2, 3
    logits = np.random.default_rng(1).normal(size=(rows, stride)).astype(np.float32)
    logits[:, n_vocab:] = np.nan
    logits[1, n_vocab - 1] = -np.inf
    results = [np.arange(1000, dtype=np.uint32), np.arange(8, dtype=np.uint32)]
    strides = (0, 64)
    starts = [epoch % RING * stride for stride in strides]
    host = [
        np.full(start + part.nbytes + 16, UNTOUCHED, np.uint8)
        for part, start in zip(results, starts, strict=True)
    ]
    places = [m.place(part) for part in host]
    copies = [
        [m.place(part, writable=False), to, part.nbytes, stride]
        for part, to, stride in zip(results, places, strides, strict=True)
    ]
    host_logits = m.place(np.full((rows, stride), UNTOUCHED, np.uint32))
    flags, counter = m.place(np.full(rows, 7, np.uint32)), m.place(np.zeros(1, np.uint32))
    done, epochs = m.place(np.zeros(1, np.uint32)), m.place(np.array([epoch], np.uint32))
    m.launch(
        kernel,
        (report_blocks(stride), 1 + rows),
        {
            "epoch": epochs,
            "count": m.place(np.array([n_outputs], np.uint32), writable=False),
            "logits": m.place(logits, writable=False),
            "n_vocab": n_vocab,
            "stride": stride,
            "host_logits": host_logits if shown else 0,
            "flags": flags,
            "copies": m.place(np.array(copies, np.uint64), writable=False),
            "n_copies": len(copies),
            "counter": counter,
            "done": done,
        },
    )
    for part, to, start in zip(results, host, starts, strict=True):
        to[start : start + part.nbytes] = part.view(np.uint8)
    rows_copied = np.full((rows, stride), UNTOUCHED, np.uint32)
    if shown:
        whole = -(-n_vocab // 4) * 4
        rows_copied[:n_outputs, :whole] = logits.view(np.uint32)[:n_outputs, :whole]
    bad = report_reference(logits[:n_outputs, :n_vocab])
    marks = np.array([epoch if is_bad else 7 for is_bad in [*bad, False]], np.uint32)
    scalars = np.array([0, epoch, epoch + 1], np.uint32)
    expected = [*host, *(part.view(np.uint8).reshape(-1) for part in (rows_copied, marks, scalars))]
    read = [
        *((place, part.nbytes) for place, part in zip(places, host, strict=True)),
        (host_logits, 4 * rows * stride),
        (flags, 4 * rows),
        *((place, 4) for place in (counter, done, epochs)),
    ]
    result = np.concatenate([m.read(place, np.uint8, size) for place, size in read])
    return Outcome(result, np.concatenate(expected))


def cases() -> Iterator[Case]:
    for sizes in ((48, 3, 5, 6), (8208, 0, 2, 2**32 - 1), (4096, 260, 260, 4)):
        name = "{} bytes, {} of {} changes, epoch {}".format(*sizes)
        yield Case(name, refresh(), partial(run_refresh, *sizes))
    yield Case("no changes", refresh(), partial(run_refresh, 64, 0, 0, 1))
    for overlapped in (False, True):
        kernel = report(overlapped=overlapped)
        for n_vocab, stride, shown in ((5001, 5008, True), (130, 132, False)):
            run = partial(run_report, n_vocab, stride, shown, kernel)
            yield Case(f"{n_vocab} logits", kernel, run)
    run = partial(run_report, 151936, 151936, True, report())
    yield Case("151936 logits", report(), run, large=True)
