"""Shapes of models with latent attention: DeepSeek-V2-Lite, GLM-4.7-Flash, GLM-5.3-Flash."""

from __future__ import annotations

from dataclasses import dataclass

from bench.synthetic.sketch import Sketch


@dataclass(frozen=True)
class DeepSeek2:
    """Latent attention with rope; rank 0: queries without a narrow product."""

    n_layers: int
    n_embd: int
    n_head: int
    rank: int
    dim_nope: int
    dim_v: int
    n_ff: int
    n_ff_dense: int
    n_expert: int
    n_used: int
    n_shared: int
    n_vocab: int
    sigmoid: bool
    scale: float
    rope_base: float = 10000.0
    yarn_factor: float = 1.0
    architecture: str = "deepseek2"
    dim_rope: int = 64
    dim_latent: int = 512

    def describe(self, sketch: Sketch) -> None:
        """As Q4_K_M mixes, the matrices of heads Q8_0."""
        n_embd, n_ff = self.n_embd, self.n_ff
        dim_q, dim_k = self.dim_nope + self.dim_rope, self.dim_latent + self.dim_rope
        sketch.base(n_embd, self.n_vocab, self.n_ff_dense, 1e-5, self.rope_base)
        sketch.heads(self.n_head, 1, dim_k, self.dim_latent)
        sketch.routed(self.n_expert, self.n_used, n_ff)
        sketch.set(attention__key_length_mla=dim_q, attention__value_length_mla=self.dim_v)
        sketch.set(attention__kv_lora_rank=self.dim_latent, rope__dimension_count=self.dim_rope)
        sketch.set(leading_dense_block_count=1, expert_shared_count=self.n_shared)
        sketch.set(expert_gating_func=2 if self.sigmoid else 1, expert_weights_scale=self.scale)
        sketch.set(expert_weights_norm=self.sigmoid)
        if self.rank:
            sketch.set(attention__q_lora_rank=self.rank)
        if self.yarn_factor > 1:
            sketch.set(rope__scaling__type="yarn", rope__scaling__factor=self.yarn_factor)
            sketch.set(rope__scaling__original_context_length=4096)
            sketch.set(rope__scaling__yarn_log_multiplier=0.0707)
        sketch.ends(n_embd, self.n_vocab, "Q4_K", "Q6_K")
        for i in range(sketch.n_layers):
            name, better = f"blk.{i}.", "Q6_K" if sketch.is_better(i) else "Q4_K"
            sketch.norms(name, attn_norm=n_embd, ffn_norm=n_embd)
            self._attention(sketch, name, dim_q, dim_k)
            if i == 0:
                sketch.dense(name, "Q4_K", better, n_embd, self.n_ff_dense)
                continue
            sketch.experts(name, "Q4_K", better, n_embd, n_ff, self.n_expert)
            if self.sigmoid:
                sketch.normal(f"{name}exp_probs_b.bias", self.n_expert, std=0.01)
            sketch.dense(name, "Q4_K", better, n_embd, n_ff * self.n_shared, "_shexp")

    def _attention(self, sketch: Sketch, name: str, dim_q: int, dim_k: int) -> None:
        width = self.n_head * dim_q
        if self.rank:
            sketch.matrix(f"{name}attn_q_a", "Q4_K", self.n_embd, self.rank)
            sketch.ones(f"{name}attn_q_a_norm.weight", self.rank)
            sketch.matrix(f"{name}attn_q_b", "Q4_K", self.rank, width)
        else:
            sketch.matrix(f"{name}attn_q", "Q4_K", self.n_embd, width)
        sketch.matrix(f"{name}attn_kv_a_mqa", "Q4_K", self.n_embd, dim_k)
        _latent_heads(sketch, name, self.dim_latent, self.dim_nope, self.dim_v, self.n_head)
        sketch.matrix(f"{name}attn_output", "Q4_K", self.n_head * self.dim_v, self.n_embd)


@dataclass(frozen=True)
class Glm5Next:
    """GLM-5.3-Flash: KDA and sparse latent attention, four residual streams.

    Every fourth layer attends.  Of a file with fewer layers than the model, a share of the layers
    that is dense, or has experts of more bits, stays what it is.
    """

    architecture: str = "glm5-next"
    n_layers: int = 45
    n_dense: int = 3
    n_embd: int = 4096
    n_head: int = 64
    kda_dim: int = 128
    rank: int = 1536
    dim_latent: int = 512
    dim_head: int = 256
    n_index_head: int = 32
    index_dim: int = 128
    top_k: int = 2048
    n_ff: int = 2048
    n_ff_dense: int = 12288
    n_expert: int = 288
    n_used: int = 8
    n_vocab: int = 154_880
    n_stream: int = 4

    def describe(self, sketch: Sketch) -> None:
        """The 3.0-bit file with Q4_K beside the experts: theirs are Q4_K, then Q3_K, then Q2_K."""
        n_embd, n_ff, n_layers = self.n_embd, self.n_ff, sketch.n_layers
        n_dense = max(1, round(self.n_dense * n_layers / self.n_layers))
        sketch.base(n_embd, self.n_vocab, self.n_ff_dense, 1e-5, 10000.0)
        n_head_kv = [int(i % 4 == 3) for i in range(n_layers)]
        sketch.heads(self.n_head, n_head_kv, self.dim_latent, self.dim_latent)
        sketch.routed(self.n_expert, self.n_used, n_ff)
        self._keys(sketch, n_dense)
        sketch.ends(n_embd, self.n_vocab, "Q4_K", "Q6_K")
        for i in range(n_layers):
            name = f"blk.{i}."
            sketch.norms(name, attn_norm=n_embd, ffn_norm=n_embd)
            self._streams(sketch, name)
            (self._attention if n_head_kv[i] else self._kda)(sketch, name)
            if i < n_dense:
                sketch.dense(name, "Q4_K", "Q4_K", n_embd, self.n_ff_dense)
                continue
            fourteenth = 14 * (i - n_dense) // (n_layers - n_dense)
            fmt = ("Q4_K", "Q3_K")[fourteenth] if fourteenth < 2 else "Q2_K"
            sketch.experts(name, fmt, fmt, n_embd, n_ff, self.n_expert)
            sketch.normal(f"{name}exp_probs_b.bias", self.n_expert, std=0.01)
            sketch.dense(name, "Q4_K", "Q4_K", n_embd, n_ff, "_shexp")

    def _keys(self, sketch: Sketch, n_dense: int) -> None:
        sketch.set(rope__dimension_count=0, attention__layer_norm_epsilon=1e-6)
        sketch.set(kda__head_dim=self.kda_dim, kda__gate_lower_bound=-5.0, ssm__conv_kernel=4)
        sketch.set(attention__q_lora_rank=self.rank, attention__kv_lora_rank=self.dim_latent)
        sketch.set(attention__key_length_mla=self.dim_head)
        sketch.set(attention__value_length_mla=self.dim_head)
        sketch.set(attention__indexer__head_count=self.n_index_head)
        sketch.set(attention__indexer__key_length=self.index_dim)
        sketch.set(attention__indexer__top_k=self.top_k, attention__indexer__kpool=4)
        sketch.set(attention__indexer__kpool_select_tail=True)
        sketch.set(hyper_connection__count=self.n_stream, hyper_connection__epsilon=1e-6)
        sketch.set(hyper_connection__sinkhorn_iterations=20, leading_dense_block_count=n_dense)
        sketch.set(expert_shared_count=1, expert_weights_scale=2.5, expert_weights_norm=True)
        limits = [10.0] * sketch.n_layers
        sketch.set(expert_gating_func=2, swiglu_clamp_exp=limits, swiglu_clamp_shexp=limits)

    def _streams(self, sketch: Sketch, name: str) -> None:
        n = self.n_stream
        for part in ("attn", "ffn"):
            width = n * self.n_embd
            sketch.normal(f"{name}hc_{part}_fn.weight", width, n * (n + 2), std=width**-0.5)
            sketch.normal(f"{name}hc_{part}_base.weight", n * (n + 2))
            sketch.ones(f"{name}hc_{part}_scale.weight", 3)

    def _kda(self, sketch: Sketch, name: str) -> None:
        dim, n_embd, width = self.kda_dim, self.n_embd, self.n_head * self.kda_dim
        for part in "qkv":
            sketch.normal(f"{name}ssm_conv1d_{part}.weight", 4, 1, width, 1, std=0.5, mean=0.3)
        sketch.matrices(f"{name}attn_", "Q4_K", n_embd, q=width, k=width, v=width)
        sketch.matrices(f"{name}ssm_", "Q4_K", n_embd, f_a=dim, g_a=dim, beta=self.n_head)
        sketch.matrices(f"{name}ssm_", "Q8_0", dim, f_b=width, g_b=width)
        sketch.normal(f"{name}ssm_dt.bias", width, std=0.3)
        sketch.rates(f"{name}ssm_a", self.n_head)
        sketch.ones(f"{name}ssm_norm.weight", dim)
        sketch.matrix(f"{name}attn_output", "Q4_K", width, n_embd)

    def _attention(self, sketch: Sketch, name: str) -> None:
        n_embd, rank, dim = self.n_embd, self.rank, self.index_dim
        sketch.matrix(f"{name}attn_q_a", "Q4_K", n_embd, rank)
        sketch.ones(f"{name}attn_q_a_norm.weight", rank)
        sketch.matrix(f"{name}attn_q_b", "Q4_K", rank, self.n_head * self.dim_head)
        sketch.matrix(f"{name}attn_kv_a_mqa", "Q4_K", n_embd, self.dim_latent)
        _latent_heads(sketch, name, self.dim_latent, self.dim_head, self.dim_head, self.n_head)
        sketch.matrix(f"{name}attn_output", "Q4_K", self.n_head * self.dim_head, n_embd)
        sketch.matrix(f"{name}indexer.attn_q_b", "Q4_K", rank, self.n_index_head * dim)
        sketch.matrix(f"{name}indexer.attn_k", "Q4_K", n_embd, dim)
        sketch.ones(f"{name}indexer.k_norm.weight", dim)
        sketch.normal(f"{name}indexer.k_norm.bias", dim)
        sketch.matrix(f"{name}indexer.proj", "Q4_K", n_embd, self.n_index_head)
        sketch.matrix(f"{name}indexer_compressor_gate", "Q4_K", n_embd, dim)
        sketch.normal(f"{name}indexer_compressor_ape.weight", dim, 4)


def _latent_heads(
    sketch: Sketch, name: str, dim_latent: int, dim_nope: int, dim_v: int, n_head: int
) -> None:
    """The norm of the latent row and the matrices between it and the heads."""
    sketch.ones(f"{name}attn_kv_a_norm.weight", dim_latent)
    sketch.matrix(f"{name}attn_k_b", "Q8_0", dim_nope, dim_latent, n_head)
    sketch.matrix(f"{name}attn_v_b", "Q8_0", dim_latent, dim_v, n_head)
