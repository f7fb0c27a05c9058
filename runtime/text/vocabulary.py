"""The tokens of a GGUF file, read from `tokenizer.ggml.*` and checked: texts, kinds, special ids.

Knows nothing about how text becomes tokens; `bpe.py` and `spm.py` do that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runtime.errors import CorruptModel, TokenizerUnavailable

# A kind is a set of bits, because a token that ends generation becomes a control token as well.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = (1 << i for i in range(6))
# token_type as GGUF numbers it: undefined, normal, unknown, control, user-defined, unused, byte
KIND_OF_TYPE = (0, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE)

MAX_TOKEN_BYTES = 1 << 16
KEYS = "tokenizer.ggml."

END_TEXTS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[",
)  # fmt: skip
# The first of each row that exists is that fill-in-the-middle token; the last three rows end text.
FIM_TEXTS = {
    "fim_pre": ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<\uff5cfim\u2581begin\uff5c>",
                "<PRE>", "\u2581<PRE>", "<|code_prefix|>", "<|prefix|>"),
    "fim_suf": ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<\uff5cfim\u2581hole\uff5c>",
                "<SUF>", "\u2581<SUF>", "<|code_suffix|>", "<|suffix|>"),
    "fim_mid": ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<\uff5cfim\u2581end\uff5c>",
                "<MID>", "\u2581<MID>", "<|code_middle|>", "<|middle|>"),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}  # fmt: skip
FIM_ENDS = ("fim_pad", "fim_rep", "fim_sep")
# Harmony markup: a program has to see these to parse the answer, so they are always rendered.
ALWAYS_RENDERED = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")


@dataclass(frozen=True)
class Special:
    """A token cut out of the text before anything else."""

    id: int
    text: str
    plain: bool  # also without parse_special: user-defined tokens
    strip_right: bool  # white space after it disappears


class Vocabulary:
    """Every token of one model, checked.

    texts       as the file stores them (byte-level tokens in their printable alphabet)
    ids         text -> id
    kinds       bit set per token
    scores      merge priority of SentencePiece vocabularies, else empty
    named_ids   'bos', 'eos', 'eot', 'fim_pre', ... -> id, where the model has one
    end_ids     ids after which nothing more is generated
    controls    texts that must never come out of a user's words
    """

    def __init__(self, metadata: Mapping[str, object], source: object) -> None:
        self._metadata = metadata
        self._source = source
        self.texts = self._read_texts()
        self.ids = dict(zip(self.texts, range(len(self.texts)), strict=True))
        if len(self.ids) != len(self.texts):
            raise self.corrupt("tokens", "two tokens have the same text")
        file_kinds = self._read_kinds()
        self.kinds = list(file_kinds)
        self.scores = self._read_scores()
        self.named_ids = self._read_named_ids()
        self._name_fim_tokens()
        self.end_ids = self._mark_end_tokens()
        before, now = _having(file_kinds, CONTROL | UNKNOWN), _having(self.kinds, CONTROL | UNKNOWN)
        self.controls = frozenset(self.texts[id] for id in (*before, *now))
        self.specials = self._collect_specials()

    def corrupt(self, key: str, what: str) -> CorruptModel:
        """The error for a contradiction under `tokenizer.ggml.<key>`."""
        return CorruptModel(self._source, f"{KEYS}{key}: {what}")

    def flag(self, key: str, default: bool) -> bool:
        """The boolean `tokenizer.ggml.<key>`, or `default` where the file does not say."""
        value = self._metadata.get(KEYS + key, default)
        if not isinstance(value, bool | int):
            raise self.corrupt(key, f"must be a boolean, not {type(value).__name__}")
        return bool(value)

    def strings(self, key: str) -> list[str]:
        """The string array `tokenizer.ggml.<key>`.

        Raises: TokenizerUnavailable when it is missing, CorruptModel when it is something else.
        """
        value = self._metadata.get(KEYS + key)
        if value is None:
            raise TokenizerUnavailable(f"the model has no {KEYS}{key}; use token ids instead")
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            raise self.corrupt(key, "must be an array of strings")
        texts = list(value)
        if set(map(type, texts)) - {str}:
            raise self.corrupt(key, "must be an array of strings")
        return texts

    def _read_texts(self) -> list[str]:
        texts = self.strings("tokens")
        if not texts:
            raise self.corrupt("tokens", "is empty")
        longest = max(texts, key=len)
        if len(longest) > MAX_TOKEN_BYTES:
            raise self.corrupt(
                "tokens",
                f"token {texts.index(longest)} has {len(longest)} characters "
                f"(limit {MAX_TOKEN_BYTES})",
            )
        try:
            "".join(texts).encode()
        except UnicodeEncodeError:
            raise self.corrupt("tokens", "a token is not valid UTF-8") from None
        if "" in texts:
            texts = [text or f"[EMPTY_{id}]" for id, text in enumerate(texts)]
        return texts

    def _numbers(self, key: str) -> list[float] | None:
        """The per-token number array `tokenizer.ggml.<key>`, or None; length checked."""
        value = self._metadata.get(KEYS + key)
        if value is None:
            return None
        values = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(values, Sequence) or isinstance(values, str | bytes):
            raise self.corrupt(key, "must be an array of numbers")
        if len(values) != len(self.texts):
            raise self.corrupt(key, f"has {len(values)} entries for {len(self.texts)} tokens")
        if set(map(type, values)) - {int, float}:
            raise self.corrupt(key, "must be an array of numbers")
        return list(values)

    def _read_kinds(self) -> list[int]:
        types = self._numbers("token_type")
        if types is None:
            return [NORMAL] * len(self.texts)
        wrong = set(types) - set(range(len(KIND_OF_TYPE)))
        if wrong:
            raise self.corrupt("token_type", f"unknown token type {min(wrong)}; known: 0 to 6")
        return list(map(KIND_OF_TYPE.__getitem__, map(int, types)))

    def _read_scores(self) -> list[float]:
        scores = self._numbers("scores") or []
        if not all(map(math.isfinite, scores)):
            raise self.corrupt("scores", "a score is not a finite number")
        return [float(score) for score in scores]

    def _read_named_ids(self) -> dict[str, int]:
        """Special ids by name.  Raises: CorruptModel for one outside the vocabulary."""
        return named_ids(self._metadata, len(self.texts), self._source)

    def _name_fim_tokens(self) -> None:
        for name, texts in FIM_TEXTS.items():
            found = next((self.ids[text] for text in texts if text in self.ids), None)
            if name not in self.named_ids and found is not None:
                self.named_ids[name] = found
                self.kinds[found] |= CONTROL

    def _mark_end_tokens(self) -> frozenset[int]:
        """Ends by id and by text; makes the ones found by text control tokens."""
        ends = {self.named_ids[name] for name in FIM_ENDS if name in self.named_ids}
        for text in END_TEXTS:
            if text in self.ids:
                ends.add(self.ids[text])
                self.kinds[self.ids[text]] |= CONTROL
        for text in ALWAYS_RENDERED:
            if text in self.ids:
                self.kinds[self.ids[text]] = USER_DEFINED
        ends |= {self.named_ids[name] for name in ("eos", "eot", "eom") if name in self.named_ids}
        return frozenset(ends - self._not_an_end_here(ends))

    def _not_an_end_here(self, ends: set[int]) -> set[int]:
        """Texts that end generation in most models, but not beside certain others."""
        texts = {self.texts[id] for id in ends}
        calls = "<|call|>" in texts or "<|calls|>" in texts
        removed = set()
        if "<|end|>" in texts and calls and ("<|return|>" in texts or "<|flush|>" in texts):
            removed.add(self.ids["<|end|>"])
            self.kinds[self.ids["<|end|>"]] = USER_DEFINED
        if "</s>" in texts and "<|tool_response>" in texts:
            removed.add(self.ids["</s>"])
            self.kinds[self.ids["</s>"]] = NORMAL
        return removed

    def _collect_specials(self) -> list[Special]:
        """Longest text first, the order in which they are cut out."""
        name = str(self._metadata.get("general.name", "")).lower()
        strips = "phi-3" in name or "phi3" in name
        specials = [
            Special(
                id,
                text := self.texts[id],
                plain=not self.kinds[id] & (CONTROL | UNKNOWN),
                strip_right=strips and text not in ("<unk>", "<s>", "<|endoftext|>"),
            )
            for id in _having(self.kinds, CONTROL | USER_DEFINED | UNKNOWN)
        ]
        return sorted(specials, key=lambda special: -len(special.text.encode()))


def _having(kinds: Sequence[int], bits: int) -> list[int]:
    """Ids of the tokens of any of these kinds, in order."""
    wanted = {kind for kind in set(kinds) if kind & bits}
    return [id for id, kind in enumerate(kinds) if kind in wanted] if wanted else []


_ID_KEYS = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "eot": "eot_token_id",
    "eom": "eom_token_id",
    "unk": "unknown_token_id",
    "pad": "padding_token_id",
    "fim_pre": "fim_pre_token_id",
    "fim_suf": "fim_suf_token_id",
    "fim_mid": "fim_mid_token_id",
    "fim_pad": "fim_pad_token_id",
    "fim_rep": "fim_rep_token_id",
    "fim_sep": "fim_sep_token_id",
}
_OLD_ID_KEYS = {
    "fim_pre": "prefix_token_id",
    "fim_suf": "suffix_token_id",
    "fim_mid": "middle_token_id",
}
_SPM_DEFAULTS = {"bos": 1, "eos": 2, "unk": 0}


def named_ids(metadata: Mapping[str, object], n_vocab: int, source: object) -> dict[str, int]:
    """The special token ids a file names, for a vocabulary of `n_vocab`; needs no tokenizer.

    Raises: CorruptModel for an id that is not a number or outside the vocabulary.
    """
    found: dict[str, int] = {}
    if metadata.get(KEYS + "model") == "llama":
        found |= {name: id for name, id in _SPM_DEFAULTS.items() if id < n_vocab}
    for name, key in [*_OLD_ID_KEYS.items(), *_ID_KEYS.items()]:
        value = metadata.get(KEYS + key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise CorruptModel(source, f"{KEYS}{key}: must be an integer")
        if not 0 <= value < n_vocab:
            raise CorruptModel(
                source, f"{KEYS}{key}: {value} is outside the vocabulary of {n_vocab} tokens"
            )
        found[name] = value
    return found
