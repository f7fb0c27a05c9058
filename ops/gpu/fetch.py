"""The GPU kernel `fetch_experts`: a layer's experts that are not on the GPU, from host memory.

For prompts, whose many tokens use nearly every expert: it runs beside the layer before. The grid is
small, the link is the limit, and the tensor cores go on.

table           u64[n_expert, 4]: the layer's rows of the model's table; gate 0: not on the GPU
n_expert
host_0..2       mapped memory: the first expert's gate, up and down matrix
stride_0..2     bytes from a matrix to the next expert's
bytes_0..2      of a matrix
buffer          `FetchLayout.n_bytes` of device memory, 16-byte aligned
place_1, place_2, pitch   see `FetchLayout`
fetched         u64[n_expert, 4], written: the table's rows, or where the matrices were copied to
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ops.gpu.kernel import PIECE_BYTES, Kernel, launch_defines

PARAMS = (
    ("table", "u64"),
    ("n_expert", "u32"),
    *((f"host_{i}", "u64") for i in range(3)),
    *((f"stride_{i}", "u64") for i in range(3)),
    *((f"bytes_{i}", "u64") for i in range(3)),
    ("buffer", "u64"),
    ("place_1", "u64"),
    ("place_2", "u64"),
    ("pitch", "u64"),
    ("fetched", "u64"),
)
BLOCK = 256
GRID = 16
"""Blocks: eight saturate a gen-5 link, some more do while tensor cores share their processors."""


@dataclass(frozen=True)
class FetchLayout:
    """Where copies lie: matrix i of expert e at e * pitch + places[i] + its host address mod 16."""

    places: tuple[int, int, int]
    pitch: int

    @classmethod
    def of(cls, matrix_bytes: Sequence[int]) -> FetchLayout:
        """For experts of a gate, an up and a down matrix of so many bytes."""
        places, end = [], 0
        for n_bytes in matrix_bytes:
            places.append(end)
            end += -(-(n_bytes + PIECE_BYTES - 1) // PIECE_BYTES) * PIECE_BYTES
        return cls((places[0], places[1], places[2]), end)


def fetch_experts() -> Kernel:
    """The copy; grid (`GRID`,) or any other number of blocks."""
    return Kernel(
        entry="fetch_experts",
        source="fetch_experts.ptx",
        defines={"LAUNCH_BOUNDS": launch_defines(BLOCK, 1, False)["LAUNCH_BOUNDS"]},
        params=PARAMS,
        block=BLOCK,
        reference=fetched_reference,
    )


def fetched_reference(
    table: NDArray[np.uint64], hosts: Sequence[NDArray[np.uint64]], buffer: int, layout: FetchLayout
) -> NDArray[np.uint64]:
    """The table after the copies; hosts: the addresses u64[n_expert] of gates, ups and downs."""
    fetched = table.copy()
    absent = np.flatnonzero(table[:, 0] == 0)
    for i, addresses in enumerate(hosts):
        skew = addresses[absent] % np.uint64(PIECE_BYTES)
        place = absent.astype(np.uint64) * np.uint64(layout.pitch)
        fetched[absent, i] = place + np.uint64(buffer + layout.places[i]) + skew
    return fetched


def variants() -> Iterator[tuple[str, Kernel]]:
    """The one there is."""
    kernel = fetch_experts()
    yield kernel.entry, kernel
