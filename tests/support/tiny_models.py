"""Tiny models with random weights, the same on every machine.

The named ones in `TINY_MODELS` are those whose logits llama.cpp has computed (tests/data/golden):
order and formula of every draw below decide their weights and must not change.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ops.quants import FORMATS, BlockFormat
from tests.support.gguf_writer import Tensor, f32_tensor
from tests.support.tiny_attention_models import deepseek2, deepseek2_lite, glm4moe, gpt_oss, mimo2
from tests.support.tiny_model import TinyModel
from tests.support.tiny_recurrent_models import glm5_next, qwen4exp, qwen35, qwen35moe


def olmoe() -> TinyModel:
    model = TinyModel("olmoe")
    n_embd, n_layers, n_ff, n_expert = 64, 3, 48, 8
    model.base(n_embd, n_layers, n_head=4, n_head_kv=4, n_ff=n_ff)
    model.set(expert_count=n_expert, expert_used_count=3)
    model.ends(n_embd)
    for i in range(n_layers):
        model.norm(f"blk.{i}.attn_norm.weight", n_embd)
        model.attention(i, n_embd, n_embd, n_embd)
        model.norm(f"blk.{i}.attn_q_norm.weight", n_embd)
        model.norm(f"blk.{i}.attn_k_norm.weight", n_embd)
        model.norm(f"blk.{i}.ffn_norm.weight", n_embd)
        model.experts(i, n_embd, n_ff, n_expert)
    return model


def qwen3moe() -> TinyModel:
    model = TinyModel("qwen3moe")
    n_embd, n_layers, head_dim, n_ff, n_expert = 64, 3, 32, 40, 8
    model.base(n_embd, n_layers, n_head=4, n_head_kv=2, n_ff=96, eps=1e-6, rope_base=1e6)
    model.set(attention__key_length=head_dim, attention__value_length=head_dim)
    model.set(expert_count=n_expert, expert_used_count=3, expert_feed_forward_length=n_ff)
    model.ends(n_embd)
    for i in range(n_layers):
        model.norm(f"blk.{i}.attn_norm.weight", n_embd)
        model.attention(i, n_embd, 4 * head_dim, 2 * head_dim)
        model.norm(f"blk.{i}.attn_q_norm.weight", head_dim)
        model.norm(f"blk.{i}.attn_k_norm.weight", head_dim)
        model.norm(f"blk.{i}.ffn_norm.weight", n_embd)
        model.experts(i, n_embd, n_ff, n_expert)
    return model


def qwen2moe() -> TinyModel:
    model = TinyModel("qwen2moe")
    n_embd, n_layers, n_ff, n_ff_shared, n_expert = 64, 2, 40, 72, 8
    model.base(n_embd, n_layers, n_head=4, n_head_kv=2, n_ff=96, eps=1e-6, rope_base=1e6)
    model.set(expert_count=n_expert, expert_used_count=3, expert_feed_forward_length=n_ff)
    model.set(expert_shared_feed_forward_length=n_ff_shared)
    model.ends(n_embd)
    for i in range(n_layers):
        model.norm(f"blk.{i}.attn_norm.weight", n_embd)
        model.attention(i, n_embd, n_embd, 32, bias=True)
        model.norm(f"blk.{i}.ffn_norm.weight", n_embd)
        model.experts(i, n_embd, n_ff, n_expert)
        model.dense(i, n_embd, n_ff_shared, "_shexp")
        model.matrix(f"blk.{i}.ffn_gate_inp_shexp.weight", n_embd)
    return model


def llama() -> TinyModel:
    """The Mixtral kind."""
    model = TinyModel("llama")
    n_embd, n_layers, n_ff, n_expert = 64, 2, 48, 4
    model.base(n_embd, n_layers, n_head=4, n_head_kv=2, n_ff=n_ff, rope_base=1e6)
    model.set(rope__dimension_count=16, expert_count=n_expert, expert_used_count=2)
    model.ends(n_embd)
    for i in range(n_layers):
        model.norm(f"blk.{i}.attn_norm.weight", n_embd)
        model.attention(i, n_embd, n_embd, 32)
        model.norm(f"blk.{i}.ffn_norm.weight", n_embd)
        model.experts(i, n_embd, n_ff, n_expert)
    return model


def llama_dense() -> TinyModel:
    """The Llama 3 kind: rope divisors, tied output."""
    model = TinyModel("llama", seed=5)
    n_embd, n_layers, n_ff = 64, 2, 96
    model.base(n_embd, n_layers, n_head=4, n_head_kv=2, n_ff=n_ff, rope_base=5e5)
    model.set(rope__dimension_count=16)
    model.ends(n_embd, output=False)
    factors = np.array([1, 1, 1, 1.3, 2, 4, 8, 8], np.float32)
    model.tensors.append(f32_tensor("rope_freqs.weight", factors))
    for i in range(n_layers):
        model.norm(f"blk.{i}.attn_norm.weight", n_embd)
        model.attention(i, n_embd, n_embd, 32)
        model.norm(f"blk.{i}.ffn_norm.weight", n_embd)
        model.dense(i, n_embd, n_ff)
    return model


TINY_MODELS: dict[str, Callable[[], TinyModel]] = {
    "deepseek2": deepseek2,
    "deepseek2_lite": deepseek2_lite,
    "glm4moe": glm4moe,
    "glm5_next": glm5_next,
    "gpt_oss": gpt_oss,
    "llama": llama,
    "llama_dense": llama_dense,
    "mimo2": mimo2,
    "olmoe": olmoe,
    "qwen2moe": qwen2moe,
    "qwen3moe": qwen3moe,
    "qwen35": qwen35,
    "qwen35moe": qwen35moe,
    "qwen4exp": qwen4exp,
}


def quantized_olmoe(format_name: str, n_layers: int = 2) -> TinyModel:
    """An olmoe whose matrices are random blocks of `format_name`; shapes are multiples of 256."""
    model = TinyModel("olmoe", seed=11)
    n_embd, n_ff, n_expert = 256, 256, 8
    model.base(n_embd, n_layers, n_head=4, n_head_kv=4, n_ff=n_ff)
    model.set(expert_count=n_expert, expert_used_count=2)
    model.ends(n_embd)
    for i in range(n_layers):
        model.norm(f"blk.{i}.attn_norm.weight", n_embd)
        for part in ("q", "k", "v", "output"):
            _block_matrix(model, f"blk.{i}.attn_{part}.weight", format_name, n_embd, n_embd)
        model.norm(f"blk.{i}.attn_q_norm.weight", n_embd)
        model.norm(f"blk.{i}.attn_k_norm.weight", n_embd)
        model.norm(f"blk.{i}.ffn_norm.weight", n_embd)
        model.matrix(f"blk.{i}.ffn_gate_inp.weight", n_embd, n_expert, gain=2)
        for part in ("gate", "up", "down"):
            name = f"blk.{i}.ffn_{part}_exps.weight"
            _block_matrix(model, name, format_name, n_embd, n_ff, n_expert)
    return model


def with_blocks(model: TinyModel, format_name: str, *endings: str) -> TinyModel:
    """The same model with random blocks of a format in the tensors with these endings of names."""
    fmt = FORMATS[format_name]
    for i, tensor in enumerate(model.tensors):
        if tensor.name.endswith(endings):
            n_blocks = int(np.prod(tensor.shape)) // fmt.block_elems
            data = _blocks(fmt, n_blocks, i, tensor.shape[0]).tobytes()
            model.tensors[i] = Tensor(tensor.name, tensor.shape, data, fmt.ggml_type)
    return model


def fused(model: TinyModel) -> TinyModel:
    """The same model with Q, K, V in one tensor and expert gates merged with their up matrices."""
    by_name = {tensor.name: tensor for tensor in model.tensors}
    out = TinyModel(model.architecture, model.seed, dict(model.metadata))
    for tensor in model.tensors:
        first, last = tensor.name.rsplit(".", 1)
        if first.endswith("attn_q") and f"{first[:-1]}k.{last}" in by_name:
            names = [f"{first[:-1]}{part}.{last}" for part in "qkv"]
            out.tensors.append(_join(f"{first[:-1]}qkv.{last}", [by_name[name] for name in names]))
        elif first.endswith("ffn_gate_exps"):
            up = by_name[tensor.name.replace("gate_exps", "up_exps")]
            out.tensors.append(
                _join(tensor.name.replace("gate_exps", "gate_up_exps"), [tensor, up])
            )
        elif "indexer" in first or not first.endswith(("attn_k", "attn_v", "ffn_up_exps")):
            out.tensors.append(tensor)
    return out


def _block_matrix(model: TinyModel, name: str, format_name: str, *shape: int) -> None:
    fmt = FORMATS[format_name]
    blocks = _blocks(fmt, int(np.prod(shape)) // fmt.block_elems, len(model.tensors), shape[0])
    model.tensors.append(Tensor(name, shape, blocks.tobytes(), fmt.ggml_type))


def _blocks(fmt: BlockFormat, n_blocks: int, seed: int, n_in: int) -> NDArray[np.uint8]:
    """Random codes; scales (and mins) such that values have mean 0 and variance about 1 / n_in."""
    rng = np.random.default_rng(seed)
    std = n_in**-0.5
    if fmt.block_elems == 1:
        values = (std * rng.standard_normal((n_blocks, 1))).astype(np.float32)
        if fmt.name == "BF16":
            return (values.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
        return values.astype(fmt.layout).view(np.uint8)
    blocks = rng.integers(0, 256, (n_blocks, fmt.block_bytes), np.uint8)
    fields = blocks.view(fmt.layout)[:, 0]
    if fmt.name == "MXFP4":
        fields["e"] = rng.integers(120, 123, n_blocks)
        return blocks
    if fmt.name == "NVFP4":
        fields["scales"] = rng.integers(0x04, 0x10, fields["scales"].shape)
        return blocks
    ones = _with_scales(fmt, blocks, 1.0, 0.0)
    shift = 0.0
    if fmt.has_mins:
        per_min = fmt.dequantize(_with_scales(fmt, blocks, 0.0, 1.0)).mean()
        shift = -fmt.dequantize(ones).mean() / per_min
    unit = fmt.dequantize(_with_scales(fmt, blocks, 1.0, shift)).std()
    return _with_scales(fmt, blocks, std / unit, shift * std / unit)


def _with_scales(
    fmt: BlockFormat, blocks: NDArray[np.uint8], scale: float, min_scale: float
) -> NDArray[np.uint8]:
    """A copy of `blocks` with these f16 scales."""
    out = blocks.copy()
    fields = out.view(fmt.layout)[:, 0]
    if fmt.name == "IQ1_M":  # the f16 scale lies in the top nibbles of four words
        nibbles = np.float16(scale).view(np.uint16) >> np.array([0, 4, 8, 12], np.uint16) & 15
        fields["scales"] = fields["scales"] & 0x0FFF | nibbles << 12
        return out
    fields["d"] = scale
    for name in {"m", "dmin"} & set(fmt.layout.names or ()):
        fields[name] = min_scale
    return out


def _join(name: str, parts: list[Tensor]) -> Tensor:
    """F32 tensors joined along ne1, biases along ne0."""
    arrays = [np.frombuffer(p.data, "<f4").reshape(p.shape[::-1]) for p in parts]
    axis = -1 if name.endswith(".bias") else -2
    return f32_tensor(name, np.concatenate(arrays, axis))
