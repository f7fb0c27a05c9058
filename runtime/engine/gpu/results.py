"""Results: what a step gives to the host, in pinned memory that the GPU writes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ops.gpu.sampling import MAX_K
from ops.gpu.step_io import RING
from runtime.cuda.device import Device
from runtime.cuda.memory import PinnedBuffer
from runtime.engine.gpu.step_shape import MAX_OUTPUTS
from runtime.engine.step import Chosen

LINE = 64
"""Parts begin on cache lines of their own."""

FLAGS_AT = 4 * MAX_OUTPUTS
CANDIDATES_BYTES = 4 * MAX_K * MAX_OUTPUTS
CANDIDATES_AT = (2 * FLAGS_AT, 2 * FLAGS_AT + CANDIDATES_BYTES)
CHOSEN_BYTES = CANDIDATES_AT[1] + CANDIDATES_BYTES
"""What is chosen for the outputs of a step: i32 tokens[MAX_OUTPUTS], u32 flags[MAX_OUTPUTS] (the
step's number where logits are not finite), i32 ids and f32 values[MAX_OUTPUTS, MAX_K]."""


class Results:
    """See `ops.gpu.step_io` for who writes what.

    logits   f32[n_outputs, stride]
    choices  i32[RING, n_choices]: of each control block, the experts of the step, in the
             executor's order
    done     u32[1]: number of the last step that ended
    chosen   `CHOSEN_BYTES` for each control block: a step may end before the host has read what
             the one before it gave
    """

    def __init__(self, device: Device, n_outputs: int, stride: int, n_choices: int) -> None:
        """Raises: PinningFailed, DeviceLost."""
        self.choices_stride = -(-4 * n_choices // LINE) * LINE
        ring = (RING * self.choices_stride, RING * CHOSEN_BYTES)
        sizes = (LINE, 4 * n_outputs, 4 * n_outputs * stride, *ring)
        starts = np.cumsum([0, *(-(-n // LINE) * LINE for n in sizes)])
        self._buffer = PinnedBuffer(device, int(starts[-1]), "results")
        parts = [
            self._buffer.view[start : start + n] for start, n in zip(starts, sizes, strict=False)
        ]
        address = self._buffer.address
        addresses = [address + int(start) for start in starts]
        self.done_address, self.flags_address, self.logits_address = addresses[:3]
        self.choices_address, self.chosen_address = addresses[3:5]
        self.done = parts[0][:4].view(np.uint32)
        self._flags = parts[1].view(np.uint32)
        self.logits = parts[2].view(np.float32).reshape(n_outputs, stride)
        self.choices = parts[3].view(np.int32).reshape(RING, -1)
        self._chosen = [_ChosenPlace(place) for place in parts[4].reshape(RING, CHOSEN_BYTES)]

    def shift_on(self, device: Device) -> int:
        """What another GPU's kernels have to add to the addresses."""
        return self._buffer.address_on(device) - self._buffer.address

    @property
    def done_host(self) -> int:
        """Address of `done` for the CPU."""
        return self.done.ctypes.data

    @property
    def chosen_host(self) -> int:
        """Address of the first of the steps' `CHOSEN_BYTES` for the CPU."""
        return self._chosen[0].tokens.ctypes.data

    def not_finite(self, epoch: int, n_outputs: int) -> list[int]:
        """Outputs of step `epoch` whose logits are not finite."""
        marked = self._flags[:n_outputs] == epoch
        return np.flatnonzero(marked).tolist() if marked.any() else []

    def chosen(self, epoch: int, n_outputs: int, *, alone: bool) -> tuple[Chosen, tuple[int, ...]]:
        """What step `epoch` chose, and its outputs whose logits are not finite.

        alone: there are no candidates but the tokens
        """
        place = self._chosen[epoch % RING]
        tokens = place.tokens[:n_outputs].tolist()
        flags = place.flags[:n_outputs].tolist()
        wrong = () if epoch not in flags else tuple(np.flatnonzero(np.equal(flags, epoch)).tolist())
        if alone:
            return Chosen(tokens), wrong
        return Chosen(tokens, place.ids[:n_outputs], place.values[:n_outputs]), wrong

    def close(self) -> None:
        self._buffer.close()


class _ChosenPlace:
    """Views of what one step chose."""

    def __init__(self, place: NDArray[np.uint8]) -> None:
        ids, values = CANDIDATES_AT
        self.tokens = place[:FLAGS_AT].view(np.int32)
        self.flags = place[FLAGS_AT:ids].view(np.uint32)
        self.ids = place[ids:values].view(np.int32).reshape(-1, MAX_K)
        self.values = place[values:].view(np.float32).reshape(-1, MAX_K)
