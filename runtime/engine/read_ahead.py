"""ReadAhead: has the kernel read a model's file while the engine opens, if it is not in memory yet.

Whoever only touches pages waits for one small read after the other. What every token needs comes
first; routed experts follow where the memory holds all of the model.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from runtime.experts.host_memory import HostMemory
from runtime.models.mapped_file import want_pages
from runtime.models.model import Model
from runtime.models.spec import MoeSpec

PIECE_BYTES = 32 << 20
"""After each piece it looks whether it is still wanted."""

Span = tuple[int, int]


@contextmanager
def read_ahead(model: Model, memory: HostMemory | None = None) -> Iterator[threading.Thread]:
    """Reads on a thread, as long as the block lasts or until all was asked for."""
    reading = (HostMemory() if memory is None else memory).read()
    spans = spans_of(model, None if reading is None else reading.room(0))
    stop = threading.Event()

    def run() -> None:
        for address, n_bytes in spans:
            for first in range(0, n_bytes, PIECE_BYTES):
                if stop.is_set():
                    return
                want_pages(address + first, min(PIECE_BYTES, n_bytes - first))

    thread = threading.Thread(target=run, name="reading ahead", daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        stop.set()
        thread.join()


def spans_of(model: Model, room: int | None) -> list[Span]:
    """(address, bytes) of the tensors to read, those that every token needs first; `room` bytes of
    memory are free, None: that is not known."""
    experts = {
        linear.weight
        for layer in model.spec.layers
        if isinstance(layer.feed_forward, MoeSpec)
        for linear in layer.feed_forward.expert_linears
    }
    rows = set(model.spec.memory_tables)
    dense = [name for name in model.weights if name not in experts | rows]
    wanted = [_spans(model, names) for names in (dense, experts)]
    fits = room is None or sum(n_bytes for part in wanted for _, n_bytes in part) <= room
    return wanted[0] + wanted[1] if fits else wanted[0]


def _spans(model: Model, names: set[str] | list[str]) -> list[Span]:
    weights = [model.weights[name] for name in names]
    return sorted((weight.address, weight.n_bytes) for weight in weights if weight.mapped)
