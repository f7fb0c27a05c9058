"""Tiny models with windows, sinks, biased or selected experts, and latent attention.

Those of `TINY_MODELS` that are not of the plain kind: order and formula of every draw decide the
weights and must not change.
"""

from __future__ import annotations

from tests.support.tiny_model import TinyModel


def gpt_oss(n_layers: int = 4, window: int = 6, n_embd: int = 64, n_ff: int = 32) -> TinyModel:
    model = TinyModel("gpt-oss")
    head_dim, n_expert = 32, 8
    model.base(n_embd, n_layers, n_head=4, n_head_kv=2, n_ff=n_ff, rope_base=150000.0)
    model.set(attention__key_length=head_dim, attention__value_length=head_dim)
    model.set(expert_count=n_expert, expert_used_count=4, expert_feed_forward_length=n_ff)
    model.set(attention__sliding_window=window)
    _yarn(model, 32.0)
    model.ends(n_embd)
    for i in range(n_layers):
        model.norms(i, attn_norm=n_embd)
        model.attention(i, n_embd, 4 * head_dim, 2 * head_dim, bias=True)
        model.bias(f"blk.{i}.attn_output.bias", n_embd)
        model.bias(f"blk.{i}.attn_sinks.weight", 4, gain=3)
        model.norms(i, post_attention_norm=n_embd)
        model.experts(i, n_embd, n_ff, n_expert)
        model.expert_biases(i, n_embd, n_ff, n_expert)
    return model


def glm4moe() -> TinyModel:
    model = TinyModel("glm4moe")
    n_embd, n_layers, head_dim, n_ff, n_expert = 64, 3, 32, 32, 8
    model.base(n_embd, n_layers + 1, n_head=4, n_head_kv=2, n_ff=96, rope_base=1e6)
    model.set(attention__key_length=head_dim, attention__value_length=head_dim)
    model.set(rope__dimension_count=16, nextn_predict_layers=1, leading_dense_block_count=1)
    _routed(model, n_expert, n_ff)
    model.set(expert_shared_count=1, expert_weights_scale=1.7)
    model.ends(n_embd)
    for i in range(n_layers + 1):
        model.norms(i, attn_norm=n_embd)
        model.attention(i, n_embd, 4 * head_dim, 2 * head_dim, bias=True)
        model.norms(i, attn_q_norm=head_dim, attn_k_norm=head_dim, post_attention_norm=n_embd)
        _feed_forward(model, i, n_embd, 96, n_ff, n_expert, is_dense=i < 1)
        if i == n_layers:
            _draft(model, i, n_embd)
    return model


def mimo2() -> TinyModel:
    model = TinyModel("mimo2")
    n_embd, n_layers, n_draft, n_head, dim_k, dim_v = 64, 4, 3, 4, 24, 16
    windowed = [0, 1, 1, 0] + [1] * n_draft
    n_head_kv = [2 if flag else 1 for flag in windowed]
    model.base(n_embd, n_layers + n_draft, n_head, n_head_kv, n_ff=96, rope_base=5e6)
    model.set(attention__key_length=dim_k, attention__value_length=dim_v)
    model.set(rope__dimension_count=8, rope__freq_base_swa=10000.0, nextn_predict_layers=n_draft)
    model.set(attention__sliding_window=7, attention__sliding_window_pattern=windowed)
    model.set(attention__value_scale=0.612)
    _routed(model, 8, 32)
    model.ends(n_embd)
    for i in range(n_layers + n_draft):
        model.norms(i, attn_norm=n_embd, ffn_norm=n_embd)
        width = n_head * dim_k + n_head_kv[i] * (dim_k + dim_v)
        model.matrix(f"blk.{i}.attn_qkv.weight", n_embd, width)
        model.matrix(f"blk.{i}.attn_output.weight", n_head * dim_v, n_embd)
        if windowed[i]:
            model.bias(f"blk.{i}.attn_sinks.weight", n_head, gain=3)
        if i == 0 or i >= n_layers:
            model.dense(i, n_embd, 96)
        else:
            model.experts(i, n_embd, 32, 8)
            model.bias(f"blk.{i}.exp_probs_b.bias", 8)
        if i >= n_layers:
            model.matrix(f"blk.{i}.nextn.eh_proj.weight", 2 * n_embd, n_embd)
            model.norms(i, **{"nextn.enorm": n_embd, "nextn.hnorm": n_embd})
            model.norms(i, layer_output_norm=n_embd)
    return model


def deepseek2() -> TinyModel:
    """The V3 kind: queries through a narrow product, groups of experts."""
    model = TinyModel("deepseek2")
    n_embd, n_layers, n_head, n_ff, n_expert = 64, 3, 4, 32, 8
    rank, latent, nope, rope, dim_v = 48, 32, 16, 8, 24
    model.base(n_embd, n_layers + 1, n_head, n_head_kv=1, n_ff=96, eps=1e-6)
    model.set(nextn_predict_layers=1, attention__q_lora_rank=rank)
    _latent(model, latent, nope, rope, dim_v)
    _routed(model, n_expert, n_ff)
    model.set(expert_shared_count=1, expert_weights_scale=2.5)
    model.set(expert_group_count=4, expert_group_used_count=2)
    _yarn(model, 40.0, 0.1)
    model.ends(n_embd)
    for i in range(n_layers + 1):
        model.norms(i, attn_norm=n_embd, attn_q_a_norm=rank, attn_kv_a_norm=latent)
        model.matrix(f"blk.{i}.attn_q_a.weight", n_embd, rank)
        model.matrix(f"blk.{i}.attn_q_b.weight", rank, n_head * (nope + rope))
        model.matrix(f"blk.{i}.attn_kv_a_mqa.weight", n_embd, latent + rope)
        model.matrix(f"blk.{i}.attn_k_b.weight", nope, latent, n_head)
        model.matrix(f"blk.{i}.attn_v_b.weight", latent, dim_v, n_head)
        model.matrix(f"blk.{i}.attn_output.weight", n_head * dim_v, n_embd)
        model.norms(i, ffn_norm=n_embd)
        _feed_forward(model, i, n_embd, 96, n_ff, n_expert, is_dense=i < 1)
        if i == n_layers:
            _draft(model, i, n_embd)
    return model


def deepseek2_lite(n_layers: int = 27, nope: int = 16) -> TinyModel:
    """The V2-Lite kind, which llama.cpp knows by its 27 layers: plain queries, softmax router."""
    model = TinyModel("deepseek2", seed=3)
    n_embd, n_head, n_ff, n_expert = 64, 4, 32, 8
    latent, rope, dim_v = 32, 8, 24
    model.base(n_embd, n_layers, n_head, n_head_kv=1, n_ff=96, eps=1e-6)
    _latent(model, latent, nope, rope, dim_v)
    model.set(expert_count=n_expert, expert_used_count=3, expert_feed_forward_length=n_ff)
    model.set(expert_shared_count=2, expert_weights_scale=1.0)
    _yarn(model, 40.0, 0.0707)
    model.ends(n_embd)
    for i in range(n_layers):
        model.norms(i, attn_norm=n_embd, attn_kv_a_norm=latent)
        model.matrix(f"blk.{i}.attn_q.weight", n_embd, n_head * (nope + rope))
        model.matrix(f"blk.{i}.attn_kv_a_mqa.weight", n_embd, latent + rope)
        model.matrix(f"blk.{i}.attn_k_b.weight", nope, latent, n_head)
        model.matrix(f"blk.{i}.attn_v_b.weight", latent, dim_v, n_head)
        model.matrix(f"blk.{i}.attn_output.weight", n_head * dim_v, n_embd, gain=0.5)
        model.norms(i, ffn_norm=n_embd)
        if i < 1:
            model.dense(i, n_embd, 96)
        else:
            model.experts(i, n_embd, n_ff, n_expert)
            model.dense(i, n_embd, 2 * n_ff, "_shexp")
    return model


def _yarn(model: TinyModel, factor: float, log_multiplier: float | None = None) -> None:
    model.set(rope__scaling__type="yarn", rope__scaling__factor=factor)
    model.set(rope__scaling__original_context_length=64)
    if log_multiplier is not None:
        model.set(rope__scaling__yarn_log_multiplier=log_multiplier)


def _latent(model: TinyModel, latent: int, nope: int, rope: int, dim_v: int) -> None:
    model.set(attention__key_length=latent + rope, attention__value_length=latent)
    model.set(rope__dimension_count=rope, leading_dense_block_count=1)
    model.set(attention__kv_lora_rank=latent)
    model.set(attention__key_length_mla=nope + rope, attention__value_length_mla=dim_v)


def _routed(model: TinyModel, n_expert: int, n_ff: int) -> None:
    """Sigmoid router of normalised weights."""
    model.set(expert_count=n_expert, expert_used_count=3, expert_feed_forward_length=n_ff)
    model.set(expert_weights_norm=True, expert_gating_func=2)


def _feed_forward(
    model: TinyModel,
    layer: int,
    n_embd: int,
    n_ff_dense: int,
    n_ff: int,
    n_expert: int,
    is_dense: bool,
) -> None:
    if is_dense:
        model.dense(layer, n_embd, n_ff_dense)
        return
    model.experts(layer, n_embd, n_ff, n_expert)
    model.bias(f"blk.{layer}.exp_probs_b.bias", n_expert)
    model.dense(layer, n_embd, n_ff, "_shexp")


def _draft(model: TinyModel, layer: int, n_embd: int) -> None:
    """The tensors that a block for drafting has besides those of a layer."""
    model.matrix(f"blk.{layer}.nextn.eh_proj.weight", 2 * n_embd, n_embd)
    names = ("nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm")
    model.norms(layer, **dict.fromkeys(names, n_embd))
