"""Small tokenizers as GGUF metadata, for tests of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def byte_characters() -> list[str]:
    """The 256 tokens of a byte-level vocabulary, token i standing for byte i."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def byte_level(
    merges: Sequence[str] = (),
    special: Sequence[tuple[str, int]] = (),
    pre: str = "gpt-2",
    **keys: Any,
) -> dict[str, Any]:
    """Metadata of a `gpt2` tokenizer: 256 bytes, one token a merge, then special tokens.

    special: (text, token type); keys: more `tokenizer.ggml.` entries.
    """
    tokens = [*byte_characters(), *(merge.replace(" ", "") for merge in merges)]
    types = [NORMAL] * len(tokens) + [type for _, type in special]
    metadata = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens + [text for text, _ in special],
        "token_type": types,
        "merges": list(merges),
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (metadata | keys).items()}


def sentence_piece(
    pieces: Sequence[tuple[str, float]] = (), special: Sequence[str] = (), **keys: Any
) -> dict[str, Any]:
    """Metadata of a `llama` tokenizer: <unk>, <s>, </s>, 256 bytes, (text, score), controls."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256]
    metadata = {
        "model": "llama",
        "tokens": [*tokens, *(text for text, _ in pieces), *special],
        "token_type": [*types, *[NORMAL] * len(pieces), *[CONTROL] * len(special)],
        "scores": [*[0.0] * 259, *(score for _, score in pieces), *[0.0] * len(special)],
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (metadata | keys).items()}
