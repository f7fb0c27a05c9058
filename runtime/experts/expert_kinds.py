"""ExpertKinds: who serves each expert, for steps that run and for those that have ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.experts.cache import Expert

I8 = NDArray[np.int8]
ExpertKind = tuple[Expert, int]
"""An expert and one of the kinds of `runtime.experts.totals`."""


class ExpertKinds:
    """kinds: i8[n_layers, n_expert] before the first step."""

    def __init__(self, kinds: I8) -> None:
        self.ended = kinds
        """As the last step that ended found them."""
        self._changes: deque[Sequence[ExpertKind]] = deque()  # of the steps in flight
        self._shown: I8 = np.empty((0, 0), np.int8)

    def reset(self, kinds: I8) -> None:
        """No step is in flight, and the next one finds this."""
        self.ended[:] = kinds
        self._changes.clear()
        self.show(self._shown)

    def show(self, kinds: I8) -> None:
        """Keep i8[n_layers, n_expert or more] what the last step that began finds."""
        self._shown = kinds
        if kinds.size:
            kinds[:, : self.ended.shape[1]] = self.ended

    def begin_step(self, changes: Sequence[ExpertKind]) -> None:
        """A step begins, and finds these changes."""
        self._changes.append(changes)
        if self._shown.size:
            for expert, kind in changes:
                self._shown[expert] = kind

    def end_step(self) -> I8:
        """The earliest step in flight has ended; what it found."""
        if self._changes:
            for expert, kind in self._changes.popleft():
                self.ended[expert] = kind
        return self.ended
