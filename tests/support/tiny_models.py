"""Tiny models with random weights, the same on every machine.

The named ones in `TINY_MODELS` are those whose logits llama.cpp has computed (tests/data/golden):
order and formula of every draw below decide their weights and must not change.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ops.quants import FORMATS, BlockFormat
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

    def matrix(self, name: str, *shape: int, gain: float = 1.0) -> None:
        """Normal weights of variance gain^2 / ne0; shape in GGUF order."""
        values = self._random.standard_normal(shape[::-1]) * gain / np.sqrt(shape[0])
        self.tensors.append(f32_tensor(name, values))

    def embedding(self, n_embd: int) -> None:
        values = self._random.standard_normal((N_VOCAB, n_embd))
        self.tensors.append(f32_tensor("token_embd.weight", values))

    def norm(self, name: str, n: int) -> None:
        self.tensors.append(f32_tensor(name, 1 + 0.2 * self._random.standard_normal(n)))

    def bias(self, name: str, n: int) -> None:
        self.tensors.append(f32_tensor(name, 0.3 * self._random.standard_normal(n)))

    def ends(self, n_embd: int, output: bool = True) -> None:
        self.embedding(n_embd)
        self.norm("output_norm.weight", n_embd)
        if output:
            self.matrix("output.weight", n_embd, N_VOCAB)

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

    def dense(self, layer: int, n_embd: int, n_ff: int, suffix: str = "") -> None:
        self.matrix(f"blk.{layer}.ffn_gate{suffix}.weight", n_embd, n_ff)
        self.matrix(f"blk.{layer}.ffn_up{suffix}.weight", n_embd, n_ff)
        self.matrix(f"blk.{layer}.ffn_down{suffix}.weight", n_ff, n_embd)

    def write(self, path: Path) -> Path:
        return write_gguf(path, self.metadata, self.tensors)


def olmoe() -> TinyModel:
    model = TinyModel("olmoe")
    n_embd, n_layers, n_ff, n_expert = 64, 3, 48, 8
    _base(model, n_embd, n_layers, n_head=4, n_head_kv=4, n_ff=n_ff)
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
    _base(model, n_embd, n_layers, n_head=4, n_head_kv=2, n_ff=96, eps=1e-6, rope_base=1e6)
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
    _base(model, n_embd, n_layers, n_head=4, n_head_kv=2, n_ff=96, eps=1e-6, rope_base=1e6)
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
    _base(model, n_embd, n_layers, n_head=4, n_head_kv=2, n_ff=n_ff, rope_base=1e6)
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
    _base(model, n_embd, n_layers, n_head=4, n_head_kv=2, n_ff=n_ff, rope_base=5e5)
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
    "llama": llama,
    "llama_dense": llama_dense,
    "olmoe": olmoe,
    "qwen2moe": qwen2moe,
    "qwen3moe": qwen3moe,
}


def quantized_olmoe(format_name: str, n_layers: int = 2) -> TinyModel:
    """An olmoe whose matrices are random blocks of `format_name`; shapes are multiples of 256."""
    model = TinyModel("olmoe", seed=11)
    n_embd, n_ff, n_expert = 256, 256, 8
    _base(model, n_embd, n_layers, n_head=4, n_head_kv=4, n_ff=n_ff)
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


def fused(model: TinyModel) -> TinyModel:
    """The same model with Q, K, V in one tensor and expert gates merged with their up matrices."""
    by_name = {tensor.name: tensor for tensor in model.tensors}
    out = TinyModel(model.architecture, model.seed, dict(model.metadata))
    for tensor in model.tensors:
        first, last = tensor.name.rsplit(".", 1)
        if first.endswith("attn_q"):
            names = [f"{first[:-1]}{part}.{last}" for part in "qkv"]
            out.tensors.append(_join(f"{first[:-1]}qkv.{last}", [by_name[name] for name in names]))
        elif first.endswith("ffn_gate_exps"):
            up = by_name[tensor.name.replace("gate_exps", "up_exps")]
            out.tensors.append(
                _join(tensor.name.replace("gate_exps", "gate_up_exps"), [tensor, up])
            )
        elif not first.endswith(("attn_k", "attn_v", "ffn_up_exps")):
            out.tensors.append(tensor)
    return out


def _base(
    model: TinyModel,
    n_embd: int,
    n_layers: int,
    n_head: int,
    n_head_kv: int,
    n_ff: int,
    eps: float = 1e-5,
    rope_base: float = 10000.0,
) -> None:
    model.set(embedding_length=n_embd, block_count=n_layers, feed_forward_length=n_ff)
    model.set(attention__head_count=n_head, attention__head_count_kv=n_head_kv)
    model.set(attention__layer_norm_rms_epsilon=eps, rope__freq_base=rope_base)


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
    """F32 tensors joined along ne1 (along ne0 for vectors)."""
    arrays = [np.frombuffer(p.data, "<f4").reshape(p.shape[::-1]) for p in parts]
    axis = 0 if arrays[0].ndim == 1 else -2
    return f32_tensor(name, np.concatenate(arrays, axis))
