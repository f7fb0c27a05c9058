"""Token by token back to text, never splitting a character."""

from __future__ import annotations

import codecs
from collections.abc import Callable


class Detokenizer:
    """Text of a growing token sequence.

    An incomplete UTF-8 sequence is held back until a later token completes it; bytes that can
    no longer become a character come out as U+FFFD at once.
    """

    def __init__(self, visible_bytes: Callable[[int], bytes]) -> None:
        self._visible_bytes = visible_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id: int) -> str:
        """The text token `id` completes; often '' for the first tokens of a character."""
        return self._decoder.decode(self._visible_bytes(id))

    def flush(self) -> str:
        """What is left at the end of the sequence: '' or a U+FFFD; ready for a new sequence."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
