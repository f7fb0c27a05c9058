"""The fake model: a vocabulary of bytes and a chat template, but no weights."""

from __future__ import annotations

import numpy as np

from runtime.engine.model_facts import ModelFacts
from runtime.engine.step import F32

N_CTX_TRAIN = 4096
PAGE_TOKENS = 16
N_SNAPSHOTS = 8  # states kept beside the running ones, for a model that has states
CONTROL, NORMAL = 3, 1  # GGUF token types
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LIKED = "abcdefghijklmnopqrstuvwxyz      .,"


def fake_metadata() -> dict[str, object]:
    """GGUF metadata of a `gpt2` vocabulary: one token a byte, then the special tokens."""
    tokens = [*byte_letters(), *SPECIAL_TOKENS]
    return {
        "general.architecture": "fake",
        "general.name": "fake",
        "fake.context_length": N_CTX_TRAIN,
        "fake.embedding_length": 8,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [NORMAL] * 256 + [CONTROL] * len(SPECIAL_TOKENS),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 256,
        "tokenizer.ggml.eot_token_id": 258,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def byte_letters() -> list[str]:
    """The printable letter that stands for each byte in a byte-level BPE vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in plain}
    others = (byte for byte in range(256) if byte not in letters)
    letters.update({byte: chr(256 + n) for n, byte in enumerate(others)})
    return [letters[byte] for byte in range(256)]


def fake_bias(n_vocab: int) -> F32:
    """f32[n_vocab]: likes letters and spaces, and an end after some thirty tokens."""
    bias = np.zeros(n_vocab, np.float32)
    liked = sorted({ord(letter) for letter in LIKED if ord(letter) < n_vocab})
    bias[liked] = 12
    if n_vocab > 258:
        bias[258] = 12  # <|im_end|>
    return bias


def fake_facts() -> ModelFacts:
    """The facts of the fake model, without its tokenizer and template."""
    metadata = fake_metadata()
    return ModelFacts(
        name="fake",
        architecture="fake",
        path=None,
        metadata=metadata,
        n_vocab=256 + len(SPECIAL_TOKENS),
        n_ctx_train=N_CTX_TRAIN,
        n_embd=8,
    )
