"""Incremental decoding: whatever the tokens, the pieces make up the whole, characters unbroken."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.text.detokenizer import Detokenizer
from runtime.text.tokenizer import Tokenizer
from tests.support.vocabulary import CONTROL, byte_level

MULTIBYTE = "a\u00e9\u6f22\U0001f600\u0301 \U0001f468\u200d\U0001f469\ufffd\U0010ffff"


def decoder_of(chunks: list[bytes]) -> Detokenizer:
    """A detokenizer for a vocabulary whose token i stands for chunks[i]."""
    return Detokenizer(lambda id: chunks[id])


def pieces_of(chunks: list[bytes]) -> list[str]:
    detokenizer = decoder_of(chunks)
    return [*(detokenizer.push(id) for id in range(len(chunks))), detokenizer.flush()]


def test_every_split_point() -> None:
    data = MULTIBYTE.encode()
    for cut in range(len(data) + 1):
        before, after, rest = pieces_of([data[:cut], data[cut:]])
        assert (before + after, rest) == (MULTIBYTE, "")
        assert MULTIBYTE.startswith(before), cut
        assert before == data[:cut].decode(errors="ignore"), cut


def test_byte_by_byte_waits_for_the_last_byte() -> None:
    assert pieces_of([bytes([byte]) for byte in "\U0001f600".encode()]) == [
        "", "", "", "\U0001f600", "",
    ]  # fmt: skip


def test_bytes_that_cannot_become_a_character_come_out_at_once() -> None:
    assert pieces_of([b"\xff", b"a"]) == ["\ufffd", "a", ""]
    assert pieces_of([b"\xf0\x9f", b"a"]) == ["", "\ufffda", ""]
    assert pieces_of([b"\xc0\x80"]) == ["\ufffd\ufffd", ""]  # overlong
    assert pieces_of([b"\xed\xa0\x80"])[0] == "\ufffd" * 3  # half a surrogate pair


def test_an_unfinished_character_is_flushed_once() -> None:
    detokenizer = decoder_of([b"\xf0\x9f"])
    assert (detokenizer.push(0), detokenizer.flush(), detokenizer.flush()) == ("", "\ufffd", "")


@settings(deadline=None)
@given(st.lists(st.binary(max_size=6), max_size=20))
def test_pieces_make_up_the_whole(chunks: list[bytes]) -> None:
    assert "".join(pieces_of(chunks)) == b"".join(chunks).decode(errors="replace")


@settings(deadline=None)
@given(st.text(max_size=30), st.data())
def test_valid_text_cut_anywhere(text: str, data: st.DataObject) -> None:
    encoded = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(encoded)), max_size=8)))
    edges = [0, *cuts, len(encoded)]
    chunks = [encoded[a:b] for a, b in itertools.pairwise(edges)]
    *pieces, rest = pieces_of(chunks)
    assert ("".join(pieces), rest) == (text, "")
    assert "\ufffd" in text or all("\ufffd" not in piece for piece in pieces)


def test_control_tokens_are_left_out_unless_asked_for() -> None:
    model = Tokenizer.from_metadata(byte_level(special=[("<x>", CONTROL)]))
    for special, expected in ((False, "\u00e9"), (True, "\ufffd<x>\ufffd")):
        detokenizer = model.detokenizer(special=special)
        text = "".join(map(detokenizer.push, [0xC3, 256, 0xA9])) + detokenizer.flush()
        assert text == expected
