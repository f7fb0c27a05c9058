"""SpecBuilder: the parts that architectures share, each checked against the file's tensors.

An architecture file asks for what it needs; a tensor that is missing, has another shape, or was
never asked for is an error that names it, because the alternative is wrong text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from runtime.config import MIN_CONTEXT
from runtime.errors import ModelError
from runtime.models.checked_tensors import TOKEN_EMBEDDING, CheckedTensors
from runtime.models.gguf_header import MetadataValue
from runtime.models.latent_attention import LatentAttentionSpec
from runtime.models.model_type import label
from runtime.models.rope import RopePairing, RopeSpec, YarnSpec
from runtime.models.spec import (
    Activation,
    AttentionSpec,
    DenseSpec,
    LayerSpec,
    Linear,
    ModelSpec,
    MoeSpec,
    QKNorm,
    RouterScore,
    RouterSpec,
    SharedExpertSpec,
)
from runtime.models.streams import Streams

OUTPUT = "output.weight"
GATING_FUNCTIONS = (RouterScore.SOFTMAX, RouterScore.SIGMOID, RouterScore.SOFTMAX_SELECTED)
"""By the value of the key `expert_gating_func`, from 1."""


class SpecBuilder(CheckedTensors):
    """Builds the spec of one model from its metadata and tensors."""

    def rope(
        self, pairing: RopePairing, head_dim: int, base_key: str = "rope.freq_base"
    ) -> RopeSpec:
        """Rope from the keys `rope.*` and, where the file has it, the tensor rope_freqs.

        base_key: where the base is; a file without it has that of `rope.freq_base`.
        """
        keys = self.keys
        n_rot = keys.count("rope.dimension_count", head_dim, at_least=2)
        if n_rot > head_dim or n_rot % 2:
            raise keys.wrong("rope.dimension_count", f"use an even number up to {head_dim}")
        base = keys.positive(base_key, keys.positive("rope.freq_base", 10000.0))
        if base <= 1.0:
            raise keys.wrong(base_key, "use a number above 1")
        factors = self.optional("rope_freqs.weight", n_rot // 2)
        kind = keys.text("rope.scaling.type", "linear")
        factor = 1.0
        for key in ("rope.scaling.factor", "rope.scale_linear"):  # the second in files of 2023
            if kind != "none" and keys.has(key):
                factor = keys.positive(key)
                break
        if kind in ("none", "linear"):
            return RopeSpec(pairing, n_rot, base, factor=factor, factors=factors)
        if kind != "yarn":
            raise ModelError(
                f"{self.path}: rope scaling '{kind}' is not supported; none, linear and yarn are"
            )
        yarn = YarnSpec(
            n_ctx_original=keys.count(
                "rope.scaling.original_context_length", keys.count("context_length")
            ),
            beta_fast=keys.positive("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=keys.positive("rope.scaling.yarn_beta_slow", 1.0),
        )
        magnitude = keys.positive("rope.scaling.attn_factor", 1.0)
        magnitude *= 1.0 + 0.1 * math.log(max(factor, 1.0))
        return RopeSpec(pairing, n_rot, base, factor, yarn, magnitude, factors)

    def attention(
        self,
        layer: int,
        pairing: RopePairing,
        qk_norm: QKNorm = QKNorm.NONE,
        *,
        base_key: str = "rope.freq_base",
        window: int | None = None,
        may_have_sinks: bool = False,
        value_scale: float = 1.0,
        gated: bool = False,
    ) -> AttentionSpec:
        """Attention of layer `layer`, its projections fused or split as in the file."""
        keys, prefix = self.keys, f"blk.{layer}."
        n_head = keys.count_of_layer("attention.head_count", layer)
        n_head_kv = keys.count_of_layer("attention.head_count_kv", layer, n_head)
        if n_head % n_head_kv:
            raise keys.wrong("attention.head_count_kv", f"does not divide {n_head} heads")
        if not keys.has("attention.key_length") and self.n_embd % n_head:
            raise keys.wrong("attention.head_count", f"does not divide {self.n_embd} dimensions")
        dim_k = keys.count("attention.key_length", self.n_embd // n_head)
        dim_v = keys.count("attention.value_length", self.n_embd // n_head)
        n_q, n_k, n_v = n_head * dim_k, n_head_kv * dim_k, n_head_kv * dim_v
        q_norm = k_norm = None
        if qk_norm is not QKNorm.NONE:
            by_head = qk_norm is QKNorm.HEAD
            q_norm = self.tensor(f"{prefix}attn_q_norm.weight", dim_k if by_head else n_q)
            k_norm = self.tensor(f"{prefix}attn_k_norm.weight", dim_k if by_head else n_k)
        return AttentionSpec(
            n_head=n_head,
            n_head_kv=n_head_kv,
            head_dim_k=dim_k,
            head_dim_v=dim_v,
            qkv=self.qkv(prefix, n_q + gated * n_head * dim_v, n_k, n_v),
            output=self.linear(f"{prefix}attn_output", n_head * dim_v, self.n_embd),
            scale=dim_k**-0.5,
            rope=self.rope(pairing, dim_k, base_key),
            qk_norm=qk_norm,
            q_norm=q_norm,
            k_norm=k_norm,
            window=window,
            sinks=self.optional(f"{prefix}attn_sinks.weight", n_head) if may_have_sinks else None,
            value_scale=value_scale,
            gated=gated,
        )

    def qkv(self, prefix: str, n_q: int, n_k: int, n_v: int) -> tuple[Linear, ...]:
        """The projections of queries, keys and values, fused or split as in the file."""
        if self.has(f"{prefix}attn_qkv.weight"):
            return (self.linear(f"{prefix}attn_qkv", self.n_embd, n_q + n_k + n_v),)
        widths = {"q": n_q, "k": n_k, "v": n_v}
        return tuple(
            self.linear(f"{prefix}attn_{part}", self.n_embd, width)
            for part, width in widths.items()
        )

    def latent_attention(
        self, layer: int, rope: RopeSpec | None, scale_factor: float = 1.0
    ) -> LatentAttentionSpec:
        """Latent attention of layer `layer`; rope: of the last dimensions of heads, None: nowhere.

        scale_factor: multiplies the usual scale, 1 / sqrt(dimensions of a head).
        """
        keys, prefix = self.keys, f"blk.{layer}."
        n_head = keys.count_of_layer("attention.head_count", layer)
        dim_latent = keys.count("attention.kv_lora_rank")
        dim_q = keys.count("attention.key_length_mla")
        dim_v = keys.count("attention.value_length_mla")
        dim_rope = 0 if rope is None else rope.n_rot
        if dim_q <= dim_rope:
            raise keys.wrong("attention.key_length_mla", f"rope alone takes {dim_rope} dimensions")
        width, query_norm = n_head * dim_q, None
        if self.has(f"{prefix}attn_q_a.weight"):
            rank = keys.count("attention.q_lora_rank")
            query_norm = self.tensor(f"{prefix}attn_q_a_norm.weight", rank)
            query: tuple[Linear, ...] = (
                self.linear(f"{prefix}attn_q_a", self.n_embd, rank),
                self.linear(f"{prefix}attn_q_b", rank, width),
            )
        else:
            query = (self.linear(f"{prefix}attn_q", self.n_embd, width),)
        return LatentAttentionSpec(
            n_head=n_head,
            dim_nope=dim_q - dim_rope,
            dim_rope=dim_rope,
            dim_latent=dim_latent,
            dim_v=dim_v,
            query=query,
            query_norm=query_norm,
            latent=self.linear(f"{prefix}attn_kv_a_mqa", self.n_embd, dim_latent + dim_rope),
            latent_norm=self.tensor(f"{prefix}attn_kv_a_norm.weight", dim_latent),
            key_up=self.linear(f"{prefix}attn_k_b", dim_q - dim_rope, dim_latent, n_head),
            value_up=self.linear(f"{prefix}attn_v_b", dim_latent, dim_v, n_head),
            output=self.linear(f"{prefix}attn_output", n_head * dim_v, self.n_embd),
            scale=dim_q**-0.5 * scale_factor,
            rope=rope,
        )

    def dense(
        self,
        layer: int,
        n_ff: int,
        suffix: str = "",
        activation: Activation = Activation.SWIGLU,
        limit: float = 0.0,
    ) -> DenseSpec:
        """The feed-forward tensors `ffn_gate`, `ffn_up`, `ffn_down` with `suffix`."""
        name = f"blk.{layer}.ffn_{{}}{suffix}".format
        return DenseSpec(
            n_ff=n_ff,
            gate_up=(
                self.linear(name("gate"), self.n_embd, n_ff),
                self.linear(name("up"), self.n_embd, n_ff),
            ),
            down=self.linear(name("down"), n_ff, self.n_embd),
            activation=activation,
            activation_limit=limit,
        )

    def moe(
        self,
        layer: int,
        n_ff: int,
        score: RouterScore,
        renormalise: bool,
        shared: SharedExpertSpec | None = None,
        activation: Activation = Activation.SWIGLU,
        limit: float = 0.0,
    ) -> MoeSpec:
        """Routed experts of layer `layer`, gate and up merged or split as in the file."""
        keys, prefix = self.keys, f"blk.{layer}."
        n_expert = keys.count("expert_count")
        n_used = keys.count("expert_used_count")
        if n_used > n_expert:
            raise keys.wrong("expert_used_count", f"the model has {n_expert} experts")
        merged = self.has(f"{prefix}ffn_gate_up_exps.weight")
        width = 2 * n_ff if merged else n_ff
        return MoeSpec(
            n_expert=n_expert,
            n_used=n_used,
            n_ff=n_ff,
            router=self._router(layer, score, renormalise, n_expert, n_used),
            gate_up=tuple(
                self.linear(f"{prefix}ffn_{name}_exps", self.n_embd, width, n_expert)
                for name in (("gate_up",) if merged else ("gate", "up"))
            ),
            down=self.linear(f"{prefix}ffn_down_exps", n_ff, self.n_embd, n_expert),
            activation=activation,
            activation_limit=limit,
            shared=shared,
        )

    def ungated_shared_expert(self, layer: int, n_ff: int) -> SharedExpertSpec | None:
        """The shared experts of layer `layer`, `n_ff` wide each, which a file stores as one."""
        n_shared = self.keys.count("expert_shared_count", 0, at_least=0)
        if n_shared == 0:
            return None
        return SharedExpertSpec(self.dense(layer, n_shared * n_ff, "_shexp"))

    def router_score(self, default: RouterScore) -> RouterScore:
        """What the key `expert_gating_func` says; absent or 0: `default`."""
        number = self.keys.count("expert_gating_func", 0, at_least=0)
        if number > len(GATING_FUNCTIONS):
            raise self.keys.wrong("expert_gating_func", f"use 0 to {len(GATING_FUNCTIONS)}")
        return GATING_FUNCTIONS[number - 1] if number else default

    def _router(
        self, layer: int, score: RouterScore, renormalise: bool, n_expert: int, n_used: int
    ) -> RouterSpec:
        keys, prefix = self.keys, f"blk.{layer}."
        # Zero means "not set" in these keys.
        key = "expert_weights_scale"
        scaled = keys.has(key) and keys.number(key) != 0.0
        n_groups = max(1, keys.count("expert_group_count", 0, at_least=0))
        n_groups_used = max(1, keys.count("expert_group_used_count", 0, at_least=0))
        if n_expert % n_groups:
            raise keys.wrong("expert_group_count", f"does not divide {n_expert} experts")
        if n_groups_used > n_groups or n_used > n_expert // n_groups * n_groups_used:
            raise keys.wrong(
                "expert_group_used_count",
                f"{n_groups_used} of {n_groups} groups cannot have the {n_used} experts in use",
            )
        return RouterSpec(
            linear=self.linear(f"{prefix}ffn_gate_inp", self.n_embd, n_expert),
            score=score,
            renormalise=renormalise,
            scale=keys.positive(key) if scaled else 1.0,
            selection_bias=self.optional(f"{prefix}exp_probs_b.bias", n_expert),
            n_groups=n_groups,
            n_groups_used=n_groups_used,
        )

    def model(
        self,
        layers: list[LayerSpec],
        may_be_tied: bool,
        *,
        output_norm: str | None = None,
        n_stream: int = 1,
        output_streams: Streams | None = None,
    ) -> ModelSpec:
        """The whole model; without `output.weight` the embedding table is the output matrix.

        output_norm: where it is not the tensor of that name.
        Raises: CorruptModel for contradictions and for tensors that no part has asked for.
        """
        n_vocab = self.n_vocab()
        embedding = self.tensor(TOKEN_EMBEDDING, self.n_embd, n_vocab)
        tied = may_be_tied and not self.has(OUTPUT)
        matrix = "token_embd" if tied else "output"
        spec = ModelSpec(
            architecture=self.keys.architecture,
            name=_name(self.keys.metadata, self.path),
            n_vocab=n_vocab,
            n_embd=self.n_embd,
            n_ctx_train=self.keys.count("context_length", at_least=MIN_CONTEXT),
            eps=self.keys.positive("attention.layer_norm_rms_epsilon"),
            token_embedding=embedding,
            layers=tuple(layers),
            output_norm=output_norm or self.tensor("output_norm.weight", self.n_embd),
            output=self.linear(matrix, self.n_embd, n_vocab),
            n_stream=n_stream,
            output_streams=output_streams,
        )
        self.refuse_unknown()
        return spec


def _name(metadata: Mapping[str, MetadataValue], path: Path) -> str:
    return label(metadata.get("general.name")) or label(path.stem)
