"""LostSteps: the steps in which a GPU waited in vain, by the words in which it says so."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ops.exchange import failed_number

NUMBERS = 0xFFFFFFFF


class LostSteps:
    """words  u32[4] that the GPU writes: `FAILED` of `ops.exchange` or of `ops.gpu.handover`."""

    def __init__(self, words: NDArray[np.uint32]) -> None:
        self._words = words.reshape(2, 2)
        self._last: tuple[int, int] | None = None  # that was told, and what it waited for

    def take(self, epoch: int, *, behind: bool) -> int | None:
        """What step `epoch`, which has ended, was lost for: the second of the words, which then
        count no more; None if it was not lost.

        behind: it was launched behind the one before, so it is lost where that one was
        """
        place = self._words[epoch % 2]
        if int(place[0]) == failed_number(epoch):
            self._last = epoch, int(place[1])
            place[0] = 0
        elif behind and self._last is not None and self._last[0] == (epoch - 1) & NUMBERS:
            self._last = epoch, self._last[1]
        else:
            return None
        return self._last[1]
