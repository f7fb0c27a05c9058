"""TinyModel: metadata and tensors of a small model, drawn from one generator."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.gguf_writer import Tensor, f32_tensor, write_gguf

N_VOCAB = 96


@dataclass
class TinyModel:
    """Metadata and tensors of a model under construction; one generator draws them in order."""

    architecture: str
    seed: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(zlib.crc32(self.architecture.encode()) + self.seed)
        self.metadata["general.architecture"] = self.architecture
        self.metadata["tokenizer.ggml.model"] = "test"
        self.metadata["tokenizer.ggml.tokens"] = [f"tok_{i}" for i in range(N_VOCAB)]
        self.set(vocab_size=N_VOCAB, context_length=4096)

    def set(self, **values: Any) -> None:
        """Set keys of the architecture; `__` in a name stands for a dot."""
        for name, value in values.items():
            self.metadata[f"{self.architecture}.{name.replace('__', '.')}"] = value

    def base(
        self,
        n_embd: int,
        n_layers: int,
        n_head: int,
        n_head_kv: int | list[int],
        n_ff: int,
        eps: float = 1e-5,
        rope_base: float = 10000.0,
    ) -> None:
        """The keys that every model has."""
        self.set(embedding_length=n_embd, block_count=n_layers, feed_forward_length=n_ff)
        self.set(attention__head_count=n_head, attention__head_count_kv=n_head_kv)
        self.set(attention__layer_norm_rms_epsilon=eps, rope__freq_base=rope_base)

    def matrix(self, name: str, *shape: int, gain: float = 1.0) -> None:
        """Normal weights of variance gain^2 / ne0; shape in GGUF order."""
        values = self._random.standard_normal(shape[::-1]) * gain / np.sqrt(shape[0])
        self.tensors.append(f32_tensor(name, values))

    def embedding(self, n_embd: int) -> None:
        self.table("token_embd.weight", n_embd, N_VOCAB)

    def table(self, name: str, width: int, n_rows: int) -> None:
        """Rows of which tokens pick some."""
        self.tensors.append(f32_tensor(name, self._random.standard_normal((n_rows, width))))

    def norm(self, name: str, n: int) -> None:
        self.tensors.append(f32_tensor(name, 1 + 0.2 * self._random.standard_normal(n)))

    def bias(self, name: str, *shape: int, gain: float = 1.0) -> None:
        values = 0.3 * self._random.standard_normal(shape[::-1]) * gain
        self.tensors.append(f32_tensor(name, values))

    def rates(self, name: str, n: int) -> None:
        """Negative decay rates."""
        self.tensors.append(f32_tensor(name, -np.exp(self._random.uniform(-1.5, 1.5, (n,)))))

    def taps(self, name: str, *shape: int) -> None:
        """Taps of a convolution, their mean above zero."""
        values = self._random.standard_normal(shape[::-1]) / np.sqrt(shape[0]) + 0.3
        self.tensors.append(f32_tensor(name, values))

    def ends(self, n_embd: int, output: bool = True) -> None:
        self.embedding(n_embd)
        self.norm("output_norm.weight", n_embd)
        if output:
            self.matrix("output.weight", n_embd, N_VOCAB)

    def norms(self, layer: int, **sizes: int) -> None:
        """Norm weights of one layer."""
        for name, n in sizes.items():
            self.norm(f"blk.{layer}.{name}.weight", n)

    def attention(self, layer: int, n_embd: int, n_q: int, n_kv: int, bias: bool = False) -> None:
        for part, width in (("q", n_q), ("k", n_kv), ("v", n_kv)):
            self.matrix(f"blk.{layer}.attn_{part}.weight", n_embd, width)
            if bias:
                self.bias(f"blk.{layer}.attn_{part}.bias", width)
        self.matrix(f"blk.{layer}.attn_output.weight", n_q, n_embd)

    def experts(self, layer: int, n_embd: int, n_ff: int, n_expert: int) -> None:
        prefix = f"blk.{layer}.ffn_"
        self.matrix(f"{prefix}gate_inp.weight", n_embd, n_expert, gain=2)
        self.matrix(f"{prefix}gate_exps.weight", n_embd, n_ff, n_expert)
        self.matrix(f"{prefix}up_exps.weight", n_embd, n_ff, n_expert)
        self.matrix(f"{prefix}down_exps.weight", n_ff, n_embd, n_expert)

    def expert_biases(self, layer: int, n_embd: int, n_ff: int, n_expert: int) -> None:
        prefix = f"blk.{layer}.ffn_"
        self.bias(f"{prefix}gate_inp.bias", n_expert)
        self.bias(f"{prefix}gate_exps.bias", n_ff, n_expert)
        self.bias(f"{prefix}up_exps.bias", n_ff, n_expert)
        self.bias(f"{prefix}down_exps.bias", n_embd, n_expert)

    def dense(
        self, layer: int, n_embd: int, n_ff: int, suffix: str = "", gain: float = 1.0
    ) -> None:
        self.matrix(f"blk.{layer}.ffn_gate{suffix}.weight", n_embd, n_ff, gain=gain)
        self.matrix(f"blk.{layer}.ffn_up{suffix}.weight", n_embd, n_ff, gain=gain)
        self.matrix(f"blk.{layer}.ffn_down{suffix}.weight", n_ff, n_embd)

    def write(self, path: Path) -> Path:
        return write_gguf(path, self.metadata, self.tensors)
