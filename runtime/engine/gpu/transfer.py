"""Moving a model's tensors to the GPU, as fast as the file's pages come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from threading import local
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.cuda.device import Device
from runtime.cuda.memory import PinnedBuffer
from runtime.cuda.stream import Stream

PIECE_BYTES = 16 << 20
THREADS = 4
"""Each copies a piece to pinned memory while the others' pieces travel: a copy from the file's map
itself runs at a tenth of the link's rate."""

U8 = NDArray[np.uint8]


@dataclass(frozen=True)
class Transfer:
    """Bytes that belong at `address` of the GPU's memory; `data` is u8, contiguous."""

    address: int
    data: U8


def transfer_all(
    device: Device, transfers: Sequence[Transfer], moved: Callable[[int], object] = int
) -> None:
    """Carry out all of them.  `moved` gets the bytes of each piece, on the caller's thread.

    Raises: PinningFailed, CudaError; whatever `moved` raises.
    """
    pieces = [piece for transfer in transfers for piece in _pieces(transfer)]
    if not pieces:
        return
    largest = max(len(piece.data) for piece in pieces)
    with ExitStack() as resources:
        ours = local()

        def carry(piece: Transfer) -> int:
            if not hasattr(ours, "stage"):
                ours.stage = resources.enter_context(PinnedBuffer(device, largest, "staging"))
                ours.stream = resources.enter_context(Stream(device, "loading"))
            stage: PinnedBuffer = ours.stage
            stage.view[: len(piece.data)] = piece.data
            ours.stream.upload(piece.address, stage.host, len(piece.data))
            ours.stream.synchronize()
            return len(piece.data)

        threads = ThreadPoolExecutor(min(THREADS, len(pieces)), thread_name_prefix="loading")
        with threads:
            try:
                for n_bytes in threads.map(carry, pieces):
                    moved(n_bytes)
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise


def flat(array: NDArray[Any]) -> U8:
    """The array's bytes, not copied where it has no gaps."""
    bytes_: U8 = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return bytes_


def _pieces(transfer: Transfer) -> list[Transfer]:
    edges = [*range(0, len(transfer.data), PIECE_BYTES), len(transfer.data)]
    return [Transfer(transfer.address + a, transfer.data[a:b]) for a, b in pairwise(edges)]
