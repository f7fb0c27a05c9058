"""The experts that a cache begins with: copied into their slots before the first step.

Those that are pinned travel straight from where they lie. While pinning goes on the others wait for
it, since it is quicker than the way through a buffer; where it has ended, they take that way. A
start does not wait for all of them where they may also come while the engine serves.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from math import inf

from runtime.cuda.copies import CopyBatch
from runtime.cuda.device import Device
from runtime.cuda.stream import Stream
from runtime.engine.gpu.transfer import Transfer, transfer_all
from runtime.experts.cache import Upload
from runtime.experts.host_experts import HostExperts, HostPart
from runtime.experts.pinned_pages import bytes_at

logger = logging.getLogger(__name__)

BATCH_BYTES = 256 << 20
"""Between two signs of progress."""

LOOK_SECONDS = 0.01
PATIENCE_SECONDS = 2.0
"""Without anything new that is pinned: then the buffers are quicker after all."""

START_SECONDS = 1.5
"""What a start spends on first experts that may also come later: it serves before all of a large
cache, or a file that a disk still reads, is there."""


def load_first(
    device: Device,
    host: HostExperts | HostPart,
    uploads: Sequence[Upload],
    slot_address: Callable[[int], int],
    moved: Callable[[int], object],
    seconds: float = inf,
    tell: Callable[[str], object] = logger.warning,
) -> list[Upload]:
    """Fill the slots, the first of them first; `moved` gets the bytes of each batch.  Returns what
    there was no time for.

    seconds: no batch begins later
    tell: as of `CopyBatch`
    Raises: PinningFailed, CudaError; whatever `moved` raises.
    """
    rest, began = list(uploads), time.monotonic()
    news = began
    with Stream(device, "first experts") as stream:
        batch = CopyBatch(stream, tell=tell)
        while rest:
            if time.monotonic() - began >= seconds:
                return rest
            ended = not host.is_pinning  # asked first: what is pinned then is all there will be
            pinned = host.pinned_experts
            ready = [upload for upload in rest if pinned[upload.layer, upload.expert]]
            if ready:
                several = _several(host, ready)
                _copy_pinned(stream, batch, host, several, slot_address, moved)
                there = set(several)
                rest = [upload for upload in rest if upload not in there]
                news = time.monotonic()
            elif ended or time.monotonic() - news > PATIENCE_SECONDS:
                break
            else:
                host.wait(LOOK_SECONDS)
    while rest and time.monotonic() - began < seconds:
        several = _several(host, rest)
        transfers = [
            Transfer(slot_address(upload.slot) + offset, bytes_at(address, n_bytes))
            for upload in several
            for offset, address, n_bytes in host.parts(upload.layer, upload.expert)
        ]
        if refused := transfer_all(device, transfers, moved).batches:
            tell(refused)
        rest = rest[len(several) :]
    return rest


def _several(host: HostExperts | HostPart, uploads: Sequence[Upload]) -> Sequence[Upload]:
    """As many as make `BATCH_BYTES`, one at least."""
    n_bytes = 0
    for n_before, upload in enumerate(uploads):
        if n_bytes >= BATCH_BYTES:
            return uploads[:n_before]
        n_bytes += host.layers[upload.layer].slot_bytes
    return uploads


def _copy_pinned(
    stream: Stream,
    batch: CopyBatch,
    host: HostExperts | HostPart,
    uploads: Sequence[Upload],
    slot_address: Callable[[int], int],
    moved: Callable[[int], object],
) -> None:
    copies = [
        (slot_address(upload.slot) + offset, source, n_bytes)
        for upload in uploads
        for offset, source, n_bytes in host.copies(upload.layer, upload.expert)
    ]
    batch.upload(copies)
    stream.synchronize()
    moved(sum(n_bytes for _, _, n_bytes in copies))
