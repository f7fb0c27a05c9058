"""PageReader: asks for all pages of an expert that a step has missed, where they may be on a disk.

The team's workers touch one page after the other, and every touch of a page that is on a disk is a
small read of its own. A thread that looks at what the GPU posts asks for the whole expert at once.
It only gives hints: what it reads may be overwritten meanwhile, and no result depends on it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from ops.exchange import MISSES, N_MISSES, POSTED
from runtime.experts.host_experts import LayerExperts
from runtime.experts.host_memory import HostMemory
from runtime.models.mapped_file import want_pages

LOOK_SECONDS = 5e-5
IDLE_LOOK_SECONDS = 2e-3
IDLE_AFTER_SECONDS = 0.05
"""Without a post: between steps it looks less often."""

U8 = NDArray[np.uint8]


@contextmanager
def page_reader(
    exchange: U8, layers: Sequence[LayerExperts], memory: HostMemory | None = None
) -> Iterator[threading.Thread | None]:
    """Reads until the block ends; None: not needed, the memory holds all experts.

    exchange  memory as in `ops.exchange`; it outlives the block
    layers    the MoE layers that post
    """
    reading = (HostMemory() if memory is None else memory).read()
    if reading is None or _n_bytes(layers) <= reading.room(0):
        yield None
        return
    stop = threading.Event()
    thread = threading.Thread(
        target=_run, args=(exchange, layers, stop), name="expert pages", daemon=True
    )
    thread.start()
    try:
        yield thread
    finally:
        stop.set()
        thread.join()


def _run(exchange: U8, layers: Sequence[LayerExperts], stop: threading.Event) -> None:
    posted = exchange[POSTED:][:4].view(np.uint32)
    last, news = int(posted[0]), time.monotonic()
    while not stop.is_set():
        now = int(posted[0])
        if now == last:
            idle = time.monotonic() - news > IDLE_AFTER_SECONDS
            time.sleep(IDLE_LOOK_SECONDS if idle else LOOK_SECONDS)
            continue
        last, news = now, time.monotonic()
        layer = layers[(now - 1) % len(layers)]
        for expert in missed(exchange, layer.n_expert):
            for matrix in layer.matrices:
                want_pages(matrix.host + expert * matrix.stride, matrix.n_bytes)


def missed(exchange: U8, n_expert: int) -> list[int]:
    """The experts of the post, each once."""
    n_slots = int(exchange[N_MISSES:][:4].view(np.uint32)[0])
    words = exchange[MISSES : MISSES + 4 * n_slots]
    experts = np.unique(words[: len(words) // 4 * 4].view(np.uint32) >> 16)
    return [int(expert) for expert in experts if expert < n_expert]


def _n_bytes(layers: Sequence[LayerExperts]) -> int:
    return sum(layer.n_expert * sum(m.n_bytes for m in layer.matrices) for layer in layers)
