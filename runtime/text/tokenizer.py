"""Text to token ids and back, as the GGUF file describes it and llama.cpp reads it.

Two deliberate differences from llama.cpp: a plain text never becomes a control token, not even
where its pieces would merge into one; and a file without BOS or EOS id has none.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from functools import cache, partial
from typing import Protocol

from runtime.checks import check_flags, shown
from runtime.errors import RequestError, TokenizerUnavailable
from runtime.text.detokenizer import Detokenizer
from runtime.text.pretokenizers import PRE_TOKENIZERS
from runtime.text.vocabulary import (
    BYTE,
    CONTROL,
    KEYS,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    Vocabulary,
)

ASCII_SPACE = " \t\n\v\f\r"


class Tokenizer:
    """One model's tokenizer; immutable, usable from any thread.

    vocabulary  its tokens, kinds and special ids
    end_ids     ids after which nothing more is generated
    """

    def __init__(
        self, vocabulary: Vocabulary, model: TextModel, *, add_bos: bool, add_eos: bool
    ) -> None:
        self.vocabulary = vocabulary
        self.end_ids = vocabulary.end_ids
        self.add_bos = add_bos
        self.add_eos = add_eos
        self._model = model
        self._n_vocab = len(vocabulary.texts)
        self._bytes = cache(partial(_token_bytes, vocabulary, model))
        for id, kind in enumerate(vocabulary.kinds):
            if kind & BYTE:
                self._bytes(id)  # which finds out whether it is one

    @classmethod
    def from_metadata(
        cls, metadata: Mapping[str, object], source: object = "tokenizer"
    ) -> Tokenizer:
        """The tokenizer of a GGUF file's metadata; `source` names the file in errors.

        Raises: TokenizerUnavailable when there is none or an unknown one (the message says what
        is missing), CorruptModel when the metadata contradict themselves.
        """
        name = metadata.get(KEYS + "model")
        if name == "gpt2":
            return cls._byte_level(metadata, source)
        if name == "llama":
            from runtime.text.spm import SpmModel

            vocabulary = Vocabulary(metadata, source)
            return cls(
                vocabulary,
                SpmModel(vocabulary),
                add_bos=vocabulary.flag("add_bos_token", True),
                add_eos=vocabulary.flag("add_eos_token", False),
            )
        what = "no tokenizer" if name in (None, "none", "no_vocab") else f"the tokenizer {name!r}"
        raise TokenizerUnavailable(
            f"the model has {what} ({KEYS}model); known: 'gpt2', 'llama'; use token ids instead"
        )

    @classmethod
    def _byte_level(cls, metadata: Mapping[str, object], source: object) -> Tokenizer:
        pre = metadata.get(KEYS + "pre") or "default"
        if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
            raise TokenizerUnavailable(
                f"the model has the pre-tokenizer {pre!r} ({KEYS}pre), which is not known; "
                f"use token ids instead. Known: {', '.join(sorted(PRE_TOKENIZERS))}"
            )
        from runtime.text.bpe import BpeModel

        cuts = PRE_TOKENIZERS[pre]
        vocabulary = Vocabulary(metadata, source)
        return cls(
            vocabulary,
            BpeModel(vocabulary, cuts),
            add_bos=vocabulary.flag("add_bos_token", cuts.add_bos),
            add_eos=vocabulary.flag("add_eos_token", False),
        )

    @property
    def n_vocab(self) -> int:
        """How many tokens there are."""
        return self._n_vocab

    @property
    def bos_id(self) -> int | None:
        """The token a text begins with, if the model has one."""
        return self.vocabulary.named_ids.get("bos")

    @property
    def eos_id(self) -> int | None:
        """The token a text ends with, if the model has one."""
        return self.vocabulary.named_ids.get("eos")

    def is_end(self, id: int) -> bool:
        """Whether generation ends after token `id`."""
        return id in self.end_ids

    def encode(
        self,
        text: str,
        add_special: bool = True,
        parse_special: bool = False,
        guard: str | None = None,
    ) -> list[int]:
        """Token ids of `text`.

        add_special    put BOS first and EOS last where the model wants them
        parse_special  texts of control tokens become those tokens
        guard          a character that is removed after control tokens were found, so that text
                       broken up by it stays text (chat_template.py); with it, a text that
                       starts with BOS gets no second one

        Raises: RequestError naming what is of the wrong kind, or where too much of the text can
        only be tokenized as one piece.
        """
        if not isinstance(text, str):
            raise RequestError("text", f"{shown(text)} is not a string")
        check_flags(add_special=add_special, parse_special=parse_special)
        if guard is not None and not isinstance(guard, str):
            raise RequestError("guard", f"{shown(guard)}: use a character, or None")
        text = _without_lone_surrogates(text)
        ids: list[int] = []
        after_special = True
        for fragment in self._cut_specials(text, parse_special):
            if isinstance(fragment, int):
                ids.append(fragment)
                after_special = True
            else:
                plain = fragment.replace(guard, "") if guard else fragment
                ids += self._model.encode(plain, after_special=after_special) if plain else []
                after_special = False
        if not add_special:
            return ids
        if self.add_bos and self.bos_id is not None and not (guard and ids[:1] == [self.bos_id]):
            ids.insert(0, self.bos_id)
        if self.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def cut(self, text: str) -> list[str]:
        """The pieces of plain text that tokens never cross; for tests and curious people."""
        return self._model.cut(text)

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """Text of `ids`; bytes that are no character become U+FFFD.

        special: also write control tokens.  The space that `encode` put before the text of a
        SentencePiece model is taken away again.

        Raises: RequestError for an id outside the vocabulary.
        """
        if not isinstance(ids, Iterable):
            raise RequestError("tokens", f"{shown(ids)} is not a list of token ids")
        data = b"".join([self._visible_bytes(id, special) for id in ids])
        text = data.decode("utf-8", "replace")
        if self._model.adds_space and not special and text.startswith(" "):
            return text[1:]
        return text

    def detokenizer(self, special: bool = False) -> Detokenizer:
        """A fresh incremental decoder; `special`: also write control tokens."""
        return Detokenizer(lambda id: self._visible_bytes(id, special))

    def token_bytes(self, id: int) -> bytes:
        """The bytes token `id` stands for, a control token's text included.

        Raises: RequestError for an id outside the vocabulary.
        """
        return self._bytes(self._known(id))

    def piece(self, id: int) -> str:
        """`token_bytes` as text; part of a character shows as U+FFFD."""
        return self.token_bytes(id).decode("utf-8", "replace")

    def is_control(self, id: int) -> bool:
        """Whether token `id` is markup that plain output leaves out.

        Raises: RequestError for an id outside the vocabulary.
        """
        return bool(self.vocabulary.kinds[self._known(id)] & (CONTROL | UNKNOWN))

    def _known(self, id: object) -> int:
        """Raises: RequestError for what is no id of the vocabulary."""
        try:
            index = operator.index(id)  # type: ignore[arg-type]
        except TypeError:
            raise RequestError("tokens", f"{shown(id)} is not a token id") from None
        if not 0 <= index < self._n_vocab:
            last = self._n_vocab - 1
            raise RequestError("tokens", f"token id {shown(index)} is outside 0 to {last}")
        return index

    def _visible_bytes(self, id: int, special: bool) -> bytes:
        data = self.token_bytes(id)
        return data if special or not self.is_control(id) else b""

    def _cut_specials(self, text: str, parse_special: bool) -> list[str | int]:
        """Text with special tokens replaced by their ids, the longest ones first."""
        fragments: list[str | int] = [text] if text else []
        for special in self.vocabulary.specials:
            if special.text not in text or not (parse_special or special.plain):
                continue
            cut: list[str | int] = []
            for fragment in fragments:
                if isinstance(fragment, int):
                    cut.append(fragment)
                    continue
                first, *others = fragment.split(special.text)
                cut += [first] if first else []
                for other in others:
                    rest = other.lstrip(ASCII_SPACE) if special.strip_right else other
                    cut += [special.id, rest] if rest else [special.id]
            fragments = cut
        return fragments


class TextModel(Protocol):
    """What turns plain text into ids; see bpe.py and spm.py."""

    adds_space: bool

    def encode(self, text: str, *, after_special: bool) -> list[int]: ...

    def cut(self, text: str) -> list[str]: ...

    def bytes_of(self, text: str) -> bytes: ...


def _token_bytes(vocabulary: Vocabulary, model: TextModel, id: int) -> bytes:
    text, kind = vocabulary.texts[id], vocabulary.kinds[id]
    if kind & (CONTROL | UNKNOWN | USER_DEFINED):
        return text.encode()
    if kind & NORMAL:
        return model.bytes_of(text)
    if kind & BYTE:
        try:
            return bytes([int(text.removeprefix("<0x").removesuffix(">"), 16)])
        except ValueError:
            raise vocabulary.corrupt("tokens", f"byte token {id} is not '<0xNN>'") from None
    return b""


def _without_lone_surrogates(text: str) -> str:
    """Half a UTF-16 pair (JSON can carry one) is no character: U+FFFD; whole pairs are joined."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
