"""Shapes of models whose layers are plain attention and routed experts."""

from __future__ import annotations

from dataclasses import dataclass

from bench.synthetic.sketch import Sketch


@dataclass(frozen=True)
class PlainMoe:
    """OLMoE and Qwen3; norm_rows: query and key norms are of all heads together."""

    architecture: str
    n_embd: int
    n_layers: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    n_expert: int
    n_used: int
    n_vocab: int
    rope_base: float
    eps: float
    norm_rows: bool

    def describe(self, sketch: Sketch) -> None:
        """As Q4_K_M mixes."""
        n_embd, dim = self.n_embd, self.head_dim
        n_q, n_kv = self.n_head * dim, self.n_head_kv * dim
        sketch.base(n_embd, self.n_vocab, self.n_ff, self.eps, self.rope_base)
        sketch.heads(self.n_head, self.n_head_kv, dim, dim)
        sketch.routed(self.n_expert, self.n_used, self.n_ff)
        sketch.ends(n_embd, self.n_vocab, "Q4_K", "Q6_K")
        for i in range(sketch.n_layers):
            name, better = f"blk.{i}.", "Q6_K" if sketch.is_better(i) else "Q4_K"
            sketch.norms(name, attn_norm=n_embd, ffn_norm=n_embd)
            sketch.matrices(f"{name}attn_", "Q4_K", n_embd, q=n_q, k=n_kv)
            sketch.matrices(f"{name}attn_", better, n_embd, v=n_kv)
            sketch.matrix(f"{name}attn_output", "Q4_K", n_q, n_embd)
            sketch.ones(f"{name}attn_q_norm.weight", n_q if self.norm_rows else dim)
            sketch.ones(f"{name}attn_k_norm.weight", n_kv if self.norm_rows else dim)
            sketch.experts(name, "Q4_K", better, n_embd, self.n_ff, self.n_expert)


@dataclass(frozen=True)
class GptOss:
    """gpt-oss: sinks, a window in every other layer, experts with biases."""

    n_layers: int
    n_expert: int
    architecture: str = "gpt-oss"
    n_embd: int = 2880
    n_head: int = 64
    n_head_kv: int = 8
    head_dim: int = 64
    n_ff: int = 2880
    n_used: int = 4
    n_vocab: int = 201_088
    window: int = 128

    def describe(self, sketch: Sketch) -> None:
        """MXFP4 experts; rows of 2880 values leave formats of 32-value blocks for the rest."""
        n_embd, n_ff, dim = self.n_embd, self.n_ff, self.head_dim
        n_q, n_kv = self.n_head * dim, self.n_head_kv * dim
        sketch.base(n_embd, self.n_vocab, n_ff, 1e-5, 150000.0)
        sketch.heads(self.n_head, self.n_head_kv, dim, dim)
        sketch.routed(self.n_expert, self.n_used, n_ff)
        sketch.set(attention__sliding_window=self.window, rope__scaling__type="yarn")
        sketch.set(rope__scaling__factor=32.0, rope__scaling__original_context_length=4096)
        sketch.ends(n_embd, self.n_vocab, "Q8_0", "Q8_0")
        for i in range(sketch.n_layers):
            name = f"blk.{i}."
            sketch.norms(name, attn_norm=n_embd, post_attention_norm=n_embd)
            sketch.matrices(f"{name}attn_", "Q8_0", n_embd, q=n_q, k=n_kv, v=n_kv)
            for part, width in (("q", n_q), ("k", n_kv), ("v", n_kv), ("output", n_embd)):
                sketch.normal(f"{name}attn_{part}.bias", width)
            sketch.matrix(f"{name}attn_output", "Q8_0", n_q, n_embd)
            sketch.normal(f"{name}attn_sinks.weight", self.n_head, std=1.0)
            sketch.experts(name, "MXFP4", "MXFP4", n_embd, n_ff, self.n_expert)
            sketch.normal(f"{name}ffn_gate_inp.bias", self.n_expert)
            for part, width in (("gate", n_ff), ("up", n_ff), ("down", n_embd)):
                sketch.normal(f"{name}ffn_{part}_exps.bias", width, self.n_expert)


@dataclass(frozen=True)
class Glm4Moe:
    """GLM-4.5-Air: biased projections, a sigmoid router, a shared expert."""

    architecture: str = "glm4moe"
    n_layers: int = 46
    n_embd: int = 4096
    n_head: int = 96
    n_head_kv: int = 8
    head_dim: int = 128
    n_ff: int = 1408
    n_ff_dense: int = 10944
    n_expert: int = 128
    n_used: int = 8
    n_vocab: int = 151_552

    def describe(self, sketch: Sketch) -> None:
        """As Q4_K_M mixes; rows of 1408 values have 32-value blocks."""
        n_embd, n_ff, dim = self.n_embd, self.n_ff, self.head_dim
        n_q, n_kv = self.n_head * dim, self.n_head_kv * dim
        sketch.base(n_embd, self.n_vocab, self.n_ff_dense, 1e-5, 1e6)
        sketch.heads(self.n_head, self.n_head_kv, dim, dim)
        sketch.routed(self.n_expert, self.n_used, n_ff)
        sketch.set(rope__dimension_count=dim // 2, leading_dense_block_count=1)
        sketch.set(expert_gating_func=2, expert_weights_norm=True, expert_weights_scale=1.0)
        sketch.set(expert_shared_count=1)
        sketch.ends(n_embd, self.n_vocab, "Q4_K", "Q6_K")
        for i in range(sketch.n_layers):
            name, better = f"blk.{i}.", "Q6_K" if sketch.is_better(i) else "Q4_K"
            sketch.norms(name, attn_norm=n_embd, post_attention_norm=n_embd)
            sketch.matrices(f"{name}attn_", "Q4_K", n_embd, q=n_q, k=n_kv)
            sketch.matrices(f"{name}attn_", better, n_embd, v=n_kv)
            for part, width in (("q", n_q), ("k", n_kv), ("v", n_kv)):
                sketch.normal(f"{name}attn_{part}.bias", width)
            sketch.matrix(f"{name}attn_output", "Q4_K", n_q, n_embd)
            if i == 0:
                sketch.dense(name, "Q4_K", better, n_embd, self.n_ff_dense)
                continue
            sketch.experts(name, "Q4_K", better, n_embd, n_ff, self.n_expert)
            sketch.normal(f"{name}exp_probs_b.bias", self.n_expert, std=0.01)
            sketch.dense(name, "Q4_K", better, n_embd, n_ff, "_shexp")


@dataclass(frozen=True)
class Mimo2:
    """MiMo-V2-Flash: windows with sinks between full layers, keys wider than values."""

    architecture: str = "mimo2"
    n_layers: int = 48
    n_embd: int = 4096
    n_head: int = 64
    n_head_kv: int = 4
    n_head_kv_window: int = 8
    dim_k: int = 192
    dim_v: int = 128
    n_ff: int = 2048
    n_ff_dense: int = 16384
    n_expert: int = 256
    n_used: int = 8
    n_vocab: int = 152_576
    window: int = 128

    def describe(self, sketch: Sketch) -> None:
        """IQ3_XXS experts whose down matrices are IQ3_S, the rest Q4_K and better.

        The real file's mix is not known; this one has its size.
        """
        n_embd, n_ff = self.n_embd, self.n_ff
        windowed = [0 if i == 0 or i % 6 == 5 else 1 for i in range(sketch.n_layers)]
        n_head_kv = [self.n_head_kv_window if w else self.n_head_kv for w in windowed]
        sketch.base(n_embd, self.n_vocab, self.n_ff_dense, 1e-5, 5e6)
        sketch.heads(self.n_head, n_head_kv, self.dim_k, self.dim_v)
        sketch.routed(self.n_expert, self.n_used, n_ff)
        sketch.set(rope__dimension_count=self.dim_k // 3, rope__freq_base_swa=10000.0)
        sketch.set(attention__sliding_window=self.window, attention__value_scale=0.707)
        sketch.set(attention__sliding_window_pattern=windowed)
        sketch.set(expert_gating_func=2, expert_weights_norm=True)
        sketch.ends(n_embd, self.n_vocab, "Q4_K", "Q6_K")
        for i in range(sketch.n_layers):
            name, n_kv = f"blk.{i}.", n_head_kv[i]
            sketch.norms(name, attn_norm=n_embd, ffn_norm=n_embd)
            width = self.n_head * self.dim_k + n_kv * (self.dim_k + self.dim_v)
            sketch.matrix(f"{name}attn_qkv", "Q5_K", n_embd, width)
            sketch.matrix(f"{name}attn_output", "Q4_K", self.n_head * self.dim_v, n_embd)
            if windowed[i]:
                sketch.normal(f"{name}attn_sinks.weight", self.n_head, std=1.0)
            if i == 0:
                sketch.dense(name, "Q4_K", "Q6_K", n_embd, self.n_ff_dense)
                continue
            sketch.experts(name, "IQ3_XXS", "IQ3_S", n_embd, n_ff, self.n_expert)
            sketch.normal(f"{name}exp_probs_b.bias", self.n_expert, std=0.01)
