"""SentencePiece byte-pair encoding, `tokenizer.ggml.model` = llama: the best score merges first.

Own code, not the library's BPE: there every *pair* has a rank, here the *result* has a score, and
of equal results the leftmost wins; and a character that is no token may still merge.
"""

from __future__ import annotations

import functools
import heapq

from runtime.text.pieces import check_piece
from runtime.text.vocabulary import BYTE, CONTROL, UNKNOWN, Vocabulary

SPACE = "\u2581"
_CACHED_WORDS = 1 << 16
_CACHED_LENGTH = 32


class SpmModel:
    """Text without special tokens -> ids."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        if not vocabulary.scores:
            raise vocabulary.corrupt("scores", "is missing")
        self.adds_space = vocabulary.flag("add_space_prefix", True)
        self._ids = {
            text: id
            for id, (text, kind) in enumerate(zip(vocabulary.texts, vocabulary.kinds, strict=True))
            if not kind & (CONTROL | UNKNOWN | BYTE)
        }
        self._priority = {text: -vocabulary.scores[id] for text, id in self._ids.items()}
        # Merges only ever join neighbours that stand together inside some token, so text can be
        # cut wherever two characters never do: words become independent and worth caching.
        self._together = {text[i : i + 2] for text in self._ids for i in range(len(text) - 1)}
        self._byte_ids = [self._byte_id(byte, vocabulary) for byte in range(256)]
        self._cached_word = functools.lru_cache(_CACHED_WORDS)(self._encode_word)

    def encode(self, text: str, *, after_special: bool) -> list[int]:
        """Ids of plain text; at the start or after a special token a space goes before it.

        Raises: RequestError where too much of it is one piece.
        """
        if after_special and self.adds_space:
            text = " " + text
        ids: list[int] = []
        for word in self.cut(text.replace(" ", SPACE)):
            short = len(word) <= _CACHED_LENGTH
            ids += self._cached_word(word) if short else self._encode_word(word)
        return ids

    def cut(self, text: str) -> list[str]:
        """Pieces that cannot influence each other."""
        words = []
        start = 0
        for i in range(1, len(text)):
            if text[i - 1 : i + 1] not in self._together:
                words.append(text[start:i])
                start = i
        words.append(text[start:])
        return words

    def bytes_of(self, text: str) -> bytes:
        """What a normal token's text stands for."""
        return text.replace(SPACE, " ").encode()

    def _encode_word(self, word: str) -> tuple[int, ...]:
        check_piece(len(word))
        ids: list[int] = []
        for symbol in _merge(word, self._priority):
            id = self._ids.get(symbol)
            if id is None:
                ids += [
                    byte_id for byte in symbol.encode() if (byte_id := self._byte_ids[byte]) >= 0
                ]
            else:
                ids.append(id)
        return tuple(ids)

    def _byte_id(self, byte: int, vocabulary: Vocabulary) -> int:
        """The token of one byte: '<0xNN>', else the character, else unknown, else -1 (dropped)."""
        fallback = vocabulary.named_ids.get("unk", -1)
        id = vocabulary.ids.get(f"<0x{byte:02X}>")
        if id is None and byte < 0x80:
            id = self._ids.get(chr(byte))
        return fallback if id is None else id


def _merge(word: str, priority: dict[str, float]) -> list[str]:
    """Symbols after merging; `priority`: merged text -> lower merges earlier.  O(n log n)."""
    symbols = list(word)
    n = len(symbols)
    before, after = list(range(-1, n - 1)), [*range(1, n), -1]
    queue: list[tuple[float, int, int, int]] = []

    def offer(left: int, right: int) -> None:
        if left >= 0 and right >= 0:
            merged = symbols[left] + symbols[right]
            if merged in priority:
                heapq.heappush(queue, (priority[merged], left, right, len(merged)))

    for i in range(1, n):
        offer(i - 1, i)
    while queue:
        _, left, right, length = heapq.heappop(queue)
        stale = not symbols[left] or not symbols[right]
        if stale or len(symbols[left]) + len(symbols[right]) != length:
            continue
        symbols[left] += symbols[right]
        symbols[right] = ""
        after[left] = after[right]
        if after[right] >= 0:
            before[after[right]] = left
        offer(before[left], left)
        offer(left, after[left])
    return [symbol for symbol in symbols if symbol]
