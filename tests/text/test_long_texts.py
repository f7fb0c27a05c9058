"""Texts of many megabytes: the parts have the ids of the whole, and one piece has an end."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

import runtime
from runtime.config import BUNDLED_MODEL
from runtime.errors import RequestError
from runtime.text import bpe, pieces
from runtime.text.pretokenizers import PRE_TOKENIZERS
from runtime.text.tokenizer import Tokenizer
from tests.support.vocabulary import byte_level, sentence_piece

ALPHABET = (
    "a", "B", "z", "7", "07", " ", "  ", "\n", "\n\n", "\r\n", "\r", "\t", ".", "!/", "'s", "'",
    "é", "漢", "ー", "\u0301", "(", "_", "\u00a0",
)  # fmt: skip


def random_text(seed: int, n: int) -> str:
    return "".join(random.Random(seed).choices(ALPHABET, k=n))


@pytest.fixture(scope="module")
def bundled() -> Tokenizer:
    return runtime.load_tokenizer(BUNDLED_MODEL)


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_family_ends_a_piece_where_parts_end(pre: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bpe, "PART", 5)
    model = Tokenizer.from_metadata(byte_level((), pre=pre))
    for seed in range(20):
        text = random_text(seed, 400)
        cut = list(bpe.parts(text))
        assert len(cut) > 4
        assert "".join(cut) == text
        assert [piece for part in cut for piece in model.cut(part)] == model.cut(text)
        for part, _ in pairwise(cut):
            assert len(part) >= 5


def test_parts_have_the_ids_of_the_whole(
    bundled: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = random_text(1, 20_000) + "The end\nof it.\n" * 3000
    ids = bundled.encode(text)
    monkeypatch.setattr(bpe, "PART", 1 << 30)
    assert bundled.encode(text) == ids
    assert bundled.decode(ids) == text


@pytest.mark.parametrize(
    "metadata", [byte_level(("a a",)), sentence_piece([("a", -1.0), ("aa", -2.0), (" ", -3.0)])]
)
def test_a_piece_without_an_end_is_refused(
    metadata: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bpe, "PART", 3000)
    monkeypatch.setattr(pieces, "MAX_PIECE", 6000)
    model = Tokenizer.from_metadata(metadata)
    assert len(model.encode("a" * 4990)) >= 2495
    with pytest.raises(RequestError, match=r"7000 characters.*at most 6000"):
        model.encode("a" * 7000)
    assert model.encode(("a" * 2900 + "\n") * 4)


def test_a_panic_of_the_library_is_a_request_error(bundled: Tokenizer) -> None:
    """Of ten million spaces its regular expressions give up, with what is no Exception."""
    with pytest.raises(RequestError, match="retry-limit"):
        bundled._model._ids(" " * 12_000_000)
