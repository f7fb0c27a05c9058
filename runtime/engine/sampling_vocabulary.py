"""SamplingVocabulary: what sampling needs to know of a model's tokens, one for an engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from runtime.errors import RequestError, TokenizerUnavailable

MAX_BREAKER_BYTES = 40
MAX_TAIL_TOKENS = 20

Breakers = dict[int, tuple[tuple[int, ...], ...]]


class TokenizerLike(Protocol):
    """The part of a tokenizer that sampling uses."""

    @property
    def n_vocab(self) -> int: ...

    @property
    def end_ids(self) -> Iterable[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def encode(self, text: str, *, add_special: bool) -> Sequence[int]: ...


class SamplingVocabulary:
    """n_vocab, the end tokens, and texts as tokens.  Without a tokenizer only token ids work."""

    def __init__(self, n_vocab: int, tokenizer: TokenizerLike | None = None) -> None:
        self.n_vocab = n_vocab
        self._tokenizer = tokenizer
        self._pieces: list[bytes] | None = None
        self._breakers: dict[str, Breakers] = {}

    @property
    def end_ids(self) -> tuple[int, ...]:
        return () if self._tokenizer is None else tuple(self._tokenizer.end_ids)

    def tokens_of(self, field: str, text: str) -> Sequence[int]:
        """Raises: TokenizerUnavailable naming `field` where the model has no tokenizer."""
        if self._tokenizer is None:
            raise TokenizerUnavailable(
                f"{field}: this model has no tokenizer: use token ids instead of text"
            )
        return self._tokenizer.encode(text, add_special=False)

    def breakers(self, texts: Sequence[str]) -> Breakers:
        """DRY's breakers as tokens: head -> tails; () where the head alone holds the whole text.

        Looks through the vocabulary once per text (tens of milliseconds for 150,000 tokens) and
        remembers the answer.  Raises: RequestError where there is no tokenizer.
        """
        joined: dict[int, dict[tuple[int, ...], None]] = {}
        for text in texts:
            if text not in self._breakers:
                self._breakers[text] = self._find(text)
            for head, tails in self._breakers[text].items():
                joined.setdefault(head, {}).update(dict.fromkeys(tails))
        return {head: tuple(tails) for head, tails in joined.items()}

    def _find(self, text: str) -> Breakers:
        wanted = text.encode()[:MAX_BREAKER_BYTES]
        pieces = self._all_pieces()
        found: Breakers = {i: ((),) for i, piece in enumerate(pieces) if wanted in piece}
        for length in range(1, len(wanted)):
            heads = [i for i, piece in enumerate(pieces) if piece.endswith(wanted[:length])]
            rest = wanted[length:].decode(errors="replace")
            tail = tuple(self.tokens_of("dry_sequence_breakers", rest)[:MAX_TAIL_TOKENS])
            for head in heads:
                if tail and () not in found.get(head, ()):
                    found[head] = (*found.get(head, ()), tail)
        return found

    def _all_pieces(self) -> list[bytes]:
        if self._tokenizer is None:
            raise RequestError(
                "dry_sequence_breakers", "this model has no tokenizer: use an empty list"
            )
        if self._pieces is None:
            # A padded output layer has more rows than the tokenizer has tokens.
            n_known = min(self.n_vocab, self._tokenizer.n_vocab)
            self._pieces = [self._tokenizer.token_bytes(i) for i in range(n_known)]
        return self._pieces
