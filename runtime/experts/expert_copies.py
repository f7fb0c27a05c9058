"""ExpertCopies: the copies that bring experts into slots, written in the cache's compiled call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ops.cpu.expert_table import EXPERT_COPIES
from ops.cpu.job import live, record
from ops.cpu.program import address_of, aligned
from runtime.cuda.copies import CopyBatch
from runtime.cuda.stream import Stream
from runtime.experts.cache import Rows
from runtime.experts.host_experts import LayerExperts

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
Bools = NDArray[np.bool_]


class ExpertCopies:
    """Of up to `most` experts of these layers at a time, n_expert of a layer at most."""

    def __init__(
        self,
        stream: Stream,
        layers: Sequence[LayerExperts],
        n_expert: int,
        most: int,
        tell: Callable[[str], object],
    ) -> None:
        """tell: as of `CopyBatch`.  Raises: CudaError."""
        self.batch = CopyBatch(stream, 3 * max(most, 1), tell)
        parts = [[(m.offset, m.host, m.stride, m.n_bytes) for m in la.matrices] for la in layers]
        self._parts = np.array(parts, np.int64).reshape(-1, 12)
        self.others: I64 = aligned(max(most, 1), np.int64)
        self._record = record(
            EXPERT_COPIES,
            parts=address_of(self._parts),
            others=address_of(self.others),
            n_expert=n_expert,
        )
        self.state = live(self._record)
        """The fields of `EXPERT_COPIES`: what the cache has written of the uploads that it started
        last."""
        self.address = address_of(self._record)
        """Of its record, for `ExpertCache.follow`."""
        self.use((), np.zeros((len(layers), n_expert), np.bool_))

    def use(self, slots: Sequence[int], undivided: Bools) -> None:
        """Uploads go to these addresses of slots from now on; undivided bool[n_layers, n_expert]:
        experts of which each matrix is one copy."""
        self.slots: U64 = np.array(slots, np.uint64)
        self._direct = np.ascontiguousarray(undivided)
        self.state.slots, self.state.direct = address_of(self.slots), address_of(self._direct)

    def ready(self, uploads: Rows) -> None:
        """Where copies and uploads are to be written next time."""
        state = self.state
        state.kept = uploads.address
        state.targets, state.sources, state.sizes = self.batch.addresses
