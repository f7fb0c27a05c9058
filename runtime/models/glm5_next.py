"""GLM 5.3 Flash: KDA and sparse latent attention, four residual streams, clamped experts.

There is no position embedding anywhere.  Files name the architecture `glm5-next` or `glm5next`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from runtime.errors import ModelError
from runtime.models.builder import SpecBuilder
from runtime.models.delta_net import DeltaNetSpec, GateFunction
from runtime.models.indexer import IndexerSpec
from runtime.models.latent_attention import LatentAttentionSpec
from runtime.models.spec import (
    Activation,
    FeedForward,
    LayerSpec,
    Mixer,
    ModelSpec,
    RouterScore,
    SharedExpertSpec,
)
from runtime.models.streams import MeanStreams, SinkhornStreams

KDA_L2_EPS = 1e-6
MAX_ITERATIONS = 1024
"""Of the division into a doubly stochastic matrix, for every token and block: models have 20."""
PAGE_TOKENS = 32
"""Blocks of the sparse attention must not cross pages of the cache."""


def build(builder: SpecBuilder) -> ModelSpec:
    """The spec of a `glm5-next` or `glm5next` file."""
    n_stream = builder.keys.count("hyper_connection.count", at_least=2)
    layers = [
        LayerSpec(
            mixer_norm=builder.tensor(f"blk.{i}.attn_norm.weight", builder.n_embd),
            mixer=_mixer(builder, i),
            feed_forward_norm=builder.tensor(f"blk.{i}.ffn_norm.weight", builder.n_embd),
            feed_forward=_feed_forward(builder, i),
            mixer_streams=_streams(builder, f"blk.{i}.hc_attn", n_stream),
            feed_forward_streams=_streams(builder, f"blk.{i}.hc_ffn", n_stream),
        )
        for i in range(builder.n_layers)
    ]
    return builder.model(layers, may_be_tied=False, n_stream=n_stream, output_streams=MeanStreams())


def _streams(builder: SpecBuilder, name: str, n_stream: int) -> SinkhornStreams:
    keys, n_mix = builder.keys, n_stream * (n_stream + 2)
    return SinkhornStreams(
        mix=builder.linear(f"{name}_fn", n_stream * builder.n_embd, n_mix),
        base=builder.tensor(f"{name}_base.weight", n_mix),
        scale=builder.tensor(f"{name}_scale.weight", 3),
        n_iterations=keys.count("hyper_connection.sinkhorn_iterations", at_most=MAX_ITERATIONS),
        epsilon=keys.positive("hyper_connection.epsilon"),
    )


def _mixer(builder: SpecBuilder, layer: int) -> Mixer:
    return _attention(builder, layer) if _has_keys(builder, layer) else _kda(builder, layer)


def _has_keys(builder: SpecBuilder, layer: int) -> bool:
    """Whether `layer` is sparse latent attention: KDA is where the file gives no key heads."""
    return builder.keys.count_of_layer("attention.head_count_kv", layer, at_least=0) > 0


def _kda(builder: SpecBuilder, layer: int) -> DeltaNetSpec:
    keys, n_embd, prefix = builder.keys, builder.n_embd, f"blk.{layer}."
    n_head, dim = keys.count_of_layer("attention.head_count", layer), keys.count("kda.head_dim")
    n_taps, width = keys.count("ssm.conv_kernel", at_least=2), n_head * dim
    if dim % 16:
        raise keys.wrong("kda.head_dim", "use a multiple of 16")
    floor = "kda.gate_lower_bound"
    if keys.has(floor) and keys.number(floor) > 0.0:
        raise keys.wrong(floor, "use a number up to 0: states would grow without end")
    return DeltaNetSpec(
        n_key_head=n_head,
        n_value_head=n_head,
        head_dim=dim,
        n_taps=n_taps,
        qkv=builder.qkv(prefix, width, width, width),
        conv=tuple(
            _taps(builder, f"{prefix}ssm_conv1d_{part}.weight", n_taps, width) for part in "qkv"
        ),
        decay=(
            builder.linear(f"{prefix}ssm_f_a", n_embd, dim),
            builder.linear(f"{prefix}ssm_f_b", dim, width),
        ),
        decay_bias=builder.tensor(f"{prefix}ssm_dt.bias", width),
        decay_rate=builder.tensor(f"{prefix}ssm_a", n_head),
        decay_floor=keys.number(floor) if keys.has(floor) else None,
        beta=builder.linear(f"{prefix}ssm_beta", n_embd, n_head),
        gate=(
            builder.linear(f"{prefix}ssm_g_a", n_embd, dim),
            builder.linear(f"{prefix}ssm_g_b", dim, width),
        ),
        gate_function=GateFunction.SIGMOID,
        norm=builder.tensor(f"{prefix}ssm_norm.weight", dim),
        output=builder.linear(f"{prefix}attn_output", width, n_embd),
        l2_eps=KDA_L2_EPS,
    )


def _taps(builder: SpecBuilder, name: str, n_taps: int, width: int) -> str:
    """Taps that files store with or without a dimension of one in the middle."""
    middle = (1,) if len(builder.shape(name)) > 2 else ()
    return builder.tensor(name, n_taps, *middle, width)


def _attention(builder: SpecBuilder, layer: int) -> LatentAttentionSpec:
    attention = builder.latent_attention(layer, rope=None)
    types = "attention.indexer.types"
    if builder.keys.has(types) and not builder.keys.flag_of_layer(types, layer):
        before = filter(partial(_has_keys, builder), range(layer))
        if not any(builder.keys.flag_of_layer(types, i) for i in before):
            raise builder.keys.wrong(types, f"layer {layer} has no indexer, nor one before it")
        return replace(attention, reads_as_before=True)
    if attention.query_norm is None:
        raise builder.keys.wrong("attention.q_lora_rank", "the indexer needs it")
    return replace(attention, indexer=_indexer(builder, layer, attention.query[0].n_out))


def _indexer(builder: SpecBuilder, layer: int, query_rank: int) -> IndexerSpec:
    keys, n_embd, prefix = builder.keys, builder.n_embd, f"blk.{layer}."
    n_head = keys.count("attention.indexer.head_count")
    dim, block = keys.count("attention.indexer.key_length"), keys.count("attention.indexer.kpool")
    n_best = keys.count("attention.indexer.top_k") // block
    if PAGE_TOKENS % block or dim % block:
        raise keys.wrong("attention.indexer.kpool", "use 1, 2, 4, 8, 16 or 32")
    if n_best < 1:
        raise keys.wrong("attention.indexer.top_k", f"use at least {block}, one block")
    if not keys.flag("attention.indexer.kpool_select_tail", True):
        raise ModelError(f"{builder.path}: sparse attention without the last tokens is not known")
    return IndexerSpec(
        n_head=n_head,
        head_dim=dim,
        block=block,
        n_best=n_best,
        query=builder.linear(f"{prefix}indexer.attn_q_b", query_rank, n_head * dim),
        key=builder.linear(f"{prefix}indexer.attn_k", n_embd, dim),
        key_norm=builder.tensor(f"{prefix}indexer.k_norm.weight", dim),
        key_bias=builder.tensor(f"{prefix}indexer.k_norm.bias", dim),
        key_eps=keys.positive("attention.layer_norm_epsilon"),
        pool_gate=builder.linear(f"{prefix}indexer_compressor_gate", n_embd, dim),
        pool_bias=builder.tensor(f"{prefix}indexer_compressor_ape.weight", dim, block),
        weight=builder.linear(f"{prefix}indexer.proj", n_embd, n_head),
        scale=(dim * n_head) ** -0.5,
    )


def _feed_forward(builder: SpecBuilder, layer: int) -> FeedForward:
    keys = builder.keys
    activation, limit = _clamp(builder, "swiglu_clamp_shexp", layer)
    if layer < keys.count("leading_dense_block_count", 0, at_least=0):
        n_ff = keys.count_of_layer("feed_forward_length", layer)
        return builder.dense(layer, n_ff, activation=activation, limit=limit)
    n_ff, n_shared = keys.count("expert_feed_forward_length"), keys.count("expert_shared_count", 1)
    shared = builder.dense(layer, n_shared * n_ff, "_shexp", activation, limit)
    activation, limit = _clamp(builder, "swiglu_clamp_exp", layer)
    return builder.moe(
        layer,
        n_ff,
        builder.router_score(RouterScore.SIGMOID),
        renormalise=keys.flag("expert_weights_norm", True),
        shared=SharedExpertSpec(shared),
        activation=activation,
        limit=limit,
    )


def _clamp(builder: SpecBuilder, key: str, layer: int) -> tuple[Activation, float]:
    """The activation of blocks that `key` clamps, where it is not about 0."""
    limit = builder.keys.number_of_layer(key, layer, 0.0)
    if limit > 1e-6:
        return Activation.SWIGLU_CLAMPED, limit
    return Activation.SWIGLU, 0.0
