"""Sketch: the keys and tensors of a model under description."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bench.synthetic.gguf_file import Make, Part
from ops.quants import FORMATS

N_CTX_TRAIN = 32768
NARROW = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "IQ4_XS": "IQ4_NL", "IQ3_S": "IQ4_NL", "Q2_K": "Q4_0"}
"""What stands in for formats of 256-value blocks where rows are no multiple of it; else Q8_0."""

F32 = NDArray[np.float32]


class Sketch:
    """Keys and tensors in the order of the file.

    n_layers   of the file; models of more are cut after them
    skew       of the experts' use: router rows are scaled by exp(skew * normal), 0: all alike
    one_format  the format of every matrix, in place of the model's own mix
    """

    def __init__(
        self, architecture: str, n_layers: int, skew: float, one_format: str | None = None
    ) -> None:
        self.architecture, self.n_layers, self.skew = architecture, n_layers, skew
        self._one_format = one_format
        self.parts: list[Part] = []
        self.keys: dict[str, object] = {
            "general.architecture": architecture,
            "general.name": f"synthetic {architecture}",
        }

    def set(self, **values: object) -> None:
        """Set keys of the architecture; `__` in a name stands for a dot."""
        for name, value in values.items():
            self.keys[f"{self.architecture}.{name.replace('__', '.')}"] = value

    def base(self, n_embd: int, n_vocab: int, n_ff: int, eps: float, rope_base: float) -> None:
        """The keys that every model has, and a vocabulary of names without text."""
        self.set(context_length=N_CTX_TRAIN, embedding_length=n_embd, block_count=self.n_layers)
        self.set(feed_forward_length=n_ff, vocab_size=n_vocab, rope__freq_base=rope_base)
        self.set(attention__layer_norm_rms_epsilon=eps)
        self.keys["tokenizer.ggml.model"] = "test"
        self.keys["tokenizer.ggml.tokens"] = [f"<{i}>" for i in range(n_vocab)]

    def heads(self, n_head: int, n_head_kv: int | list[int], dim_k: int, dim_v: int) -> None:
        """The keys of attention."""
        self.set(attention__head_count=n_head, attention__head_count_kv=n_head_kv)
        self.set(attention__key_length=dim_k, attention__value_length=dim_v)

    def routed(self, n_expert: int, n_used: int, n_ff: int) -> None:
        """The keys of routed experts."""
        self.set(expert_count=n_expert, expert_used_count=n_used, expert_feed_forward_length=n_ff)

    def matrix(self, name: str, fmt: str, *dims: int, std: float | None = None) -> None:
        """Random blocks; std: by default such that products keep the size of what they multiply."""
        fmt = self._one_format or fmt
        if dims[0] % FORMATS[fmt].block_elems:
            fmt = NARROW.get(fmt, "Q8_0")
        spread = dims[0] ** -0.5 if std is None else std
        self.parts.append(Part(f"{name}.weight", dims, FORMATS[fmt], spread))

    def matrices(self, prefix: str, fmt: str, n_in: int, **widths: int) -> None:
        """Matrices of one input: `prefix` and the name of each, its outputs."""
        for name, n_out in widths.items():
            self.matrix(prefix + name, fmt, n_in, n_out)

    def ones(self, name: str, *dims: int) -> None:
        """Norm weights."""
        self.drawn(name, lambda rng: np.ones(dims[::-1], np.float32), *dims)

    def norms(self, prefix: str, **widths: int) -> None:
        """Norm weights of one layer: the name of each and its width."""
        for name, width in widths.items():
            self.ones(f"{prefix}{name}.weight", width)

    def normal(self, name: str, *dims: int, std: float = 0.1, mean: float = 0.0) -> None:
        """F32 values, normal: biases, taps, sinks, small matrices."""

        def make(rng: np.random.Generator) -> F32:
            return mean + np.float32(std) * rng.standard_normal(dims[::-1], np.float32)

        self.drawn(name, make, *dims)

    def rates(self, name: str, n: int) -> None:
        """Negative decay rates."""
        self.drawn(name, lambda rng: -np.exp(rng.uniform(-1.5, 1.5, n)).astype(np.float32), n)

    def drawn(self, name: str, make: Make, *dims: int) -> None:
        """F32 values from a function."""
        self.parts.append(Part(name, dims, FORMATS["F32"], make=make))

    def table(self, name: str, fmt: str, width: int, n_rows: int, hole: bool = False) -> None:
        """Rows of which tokens pick some; hole: all zero, without a byte on the disk."""
        std = 0.0 if hole else 1.0
        self.parts.append(Part(f"{name}.weight", (width, n_rows), FORMATS[fmt], std, hole=hole))

    def ends(self, n_embd: int, n_vocab: int, embedding: str, output: str) -> None:
        """The embedding table, the last norm and the output matrix, with their formats."""
        self.matrix("token_embd", embedding, n_embd, n_vocab, std=1.0)
        self.ones("output_norm.weight", n_embd)
        self.matrix("output", output, n_embd, n_vocab)

    def experts(
        self, prefix: str, gate_up: str, down: str, n_embd: int, n_ff: int, n_expert: int
    ) -> None:
        """Routed experts and their router, which prefers some."""
        skew = self.skew

        def router(rng: np.random.Generator) -> F32:
            rows = rng.standard_normal((n_expert, n_embd), np.float32) * 2 / np.sqrt(n_embd)
            scales = np.exp(skew * rng.standard_normal((n_expert, 1)))
            return np.asarray(rows * scales, np.float32)

        self.drawn(f"{prefix}ffn_gate_inp.weight", router, n_embd, n_expert)
        self.matrix(f"{prefix}ffn_gate_exps", gate_up, n_embd, n_ff, n_expert)
        self.matrix(f"{prefix}ffn_up_exps", gate_up, n_embd, n_ff, n_expert)
        self.matrix(f"{prefix}ffn_down_exps", down, n_ff, n_embd, n_expert)

    def dense(
        self, prefix: str, gate_up: str, down: str, n_embd: int, n_ff: int, suffix: str = ""
    ) -> None:
        """A dense block or a shared expert."""
        self.matrix(f"{prefix}ffn_gate{suffix}", gate_up, n_embd, n_ff)
        self.matrix(f"{prefix}ffn_up{suffix}", gate_up, n_embd, n_ff)
        self.matrix(f"{prefix}ffn_down{suffix}", down, n_ff, n_embd)

    def is_better(self, layer: int) -> bool:
        """Whether a layer is one of those to which mixes give more bits: ends, and every third."""
        first, last = self.n_layers // 8, self.n_layers - self.n_layers // 8
        return layer < first or layer >= last or (layer - first) % 3 == 2

    @property
    def n_bytes(self) -> int:
        """Of all tensors, holes too."""
        return sum(part.n_bytes for part in self.parts)

    def bytes_of(self, *endings: str) -> int:
        """Of the tensors with these endings of names."""
        return sum(part.n_bytes for part in self.parts if part.name.endswith(endings))
