"""How far the end of a growing text may be the beginning of something looked for."""

from __future__ import annotations


def overlap(text: str, wanted: str) -> int:
    """How many characters at the end of `text` are the beginning of `wanted`, not all of it."""
    for n in range(min(len(text), len(wanted) - 1), 0, -1):
        if text.endswith(wanted[:n]):
            return n
    return 0
