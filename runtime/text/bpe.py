"""Byte-level byte-pair encoding, `tokenizer.ggml.model` = gpt2, on the `tokenizers` library."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers

from runtime.errors import CorruptModel, RequestError
from runtime.text.pieces import check_piece
from runtime.text.pretokenizers import PreTokenizer
from runtime.text.vocabulary import Vocabulary

_LONG_TEXT = 2048  # characters; about half a millisecond
PART = 1 << 17  # characters for the library at once: it takes 200 to 400 bytes for each
_PART_END = re.compile(r"[A-Za-z0-9](?=\r?\n)")  # a piece of every family ends here


class BpeModel:
    """Text without special tokens -> ids."""

    adds_space = False

    def __init__(self, vocabulary: Vocabulary, cuts: PreTokenizer) -> None:
        model = _model(vocabulary, ignore_merges=cuts.ignore_merges)
        self._pipeline = tokenizers.Tokenizer(model)
        self._cutter = _cutter(cuts)
        self._pipeline.pre_tokenizer = pre_tokenizers.Sequence(
            [self._cutter, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )

    def encode(self, text: str, *, after_special: bool) -> list[int]:
        """Ids of plain text; `after_special` does not matter to this model.

        Raises: RequestError where too much of it is one piece.
        """
        if len(text) < _LONG_TEXT:
            return self._ids(text)
        return [token for part in parts(text) for token in self._ids(part)]

    def _ids(self, text: str) -> list[int]:
        ids: list[int]
        try:
            if len(text) < _LONG_TEXT:
                ids = self._pipeline.encode(text, add_special_tokens=False).ids
            else:
                # Only the library's batches let other Python threads run meanwhile.
                (batch,) = self._pipeline.encode_batch_fast([text], add_special_tokens=False)
                ids = batch.ids
        except BaseException as error:
            # Its panics are no Exceptions: left alone they would end tasks without a word.
            if type(error).__name__ != "PanicException":
                raise
            raise RequestError("prompt", f"cannot be tokenized: {error}") from error
        return ids

    def cut(self, text: str) -> list[str]:
        """The pieces merges stay inside of."""
        return [piece for piece, _ in self._cutter.pre_tokenize_str(text)]

    def bytes_of(self, text: str) -> bytes:
        """What a normal token's text stands for; characters outside the alphabet are themselves."""
        try:
            return bytes([_BYTE_OF_CHARACTER[character] for character in text])
        except KeyError:
            parts = [_BYTE_OF_CHARACTER.get(character, character) for character in text]
            return b"".join(
                part.encode() if isinstance(part, str) else bytes([part]) for part in parts
            )


def parts(text: str) -> Iterator[str]:
    """`text` cut where pieces end in any case, into parts of little more than `PART` characters.

    Raises: RequestError where no such place comes for too long.
    """
    start = 0
    while len(text) - start > PART:
        found = _PART_END.search(text, start + PART)
        end = found.end() if found else len(text)
        check_piece(end - start)
        yield text[start:end]
        start = end
    yield text[start:]


def _cutter(cuts: PreTokenizer) -> pre_tokenizers.Sequence:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
            for pattern in cuts.patterns
        ]
    )


def _model(vocabulary: Vocabulary, *, ignore_merges: bool) -> models.BPE:
    """The library's model.

    Raises: CorruptModel for a merge that is not two tokens or does not make one.
    """
    known = dict.fromkeys(vocabulary.strings("merges"))  # of a repeated one the first counts
    merges = list(known)
    ids = vocabulary.ids.copy()
    for special in vocabulary.specials:
        # With ignore_merges a piece that spells a control token would become one.
        if not special.plain and len(special.text) > 1 and not _is_merged(special.text, known):
            del ids[special.text]
    # A space inside a token is written as another character, so the first one separates.
    pairs: list[Any] = [tuple(merge.split(" ", 1)) for merge in merges]
    try:
        return models.BPE(ids, pairs, ignore_merges=ignore_merges)
    except Exception as error:  # the library has no type of its own for what it refuses
        raise _bad_merges(vocabulary, merges, ids) from error


def _is_merged(text: str, merges: Container[str]) -> bool:
    """Whether one of the merges makes it."""
    return any(f"{text[:n]} {text[n:]}" in merges for n in range(1, len(text)))


def _bad_merges(vocabulary: Vocabulary, merges: list[str], ids: Mapping[str, int]) -> CorruptModel:
    """The first one of them that the library cannot take."""
    for rank, merge in enumerate(merges):
        left, _, right = merge.partition(" ")
        if left not in ids or right not in ids or left + right not in ids:
            return _bad_merge(vocabulary, rank, merge)
    return vocabulary.corrupt("merges", "cannot be used")


def _bad_merge(vocabulary: Vocabulary, rank: int, merge: str) -> CorruptModel:
    left, space, right = merge.partition(" ")
    if not space or not left or not right:
        return vocabulary.corrupt("merges", f"merge {rank} is not 'left right'")
    wanted = (left, right, left + right)
    missing = next((text for text in wanted if text not in vocabulary.ids), None)
    if missing is None:
        return vocabulary.corrupt("merges", f"merge {rank} is of control tokens")
    return vocabulary.corrupt(
        "merges", f"merge {rank} needs the token {missing[:40]!r}, which does not exist"
    )


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte: printable Latin-1 stands for itself, the rest for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {chr(byte): byte for byte in printable}
    return characters | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_alphabet()
