"""Tiny models with recurrent layers: delta nets beside attention.

Those of `TINY_MODELS` that keep a state: order and formula of every draw decide the weights and
must not change.
"""

from __future__ import annotations

from tests.support.gguf_writer import ARRAY, UINT64, Typed
from tests.support.tiny_model import N_VOCAB, TinyModel

N_EMBD = 64
N_HEAD, N_HEAD_KV, HEAD_DIM = 4, 2, 32


def qwen35() -> TinyModel:
    return _qwen35("qwen35")


def qwen35moe() -> TinyModel:
    return _qwen35("qwen35moe")


def qwen4exp(n_low: int = 24) -> TinyModel:
    model = TinyModel("qwen4exp")
    n_layers, n_stream, n_expert, n_ff, n_ff_shared = 8, 4, 8, 32, 24
    _hybrid(model, n_layers, n_value_head=4)
    _routed(model, n_expert, n_ff, n_ff_shared)
    model.set(hyper_connection__count=n_stream, hyper_connection__low_rank=n_low)
    model.set(attention__indexer__head_count=8, attention__indexer__key_length=16)
    model.set(attention__indexer__top_k=8)
    attends = [i >= n_layers or (i + 1) % 4 == 0 for i in range(n_layers + 1)]
    model.set(attention__compress_ratios=[4 if flag else 0 for flag in attends])
    _ngram_keys(model)
    model.embedding(N_EMBD)
    model.matrix("output.weight", N_EMBD, N_VOCAB)
    width = n_stream * N_EMBD
    _streams(model, "output_hc", n_low, n_stream, returns=False)
    model.table("per_layer_token_embd.weight", N_EMBD // 4, 420)
    for i in range(n_layers + 1):
        _streams(model, f"blk.{i}.hc_attn", n_low, n_stream)
        _streams(model, f"blk.{i}.hc_ffn", n_low, n_stream)
        if attends[i]:
            _gated_attention(model, i)
            model.matrix(f"blk.{i}.indexer.q_proj.weight", N_EMBD, 8 * 16)
            model.matrix(f"blk.{i}.indexer.k_proj.weight", N_EMBD, 16)
            model.norm(f"blk.{i}.indexer.q_norm.weight", 16)
            model.norm(f"blk.{i}.indexer.k_norm.weight", 16)
        else:
            _delta_net(model, i, n_value_head=4)
        if i == 1:
            model.matrix(f"blk.{i}.ple_key.weight", N_EMBD, width)
            model.matrix(f"blk.{i}.ple_value.weight", N_EMBD, N_EMBD)
            for name in ("key", "query", "conv"):
                model.norm(f"blk.{i}.ple_norm_{name}.weight", width)
            model.taps(f"blk.{i}.ple_conv1d.weight", 4, width)
        _experts(model, i, n_expert, n_ff, n_ff_shared)
        if i == n_layers:
            model.matrix(f"blk.{i}.nextn.eh_proj.weight", 2 * N_EMBD, N_EMBD)
            model.norm(f"blk.{i}.nextn.enorm.weight", N_EMBD)
            model.norm(f"blk.{i}.nextn.hnorm.weight", width)
            _streams(model, f"blk.{i}.nextn.hc_head", n_low, n_stream, returns=False)
    return model


def glm5_next(kda_dim: int = 16, latent: int = 32, n_head: int = N_HEAD) -> TinyModel:
    """Layers 1, 4 and 5 attend, 5 to what 4 has chosen; the others are KDA."""
    model = TinyModel("glm5-next")
    n_layers, n_expert, n_ff, n_dense = 6, 8, 32, 96
    n_head_kv = [0, 1, 0, 0, 1, 1, 1]
    model.base(N_EMBD, n_layers + 1, n_head, n_head_kv, n_ff=n_dense)
    model.set(attention__key_length=latent, attention__value_length=latent)
    model.set(rope__dimension_count=0)
    model.set(nextn_predict_layers=1, attention__layer_norm_epsilon=1e-6, ssm__conv_kernel=4)
    model.set(kda__head_dim=kda_dim, kda__gate_lower_bound=-5.0)
    model.set(attention__q_lora_rank=48, attention__kv_lora_rank=latent)
    model.set(attention__key_length_mla=16, attention__value_length_mla=24)
    model.set(attention__indexer__head_count=24, attention__indexer__key_length=16)
    model.set(attention__indexer__top_k=8, attention__indexer__kpool=4)
    model.set(attention__indexer__kpool_select_tail=True)
    model.set(attention__indexer__types=[True] * 5 + [False])
    model.set(hyper_connection__count=4, hyper_connection__sinkhorn_iterations=20)
    model.set(hyper_connection__epsilon=1e-6, leading_dense_block_count=1)
    model.set(expert_count=n_expert, expert_used_count=3, expert_feed_forward_length=n_ff)
    model.set(expert_shared_count=1, expert_weights_scale=2.5, expert_weights_norm=True)
    model.set(swiglu_clamp_exp=[1.5] * 7, swiglu_clamp_shexp=[1.2] * 7)
    model.ends(N_EMBD)
    for i in range(n_layers + 1):
        model.norms(i, attn_norm=N_EMBD, ffn_norm=N_EMBD)
        if i < n_layers:
            for name in (f"blk.{i}.hc_attn", f"blk.{i}.hc_ffn"):
                model.matrix(f"{name}_fn.weight", 4 * N_EMBD, 24)
                model.bias(f"{name}_base.weight", 24, gain=3)
                model.norm(f"{name}_scale.weight", 3)
        if n_head_kv[i] == 0:
            _kda(model, i, kda_dim, n_head)
        else:
            _sparse_latent(model, i, latent, n_head, has_indexer=i != 5)
        if i < 1:
            model.dense(i, N_EMBD, n_dense, gain=2)
        else:
            model.experts(i, N_EMBD, n_ff, n_expert)
            model.bias(f"blk.{i}.exp_probs_b.bias", n_expert)
            model.dense(i, N_EMBD, n_ff, "_shexp", gain=2)
        if i == n_layers:
            model.matrix(f"blk.{i}.nextn.eh_proj.weight", 2 * N_EMBD, N_EMBD)
            for name in ("enorm", "hnorm", "shared_head_norm"):
                model.norm(f"blk.{i}.nextn.{name}.weight", N_EMBD)
    return model


def _kda(model: TinyModel, layer: int, dim: int, n_head: int) -> None:
    prefix, width = f"blk.{layer}.", dim * n_head
    for part in "qkv":
        model.taps(f"{prefix}ssm_conv1d_{part}.weight", 4, 1, width, 1)
    model.attention(layer, N_EMBD, width, width)
    model.matrix(f"{prefix}ssm_f_a.weight", N_EMBD, dim)
    model.matrix(f"{prefix}ssm_f_b.weight", dim, width)
    model.matrix(f"{prefix}ssm_beta.weight", N_EMBD, n_head)
    model.rates(f"{prefix}ssm_a", n_head)
    model.bias(f"{prefix}ssm_dt.bias", width)
    model.matrix(f"{prefix}ssm_g_a.weight", N_EMBD, dim)
    model.matrix(f"{prefix}ssm_g_b.weight", dim, width)
    model.norm(f"{prefix}ssm_norm.weight", dim)


def _sparse_latent(
    model: TinyModel, layer: int, latent: int, n_head: int, has_indexer: bool
) -> None:
    prefix, rank, dim_q, dim_v, dim = f"blk.{layer}.", 48, 16, 24, 16
    model.norms(layer, attn_q_a_norm=rank, attn_kv_a_norm=latent)
    model.matrix(f"{prefix}attn_q_a.weight", N_EMBD, rank)
    model.matrix(f"{prefix}attn_q_b.weight", rank, n_head * dim_q)
    model.matrix(f"{prefix}attn_kv_a_mqa.weight", N_EMBD, latent)
    model.matrix(f"{prefix}attn_k_b.weight", dim_q, latent, n_head)
    model.matrix(f"{prefix}attn_v_b.weight", latent, dim_v, n_head)
    model.matrix(f"{prefix}attn_output.weight", n_head * dim_v, N_EMBD)
    if has_indexer:
        model.norm(f"{prefix}indexer.k_norm.weight", dim)
        model.bias(f"{prefix}indexer.k_norm.bias", dim)
        model.matrix(f"{prefix}indexer.proj.weight", N_EMBD, 24)
        model.matrix(f"{prefix}indexer.attn_k.weight", N_EMBD, dim)
        model.matrix(f"{prefix}indexer.attn_q_b.weight", rank, 24 * dim)
        model.matrix(f"{prefix}indexer_compressor_gate.weight", N_EMBD, dim)
        model.bias(f"{prefix}indexer_compressor_ape.weight", dim, 4)


def _ngram_keys(model: TinyModel) -> None:
    sizes, offsets = [101, 103, 107, 109], [0, 101, 204, 311]
    multipliers = [35184372088833, 17592186044399, 29000000000033]
    model.set(ple__layers=[1], ple__ngram_size=3, ple__heads_per_ngram=2, ple__conv_kernel=4)
    model.set(ple__eos_token_id=7, embedding_length_per_layer_input=N_EMBD // 4)
    for name, values in (
        ("layer_multipliers", multipliers),
        ("head_offsets", offsets),
        ("head_vocab_sizes", sizes),
    ):
        typed = [Typed(UINT64, value) for value in values]
        model.set(**{f"ple__{name}": Typed(ARRAY, typed)})


def _streams(model: TinyModel, name: str, n_low: int, n_stream: int, returns: bool = True) -> None:
    width = n_stream * N_EMBD
    model.norm(f"{name}_norm.weight", width)
    model.matrix(f"{name}_down.weight", width, n_low, gain=2)
    model.matrix(f"{name}_up.weight", n_low, width, gain=3)
    if returns:
        model.matrix(f"{name}_inject.weight", width, n_stream, gain=3)


def _qwen35(architecture: str) -> TinyModel:
    model = TinyModel(architecture)
    n_layers, n_expert, n_ff, n_ff_shared = 4, 8, 32, 24
    _hybrid(model, n_layers, n_value_head=6)
    is_moe = architecture.endswith("moe")
    if is_moe:
        _routed(model, n_expert, n_ff, n_ff_shared)
    model.ends(N_EMBD)
    for i in range(n_layers + 1):
        model.norms(i, attn_norm=N_EMBD, post_attention_norm=N_EMBD)
        if i >= n_layers or (i + 1) % 4 == 0:
            _gated_attention(model, i)
        else:
            _delta_net(model, i, n_value_head=6)
        if is_moe:
            _experts(model, i, n_expert, n_ff, n_ff_shared)
        else:
            model.dense(i, N_EMBD, 96)
        if i == n_layers:
            model.matrix(f"blk.{i}.nextn.eh_proj.weight", 2 * N_EMBD, N_EMBD)
            for name in ("enorm", "hnorm", "shared_head_norm"):
                model.norm(f"blk.{i}.nextn.{name}.weight", N_EMBD)
    return model


def _hybrid(model: TinyModel, n_layers: int, n_value_head: int) -> None:
    model.base(N_EMBD, n_layers + 1, N_HEAD, N_HEAD_KV, n_ff=96, eps=1e-6, rope_base=1e7)
    model.set(attention__key_length=HEAD_DIM, attention__value_length=HEAD_DIM)
    model.set(rope__dimension_count=16, rope__dimension_sections=[3, 3, 2, 0])
    model.set(nextn_predict_layers=1, full_attention_interval=4)
    model.set(ssm__conv_kernel=4, ssm__state_size=16, ssm__group_count=2)
    model.set(ssm__time_step_rank=n_value_head, ssm__inner_size=16 * n_value_head)


def _routed(model: TinyModel, n_expert: int, n_ff: int, n_ff_shared: int) -> None:
    model.set(expert_count=n_expert, expert_used_count=3, expert_feed_forward_length=n_ff)
    model.set(expert_shared_feed_forward_length=n_ff_shared)


def _gated_attention(model: TinyModel, layer: int) -> None:
    prefix, n_q, n_kv = f"blk.{layer}.attn_", N_HEAD * HEAD_DIM, N_HEAD_KV * HEAD_DIM
    for part, width in (("q", 2 * n_q), ("k", n_kv), ("v", n_kv)):
        model.matrix(f"{prefix}{part}.weight", N_EMBD, width)
    model.matrix(f"{prefix}output.weight", n_q, N_EMBD)
    model.norms(layer, attn_q_norm=HEAD_DIM, attn_k_norm=HEAD_DIM)


def _delta_net(model: TinyModel, layer: int, n_value_head: int) -> None:
    prefix, dim = f"blk.{layer}.", 16
    n_key, n_value = 2 * dim, n_value_head * dim
    model.matrix(f"{prefix}attn_qkv.weight", N_EMBD, 2 * n_key + n_value)
    model.matrix(f"{prefix}attn_gate.weight", N_EMBD, n_value)
    model.taps(f"{prefix}ssm_conv1d.weight", 4, 2 * n_key + n_value)
    model.bias(f"{prefix}ssm_dt.bias", n_value_head)
    model.rates(f"{prefix}ssm_a", n_value_head)
    model.matrix(f"{prefix}ssm_beta.weight", N_EMBD, n_value_head)
    model.matrix(f"{prefix}ssm_alpha.weight", N_EMBD, n_value_head)
    model.norm(f"{prefix}ssm_norm.weight", dim)
    model.matrix(f"{prefix}ssm_out.weight", n_value, N_EMBD)


def _experts(model: TinyModel, layer: int, n_expert: int, n_ff: int, n_ff_shared: int) -> None:
    model.experts(layer, N_EMBD, n_ff, n_expert)
    model.dense(layer, N_EMBD, n_ff_shared, "_shexp")
    model.matrix(f"blk.{layer}.ffn_gate_inp_shexp.weight", N_EMBD)
