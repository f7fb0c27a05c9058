"""Write a GGUF file of a real model's shape with random weights, as fast as the disk takes it.

    python -m bench synthetic --model qwen3-30b-a3b --layers 12 /tmp/model.gguf

Weights are blocks drawn from a small pool, with a spread that keeps activations finite; the model
says nothing, its speed is that of the real one. Router rows are scaled by exp(skew * normal), so
some experts are used more than others; 0 makes them alike.
"""

from __future__ import annotations

import argparse
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from ops.quants import FORMATS, BlockFormat

ALIGNMENT = 32
POOL_BLOCKS = 50_021
N_CTX_TRAIN = 32768
U8 = NDArray[np.uint8]


@dataclass(frozen=True)
class Shape:
    """The numbers of a model; norm_width: of the query norm's weight, a head's or all heads'."""

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


MODELS = {
    "olmoe": Shape("olmoe", 2048, 16, 16, 16, 128, 1024, 64, 8, 50304, 1e4, 1e-5, True),
    "qwen3-30b-a3b": Shape("qwen3moe", 2048, 48, 32, 4, 128, 768, 128, 8, 151936, 1e6, 1e-6, False),
    "qwen3-235b-a22b": Shape(
        "qwen3moe", 4096, 94, 64, 4, 128, 1536, 128, 8, 151936, 1e6, 1e-6, False
    ),
}


@dataclass(frozen=True)
class Part:
    """A tensor to write: its values, or a format and the spread of its random ones."""

    name: str
    shape: tuple[int, ...]
    fmt: BlockFormat
    std: float = 0.0
    values: NDArray[np.float32] | None = None

    @property
    def n_bytes(self) -> int:
        return self.fmt.row_bytes(self.shape[0]) * int(np.prod(self.shape[1:], dtype=np.int64))


def main(argv: list[str]) -> int:
    """Write what the arguments ask for."""
    parser = argparse.ArgumentParser(prog="python -m bench synthetic", description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="olmoe")
    parser.add_argument("--layers", type=int, help="instead of the model's own number")
    parser.add_argument("--skew", type=float, default=0.5, help="of the experts' use, default 0.5")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--format", default="mixed", help="mixed: as Q4_K_M mixes; else one format")
    parser.add_argument("out", type=Path)
    options = parser.parse_args(argv)
    shape = MODELS[options.model]
    n_layers = options.layers or shape.n_layers
    write_model(options.out, shape, n_layers, options.skew, options.seed, options.format)
    print(f"wrote {options.out}: {options.out.stat().st_size / 1e9:.2f} GB")
    return 0


def write_model(
    path: Path, shape: Shape, n_layers: int, skew: float, seed: int = 1, fmt: str = "mixed"
) -> None:
    """Write the file. The same arguments give the same bytes."""
    rng = np.random.default_rng(seed)
    wanted = list(parts(shape, n_layers, skew, rng, fmt))
    with path.open("wb") as out:
        out.write(header(metadata(shape, n_layers), wanted))
        pools: dict[tuple[str, float], U8] = {}
        for part in wanted:
            out.write(bytes(-out.tell() % ALIGNMENT))
            if part.values is not None:
                out.write(part.values.tobytes())
                continue
            key = (part.fmt.name, part.std)
            if key not in pools:
                pools[key] = random_blocks(part.fmt, POOL_BLOCKS, part.std, rng)
            write_tiled(out, pools[key], part.n_bytes // part.fmt.block_bytes, rng)


def parts(
    shape: Shape, n_layers: int, skew: float, rng: np.random.Generator, fmt: str
) -> Iterator[Part]:
    """All tensors in the order of the file; shapes in GGUF order."""
    usual, better = ("Q4_K", "Q6_K") if fmt == "mixed" else (fmt, fmt)
    n, n_q, n_kv = shape.n_embd, shape.n_head * shape.head_dim, shape.n_head_kv * shape.head_dim

    def matrix(name: str, format_name: str, *dims: int, std: float | None = None) -> Part:
        spread = dims[0] ** -0.5 if std is None else std
        return Part(name, dims, FORMATS[format_name], round(spread, 6))

    def vector(name: str, width: int) -> Part:
        return Part(name, (width,), FORMATS["F32"], values=np.ones(width, np.float32))

    yield matrix("token_embd.weight", usual, n, shape.n_vocab, std=1.0)
    yield vector("output_norm.weight", n)
    yield matrix("output.weight", better, n, shape.n_vocab)
    for i in range(n_layers):
        first, last = n_layers // 8, n_layers - n_layers // 8
        more = better if i < first or i >= last or (i - first) % 3 == 2 else usual
        name = f"blk.{i}."
        yield vector(f"{name}attn_norm.weight", n)
        yield matrix(f"{name}attn_q.weight", usual, n, n_q)
        yield matrix(f"{name}attn_k.weight", usual, n, n_kv)
        yield matrix(f"{name}attn_v.weight", more, n, n_kv)
        yield matrix(f"{name}attn_output.weight", usual, n_q, n)
        yield vector(f"{name}attn_q_norm.weight", n_q if shape.norm_rows else shape.head_dim)
        yield vector(f"{name}attn_k_norm.weight", n_kv if shape.norm_rows else shape.head_dim)
        yield vector(f"{name}ffn_norm.weight", n)
        router = rng.standard_normal((shape.n_expert, n)) * 2 / np.sqrt(n)
        router *= np.exp(skew * rng.standard_normal((shape.n_expert, 1)))
        yield Part(
            f"{name}ffn_gate_inp.weight",
            (n, shape.n_expert),
            FORMATS["F32"],
            values=router.astype(np.float32),
        )
        yield matrix(f"{name}ffn_gate_exps.weight", usual, n, shape.n_ff, shape.n_expert)
        yield matrix(f"{name}ffn_up_exps.weight", usual, n, shape.n_ff, shape.n_expert)
        yield matrix(f"{name}ffn_down_exps.weight", more, shape.n_ff, n, shape.n_expert)


def metadata(shape: Shape, n_layers: int) -> dict[str, object]:
    """The keys that a loader asks for; the vocabulary has names of tokens and no text."""
    sizes = {
        "context_length": N_CTX_TRAIN,
        "embedding_length": shape.n_embd,
        "block_count": n_layers,
        "feed_forward_length": shape.n_ff,
        "expert_feed_forward_length": shape.n_ff,
        "expert_count": shape.n_expert,
        "expert_used_count": shape.n_used,
        "vocab_size": shape.n_vocab,
        "attention.head_count": shape.n_head,
        "attention.head_count_kv": shape.n_head_kv,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": shape.eps,
        "rope.freq_base": shape.rope_base,
    }
    return {
        "general.architecture": shape.architecture,
        "general.name": f"synthetic {shape.architecture}",
        **{f"{shape.architecture}.{key}": value for key, value in sizes.items()},
        "tokenizer.ggml.model": "test",
        "tokenizer.ggml.tokens": [f"<{i}>" for i in range(shape.n_vocab)],
    }


def header(keys: dict[str, object], tensors: list[Part]) -> bytes:
    """GGUF version 3 up to the data section, padded."""
    out = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)))
    for key, value in keys.items():
        out += _text(key) + _value(value)
    offset = 0
    for tensor in tensors:
        out += _text(tensor.name) + struct.pack("<I", len(tensor.shape))
        out += struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape)
        out += struct.pack("<IQ", tensor.fmt.ggml_type, offset)
        offset += -(-tensor.n_bytes // ALIGNMENT) * ALIGNMENT
    return bytes(out + bytes(-len(out) % ALIGNMENT))


def random_blocks(fmt: BlockFormat, n_blocks: int, std: float, rng: np.random.Generator) -> U8:
    """u8[n_blocks, block_bytes] whose values have mean 0 and this standard deviation.

    Raises: ValueError for formats whose scale is not a field `d`.
    """
    if "d" not in (fmt.layout.names or ()):
        raise ValueError(f"no random {fmt.name}: its blocks have no plain scale")
    blocks = rng.integers(0, 256, (n_blocks, fmt.block_bytes), np.uint8)
    fields = blocks.view(fmt.layout)[:, 0]
    names = fmt.layout.names or ()
    mins = next((name for name in ("dmin", "m") if name in names), None)

    def values(scale: float, low: float) -> NDArray[np.float32]:
        fields["d"] = scale
        if mins is not None:
            fields[mins] = low
        return fmt.dequantize(blocks[:2000])

    low = 0.0 if mins is None else -float(values(1, 0).mean() / values(0, 1).mean())
    unit = float(values(1, low).std())
    values(std / unit, low * std / unit)
    return blocks


def write_tiled(out: BinaryIO, pool: U8, n_blocks: int, rng: np.random.Generator) -> None:
    """Write `n_blocks` blocks: stretches of the pool from random places."""
    while n_blocks > 0:
        start = int(rng.integers(0, len(pool) // 2))
        stretch = pool[start : start + n_blocks]
        out.write(stretch.tobytes())
        n_blocks -= len(stretch)


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: object) -> bytes:
    match value:
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _text(value)
        case list():
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
    raise TypeError(f"no GGUF type for {value!r}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
