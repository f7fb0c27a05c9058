"""Text to ids: the same as llama.cpp where a vocabulary exists, the documented rules elsewhere."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import runtime
from runtime.config import BUNDLED_MODEL
from runtime.errors import CorruptModel, RequestError, TokenizerUnavailable
from runtime.text.pretokenizers import PRE_TOKENIZERS
from runtime.text.tokenizer import Tokenizer
from tests.support.gguf_writer import write_gguf
from tests.support.vocabulary import (
    CONTROL,
    NORMAL,
    USER_DEFINED,
    byte_characters,
    byte_level,
    sentence_piece,
)

DATA = Path(__file__).parents[1] / "data" / "tokenizer"
BUNDLED_CASES = json.loads((DATA / "bundled.json").read_text())
SPLITS = json.loads((DATA / "splits.json").read_text())
VOCAB_FILES = os.environ.get("HOTEXPERT_VOCAB_FILES")
OTHER_KINDS = ("bert", "gemma", "nomic")
N_PUBLIC_FILES = 13  # llama.cpp b11434: those with .inp and .out, without the other kinds

HELLO = ("H e", "l l", "He ll", "Hell o")


@pytest.fixture(scope="module")
def bundled() -> Tokenizer:
    return runtime.load_tokenizer(BUNDLED_MODEL)


def tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_metadata(metadata, source="test.gguf")


class TestSameIdsAsLlamaCpp:
    """Expected ids were written by llama.cpp (b11434)."""

    @pytest.mark.parametrize("case", BUNDLED_CASES, ids=lambda case: ascii(case["text"])[:30])
    def test_bundled_vocabulary(self, bundled: Tokenizer, case: dict[str, Any]) -> None:
        text = case["text"]
        assert bundled.encode(text) == case["plain"]
        assert bundled.encode(text, parse_special=True) == case["special"]
        assert bundled.decode(case["special"], special=True) == text

    @pytest.mark.parametrize("names", SPLITS["splits"])
    def test_pre_tokenizer_cuts(self, names: str) -> None:
        for name in names.split():
            cutter = tokenizer(byte_level(pre=name))
            cuts = {text: cutter.cut(text) for text in SPLITS["texts"]}
            assert cuts == dict(zip(SPLITS["texts"], SPLITS["splits"][names], strict=True)), name

    def test_every_pre_tokenizer_has_expectations(self) -> None:
        expected = {name for names in SPLITS["splits"] for name in names.split()}
        assert expected == set(PRE_TOKENIZERS)

    @pytest.mark.skipif(
        VOCAB_FILES is None, reason="HOTEXPERT_VOCAB_FILES names no folder of ggml-vocab-*.gguf"
    )
    def test_public_vocabulary_files(self) -> None:
        n_files = 0
        for path in sorted(Path(VOCAB_FILES or "").glob("ggml-vocab-*.gguf")):
            texts, ids = path.with_name(path.name + ".inp"), path.with_name(path.name + ".out")
            if not texts.exists() or any(kind in path.name for kind in OTHER_KINDS):
                continue
            n_files += 1
            model = runtime.load_tokenizer(path)
            cases = texts.read_bytes().decode().split("\n__ggml_vocab_test__\n")
            assert cases.pop() == "", f"{path.name}.inp does not end with a separator"
            for text, line in zip(cases, ids.read_text().splitlines(), strict=True):
                assert model.encode(text, add_special=False) == [*map(int, line.split())], (
                    f"{path.name}: {text!r}"
                )
        assert n_files == N_PUBLIC_FILES, f"{VOCAB_FILES} has another set of vocabularies"


class TestByteLevel:
    def test_lowest_rank_merges_first_and_cuts_hold(self) -> None:
        model = tokenizer(byte_level(HELLO))
        assert [model.piece(id) for id in model.encode("Hello Hel")] == [
            "Hello", " ", "He", "l",
        ]  # fmt: skip

    def test_of_repeated_merges_the_first_counts(self) -> None:
        metadata = byte_level(("a b", "b c"))
        metadata["tokenizer.ggml.merges"] = ["a b", "b c", "a b"]
        model = tokenizer(metadata)
        assert [model.piece(id) for id in model.encode("abc")] == ["ab", "c"]

    def test_ignore_merges_takes_a_whole_piece(self) -> None:
        rows = {"llama-bpe": ["abc"], "dbrx": ["ab", "c"]}
        for pre, expected in rows.items():
            metadata = byte_level(("a b",), special=[("abc", NORMAL)], pre=pre, bos_token_id=0)
            model = tokenizer(metadata)
            pieces = [model.piece(id) for id in model.encode("abc", add_special=False)]
            assert pieces == expected, pre

    def test_a_piece_that_spells_a_control_token_stays_text(self) -> None:
        model = tokenizer(byte_level(special=[("abc", CONTROL)], pre="glm4"))
        assert model.encode("abc") == [97, 98, 99]
        assert model.encode("abc", parse_special=True) == [256]

    def test_bos_and_eos_only_where_the_model_wants_them(self) -> None:
        special = [("<s>", CONTROL), ("</s>", CONTROL)]
        ids = {"bos_token_id": 256, "eos_token_id": 257}
        plain = tokenizer(byte_level(special=special, **ids))
        both = tokenizer(byte_level(special=special, **ids, add_bos_token=True, add_eos_token=True))
        by_name = tokenizer(byte_level(special=special, pre="llama-bpe", **ids))
        assert plain.encode("a") == [97]
        assert both.encode("a") == [256, 97, 257]
        assert both.encode("a", add_special=False) == [97]
        assert by_name.encode("a") == [256, 97]

    def test_a_template_that_writes_bos_gets_no_second(self) -> None:
        metadata = byte_level(special=[("<s>", CONTROL)], bos_token_id=256, add_bos_token=True)
        model = tokenizer(metadata)
        assert model.encode("<s>a", parse_special=True) == [256, 256, 97]
        assert model.encode("<s>a", parse_special=True, guard="\ufdd0") == [256, 97]
        assert model.encode("a", parse_special=True, guard="\ufdd0") == [256, 97]

    def test_guard_keeps_control_text_as_text(self) -> None:
        model = tokenizer(byte_level(special=[("<x>", CONTROL)]))
        assert model.encode("<\ufdd0x><x>", parse_special=True, guard="\ufdd0") == [
            *b"<x>", 256,
        ]  # fmt: skip


class TestSpecialTokens:
    special = (("<a>", CONTROL), ("<a><b>", CONTROL), ("<u>", USER_DEFINED))

    def test_longest_first_and_user_defined_always(self) -> None:
        model = tokenizer(byte_level(special=self.special))
        assert model.encode("<a><b><u>", parse_special=True) == [257, 258]
        assert model.encode("<u><a>") == [258, *b"<a>"]

    def test_control_tokens_are_left_out_of_text_user_defined_are_not(self) -> None:
        model = tokenizer(byte_level(special=self.special))
        assert model.decode([256, 104, 258]) == "h<u>"
        assert model.decode([256, 104, 258], special=True) == "<a>h<u>"

    def test_phi3_swallows_space_after_special_tokens(self) -> None:
        special = [("<|user|>", CONTROL)]
        metadata = byte_level(special=special)
        swallowing = tokenizer(metadata | {"general.name": "Phi-3 mini"})
        assert swallowing.encode("<|user|> \n a", parse_special=True) == [256, 97]
        assert tokenizer(metadata).encode("<|user|> a", parse_special=True) == [256, 32, 97]

    def test_end_by_key_and_by_text(self) -> None:
        special = [(text, CONTROL) for text in ("<e>", "<t>", "<m>", "<|im_end|>", "<|fim_pad|>")]
        keys = {"eos_token_id": 256, "eot_token_id": 257, "eom_token_id": 258}
        model = tokenizer(byte_level(special=[*special, ("<other>", CONTROL)], **keys))
        assert model.end_ids == {256, 257, 258, 259, 260}
        assert model.is_end(259) and not model.is_end(261)
        assert model.eos_id == 256 and model.bos_id is None

    def test_harmony_end_of_message_is_no_end(self) -> None:
        texts = ("<|end|>", "<|return|>", "<|call|>", "<|channel|>")
        model = tokenizer(byte_level(special=[(text, CONTROL) for text in texts]))
        assert model.end_ids == {257, 258}
        assert model.decode([259, 256]) == "<|channel|><|end|>"
        assert set(texts) <= model.vocabulary.controls

    def test_an_end_found_by_text_becomes_a_control_token(self) -> None:
        model = tokenizer(byte_level(special=[("<|im_end|>", USER_DEFINED)]))
        assert model.encode("<|im_end|>") == [*b"<|im_end|>"]
        assert model.decode([256]) == ""


class TestSentencePiece:
    pieces = (("\u2581", -9.0), ("a", -8.0), ("b", -8.0), ("ab", -2.0), ("\u2581a", -1.0))

    def test_best_score_merges_first_and_a_space_goes_before(self) -> None:
        model = tokenizer(sentence_piece(self.pieces))
        assert [model.piece(id) for id in model.encode("ab")] == ["<s>", " a", "b"]

    def test_no_space_prefix(self) -> None:
        model = tokenizer(sentence_piece(self.pieces, add_space_prefix=False))
        assert [model.piece(id) for id in model.encode("ab", False)] == ["ab"]

    def test_leftmost_of_equal_scores(self) -> None:
        model = tokenizer(sentence_piece((("a", -1.0), ("aa", -1.0)), add_space_prefix=False))
        assert [model.piece(id) for id in model.encode("aaa", False)] == ["aa", "a"]

    def test_space_again_after_a_special_token(self) -> None:
        model = tokenizer(sentence_piece(self.pieces, special=["<x>"]))
        pieces = [model.piece(id) for id in model.encode("a<x>a", parse_special=True)]
        assert pieces == ["<s>", " a", "<x>", " a"]

    def test_unknown_characters_become_bytes(self) -> None:
        model = tokenizer(sentence_piece(self.pieces))
        ids = model.encode("\u00e9", add_special=False)
        assert ids == [model.vocabulary.ids["\u2581"], 3 + 0xC3, 3 + 0xA9]
        assert model.decode(ids) == "\u00e9"

    def test_characters_that_are_no_tokens_still_merge(self) -> None:
        model = tokenizer(sentence_piece((("xy", -1.0),), add_space_prefix=False))
        assert [model.piece(id) for id in model.encode("xy", False)] == ["xy"]

    def test_text_never_merges_into_a_control_token(self) -> None:
        model = tokenizer(sentence_piece((("<", -1.0), ("s>", -1.0)), add_space_prefix=False))
        assert 1 not in model.encode("<s>", add_special=False)

    def test_empty_text_is_bos_only(self) -> None:
        model = tokenizer(sentence_piece(self.pieces))
        assert model.encode("") == [1] and model.encode("", add_special=False) == []


class TestRoundTrip:
    @settings(deadline=None)
    @given(st.text(max_size=60))
    def test_byte_level(self, text: str) -> None:
        model = tokenizer_of_bytes()
        assert model.decode(model.encode(text)) == text

    @settings(deadline=None)
    @given(st.text(max_size=60))
    def test_sentence_piece(self, text: str) -> None:
        model = tokenizer_of_pieces()
        # A space and the character that stands for it are one to this kind of model.
        assert model.decode(model.encode(text)) == text.replace("\u2581", " ")

    def test_half_a_surrogate_pair_is_replaced_and_a_pair_joined(self) -> None:
        model = tokenizer_of_bytes()
        assert model.decode(model.encode("a\ud83d")) == "a\ufffd"
        assert model.decode(model.encode("\ud83d\ude00")) == "\U0001f600"

    def test_ids_outside_the_vocabulary_are_refused(self) -> None:
        for id in (-1, 256, 1 << 40):
            with pytest.raises(RequestError, match="outside 0 to 255"):
                tokenizer_of_bytes().decode([id])


@functools.cache
def tokenizer_of_bytes() -> Tokenizer:
    return tokenizer(byte_level())


@functools.cache
def tokenizer_of_pieces() -> Tokenizer:
    return tokenizer(sentence_piece(TestSentencePiece.pieces))


def broken(change: dict[str, Any], base: dict[str, Any] | None = None) -> dict[str, Any]:
    metadata = base or byte_level(HELLO)
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in change.items()}


CORRUPT = {
    "types too short": ({"token_type": [1]}, "1 entries for"),
    "types too long": ({"token_type": [1] * 999}, "999 entries for"),
    "type out of range": ({"token_type": [7] + [1] * 259}, "unknown token type 7"),
    "type negative": ({"token_type": [-1] + [1] * 259}, "unknown token type -1"),
    "types are texts": ({"token_type": ["1"] * 260}, "array of numbers"),
    "scores too short": ({"scores": [0.5]}, "1 entries for"),
    "tokens not texts": ({"tokens": [1, 2]}, "array of strings"),
    "tokens empty": ({"tokens": []}, "is empty"),
    "tokens repeated": ({"tokens": [*byte_characters(), *"ab"], "token_type": [1] * 258}, "same"),
    "token of 1 MB": ({"tokens": ["x" * (1 << 20)]}, "1048576 characters"),
    "merge of missing token": ({"merges": ["H zz"]}, "'zz', which does not exist"),
    "merge into missing token": ({"merges": ["z z"]}, "'zz', which does not exist"),
    "merge without space": ({"merges": ["Hell"]}, "not 'left right'"),
    "merges not texts": ({"merges": [1]}, "array of strings"),
    "merge of a control token": (
        {
            "tokens": [*byte_characters(), "He", "HeH"],
            "token_type": [1] * 256 + [3, 1],
            "merges": ["He H"],
        },
        "merge 0 is of control tokens",
    ),
    "bos outside": ({"bos_token_id": 260}, "outside the vocabulary"),
    "eos outside": ({"eos_token_id": 1 << 40}, "outside the vocabulary"),
    "eot negative": ({"eot_token_id": -1}, "outside the vocabulary"),
    "bos a text": ({"bos_token_id": "1"}, "must be an integer"),
    "flag a text": ({"add_bos_token": "yes"}, "must be a boolean"),
}


class TestBadMetadata:
    @pytest.mark.parametrize("change, message", CORRUPT.values(), ids=CORRUPT)
    def test_contradictions_name_file_and_key(self, change: dict[str, Any], message: str) -> None:
        with pytest.raises(CorruptModel, match=message) as error:
            tokenizer(broken(change))
        assert "test.gguf: tokenizer.ggml." in str(error.value)

    def test_scores_not_finite(self) -> None:
        metadata = sentence_piece([("a", float("nan"))])
        with pytest.raises(CorruptModel, match="not a finite number"):
            tokenizer(metadata)

    def test_byte_token_without_a_byte(self) -> None:
        metadata = sentence_piece()
        metadata["tokenizer.ggml.tokens"][5] = "<0xZZ>"
        with pytest.raises(CorruptModel, match="byte token 5"):
            tokenizer(metadata)

    def test_what_is_missing_is_named(self) -> None:
        for change, message in (
            ({"model": "t5"}, "the tokenizer 't5'"),
            ({"model": "none"}, "no tokenizer"),
            ({"pre": "new-one"}, "pre-tokenizer 'new-one'"),
        ):
            with pytest.raises(TokenizerUnavailable, match=message):
                tokenizer(broken(change))
        for key in ("model", "tokens", "merges"):
            metadata = byte_level()
            del metadata[f"tokenizer.ggml.{key}"]
            with pytest.raises(TokenizerUnavailable, match=rf"tokenizer\.ggml\.{key}"):
                tokenizer(metadata)

    def test_no_pre_tokenizer_means_default(self) -> None:
        metadata = byte_level(pre="default")
        del metadata["tokenizer.ggml.pre"]
        assert tokenizer(metadata).cut("a, b") == tokenizer(byte_level(pre="default")).cut("a, b")


@pytest.mark.parametrize(
    "metadata",
    [byte_level(HELLO), sentence_piece([("Hello", -1.0), ("▁", -2.0)])],
    ids=["gpt2", "llama"],
)
def test_a_file_of_a_vocabulary_only(tmp_path: Path, metadata: dict[str, Any]) -> None:
    path = write_gguf(tmp_path / "vocabulary.gguf", metadata, [])
    model = runtime.load_tokenizer(path)
    assert model.n_vocab == len(metadata["tokenizer.ggml.tokens"])
    ids = model.encode("Hello, 你好", add_special=False)
    assert ids == tokenizer(metadata).encode("Hello, 你好", add_special=False)
    assert model.decode(ids).lstrip() == "Hello, 你好"


def test_a_file_without_a_vocabulary_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "empty.gguf", {"general.name": "empty"}, [])
    with pytest.raises(TokenizerUnavailable, match=r"tokenizer\.ggml\.model"):
        runtime.load_tokenizer(path)


def test_the_library_is_imported_when_needed() -> None:
    code = "import sys, runtime.text.tokenizer; print('tokenizers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
