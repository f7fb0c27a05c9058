"""Tiny models whose matrices are random blocks of a format, as GPU kernels want their experts.

Embedding, router and norms are F32; every width is a multiple of 256.
"""

from __future__ import annotations

from tests.support.tiny_models import TinyModel, _block_matrix, quantized_olmoe

N_EMBD = N_FF = 256
N_HEAD, N_HEAD_KV, HEAD_DIM = 4, 2, 64


def olmoe(fmt: str, n_layers: int = 2) -> TinyModel:
    """Norms over whole rows of queries and keys, no renormalisation."""
    return quantized_olmoe(fmt, n_layers)


def qwen3moe(fmt: str, n_layers: int = 2) -> TinyModel:
    """Norms over each head, grouped queries, renormalised weights."""
    model = _start("qwen3moe", n_layers)
    model.set(attention__key_length=HEAD_DIM, attention__value_length=HEAD_DIM)
    model.set(expert_count=8, expert_used_count=3, expert_feed_forward_length=N_FF)
    for i in range(n_layers):
        _attention(model, i, fmt)
        model.norm(f"blk.{i}.attn_q_norm.weight", HEAD_DIM)
        model.norm(f"blk.{i}.attn_k_norm.weight", HEAD_DIM)
        _experts(model, i, fmt, 8)
    return model


def qwen2moe(fmt: str, n_layers: int = 2) -> TinyModel:
    """Biases of Q, K and V; an expert that every token uses, with its gate."""
    model = _start("qwen2moe", n_layers)
    model.set(expert_count=8, expert_used_count=3, expert_feed_forward_length=N_FF)
    model.set(expert_shared_feed_forward_length=N_FF)
    for i in range(n_layers):
        _attention(model, i, fmt)
        for part, width in (("q", N_HEAD), ("k", N_HEAD_KV), ("v", N_HEAD_KV)):
            model.bias(f"blk.{i}.attn_{part}.bias", width * HEAD_DIM)
        _experts(model, i, fmt, 8)
        for part in ("gate", "up", "down"):
            _block_matrix(model, f"blk.{i}.ffn_{part}_shexp.weight", fmt, N_EMBD, N_FF)
        model.matrix(f"blk.{i}.ffn_gate_inp_shexp.weight", N_EMBD)
    return model


def llama(fmt: str, n_layers: int = 2) -> TinyModel:
    """Dense, with neighbouring rope pairs and a tied output."""
    model = TinyModel("llama", seed=11)
    _sizes(model, n_layers)
    model.set(rope__dimension_count=HEAD_DIM)
    model.ends(N_EMBD, output=False)
    for i in range(n_layers):
        _attention(model, i, fmt)
        for part in ("gate", "up", "down"):
            _block_matrix(model, f"blk.{i}.ffn_{part}.weight", fmt, N_EMBD, N_FF)
    return model


BLOCK_MODELS = {"llama": llama, "olmoe": olmoe, "qwen2moe": qwen2moe, "qwen3moe": qwen3moe}


def _start(architecture: str, n_layers: int) -> TinyModel:
    model = TinyModel(architecture, seed=11)
    _sizes(model, n_layers)
    model.ends(N_EMBD)
    return model


def _sizes(model: TinyModel, n_layers: int) -> None:
    model.set(embedding_length=N_EMBD, block_count=n_layers, feed_forward_length=N_FF)
    model.set(attention__head_count=N_HEAD, attention__head_count_kv=N_HEAD_KV)
    model.set(attention__layer_norm_rms_epsilon=1e-6, rope__freq_base=1e4)


def _attention(model: TinyModel, layer: int, fmt: str) -> None:
    model.norm(f"blk.{layer}.attn_norm.weight", N_EMBD)
    for part, n_heads in (("q", N_HEAD), ("k", N_HEAD_KV), ("v", N_HEAD_KV)):
        name = f"blk.{layer}.attn_{part}.weight"
        _block_matrix(model, name, fmt, N_EMBD, n_heads * HEAD_DIM)
    _block_matrix(model, f"blk.{layer}.attn_output.weight", fmt, N_HEAD * HEAD_DIM, N_EMBD)
    model.norm(f"blk.{layer}.ffn_norm.weight", N_EMBD)


def _experts(model: TinyModel, layer: int, fmt: str, n_expert: int) -> None:
    model.matrix(f"blk.{layer}.ffn_gate_inp.weight", N_EMBD, n_expert, gain=2)
    for part in ("gate", "up", "down"):
        name = f"blk.{layer}.ffn_{part}_exps.weight"
        _block_matrix(model, name, fmt, N_EMBD, N_FF, n_expert)
