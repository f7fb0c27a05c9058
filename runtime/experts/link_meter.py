"""LinkMeter: how long copies of experts to a GPU take, by what events in their stream say."""

from __future__ import annotations

import time
from collections import deque

from runtime.profiling.record import Part, Span

MOST_SPANS = 4096


class LinkMeter:
    """seconds, n_bytes: of the copies that were measured and have ended.

    wanted  somebody takes spans: all copies are to be measured
    """

    def __init__(self, gpu: int) -> None:
        self.seconds, self.n_bytes, self.wanted = 0.0, 0, False
        self._track = f"link {gpu}"
        self._at = self._until = 0.0
        self._spans: deque[tuple[float, float]] = deque(maxlen=MOST_SPANS)  # begin, seconds

    def begins(self) -> None:
        """The first copy behind nothing else is about to be enqueued."""
        self._at, self._until = time.perf_counter(), 0.0

    def ended(self, seconds: float, n_bytes: int) -> None:
        """So many bytes more have arrived; seconds since the first copy began, by the GPU."""
        passed = seconds - self._until
        self._spans.append((self._at + self._until, passed))
        self.seconds += passed
        self.n_bytes += n_bytes
        self._until = seconds

    def take_spans(self) -> list[Span]:
        """Of the copies that have ended since the last call, or the last thousands of them."""
        self.wanted = True
        spans = [Span(self._track, Part.UPLOADS, *times) for times in self._spans]
        self._spans.clear()
        return spans
