"""StopStrings: cuts an answer at the first stop string, however the tokens divide it."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.text.overlap import overlap


class StopStrings:
    """Text goes in piece by piece; what can no longer become part of a stop string comes out."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """(text that is certain now, the stop string that ended the answer or "")."""
        if not self._stops:
            return text, ""
        text = self._held + text
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            at, stop = min(found, key=lambda hit: hit[0])
            self._held = ""
            return text[:at], stop
        n_held = max((overlap(text, stop) for stop in self._stops), default=0)
        cut = len(text) - n_held
        self._held = text[cut:]
        return text[:cut], ""

    def flush(self) -> str:
        """What was held back: the answer has ended without it becoming a stop string."""
        held, self._held = self._held, ""
        return held
