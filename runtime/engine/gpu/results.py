"""Results: what a step gives to the host, in pinned memory that the GPU writes."""

from __future__ import annotations

import numpy as np

from runtime.cuda.device import Device
from runtime.cuda.memory import PinnedBuffer

LINE = 64
"""Parts begin on cache lines of their own."""


class Results:
    """See `ops.gpu.step_io` for who writes what.

    logits   f32[n_outputs, stride]
    choices  i32[n_choices]: the experts of the step, in the executor's order
    done     u32[1]: number of the last step that ended
    """

    def __init__(self, device: Device, n_outputs: int, stride: int, n_choices: int) -> None:
        """Raises: PinningFailed, DeviceLost."""
        sizes = (LINE, 4 * n_outputs, 4 * n_outputs * stride, 4 * n_choices)
        starts = np.cumsum([0, *(-(-n // LINE) * LINE for n in sizes)])
        self._buffer = PinnedBuffer(device, int(starts[-1]), "results")
        parts = [
            self._buffer.view[start : start + n] for start, n in zip(starts, sizes, strict=False)
        ]
        address = self._buffer.address
        self.done_address, self.flags_address, self.logits_address, self.choices_address = (
            address + int(start) for start in starts[:4]
        )
        self.done = parts[0][:4].view(np.uint32)
        self._flags = parts[1].view(np.uint32)
        self.logits = parts[2].view(np.float32).reshape(n_outputs, stride)
        self.choices = parts[3].view(np.int32)

    @property
    def done_host(self) -> int:
        """Address of `done` for the CPU."""
        return self.done.ctypes.data

    def not_finite(self, epoch: int, n_outputs: int) -> list[int]:
        """Outputs of step `epoch` whose logits are not finite."""
        marked = self._flags[:n_outputs] == epoch
        return np.flatnonzero(marked).tolist() if marked.any() else []

    def close(self) -> None:
        self._buffer.close()
