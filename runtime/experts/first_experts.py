"""The experts that a cache begins with: copied into their slots before the first step.

Those that are pinned travel straight from where they lie. While pinning goes on the others wait for
it, since it is quicker than the way through a buffer; where it has ended, they take that way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from runtime.cuda.device import Device
from runtime.cuda.stream import Stream
from runtime.engine.gpu.transfer import Transfer, transfer_all
from runtime.experts.cache import Upload
from runtime.experts.host_experts import HostExperts, HostPart
from runtime.experts.pinned_pages import bytes_at

BATCH_BYTES = 256 << 20
"""Between two signs of progress."""

LOOK_SECONDS = 0.01
PATIENCE_SECONDS = 2.0
"""Without anything new that is pinned: then the buffers are quicker after all."""


def load_first(
    device: Device,
    host: HostExperts | HostPart,
    uploads: Sequence[Upload],
    slot_address: Callable[[int], int],
    moved: Callable[[int], object],
) -> None:
    """Fill the slots.  `moved` gets the bytes of each batch.

    Raises: PinningFailed, CudaError; whatever `moved` raises.
    """
    with Stream(device, "first experts") as stream:
        rest, news = list(uploads), time.monotonic()
        while rest:
            ended = not host.is_pinning  # asked first: what is pinned then is all there will be
            pinned = host.pinned_experts
            ready = [upload for upload in rest if pinned[upload.layer, upload.expert]]
            rest = [upload for upload in rest if not pinned[upload.layer, upload.expert]]
            if ready:
                _copy_pinned(stream, host, ready, slot_address, moved)
                news = time.monotonic()
            elif ended or time.monotonic() - news > PATIENCE_SECONDS:
                break
            else:
                host.wait(LOOK_SECONDS)
    transfers = [
        Transfer(slot_address(upload.slot) + offset, bytes_at(address, n_bytes))
        for upload in rest
        for offset, address, n_bytes in host.parts(upload.layer, upload.expert)
    ]
    transfer_all(device, transfers, moved)


def _copy_pinned(
    stream: Stream,
    host: HostExperts | HostPart,
    uploads: Sequence[Upload],
    slot_address: Callable[[int], int],
    moved: Callable[[int], object],
) -> None:
    on_the_way = 0
    for upload in uploads:
        target = slot_address(upload.slot)
        for offset, source, n_bytes in host.copies(upload.layer, upload.expert):
            stream.upload(target + offset, source, n_bytes)
            on_the_way += n_bytes
        if on_the_way >= BATCH_BYTES or upload is uploads[-1]:
            stream.synchronize()
            done, on_the_way = on_the_way, 0
            moved(done)
