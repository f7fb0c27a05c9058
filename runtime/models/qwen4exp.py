"""Qwen 3.8 Flash Next: gated residual streams, sparse attention, and an n-gram table."""

from __future__ import annotations

from dataclasses import replace

from runtime.models.builder import SpecBuilder
from runtime.models.delta_net import GateFunction
from runtime.models.indexer import IndexerSpec
from runtime.models.ngram_memory import NgramMemorySpec
from runtime.models.qwen_hybrid import experts, gated_attention, gated_delta_net, is_recurrent
from runtime.models.rope import RopePairing
from runtime.models.spec import AttentionSpec, LayerSpec, ModelSpec
from runtime.models.streams import GatedStreams

PAGE_TOKENS = 32
"""Blocks of the sparse attention must not cross pages of the cache."""


def build(builder: SpecBuilder) -> ModelSpec:
    """The spec of a `qwen4exp` file."""
    keys = builder.keys
    n_stream = keys.count("hyper_connection.count", at_least=2)
    with_memory = keys.numbers("ple.layers") if keys.has("ple.layers") else ()
    layers = []
    for i in range(builder.n_layers):
        attn, ffn = f"blk.{i}.hc_attn", f"blk.{i}.hc_ffn"
        layers.append(
            LayerSpec(
                mixer_norm=_stream_norm(builder, f"{attn}_norm", n_stream),
                mixer=gated_delta_net(builder, i, GateFunction.SIGMOID)
                if is_recurrent(builder, i)
                else _sparse_attention(builder, i),
                feed_forward_norm=_stream_norm(builder, f"{ffn}_norm", n_stream),
                feed_forward=experts(builder, i),
                mixer_streams=_streams(builder, attn, n_stream),
                feed_forward_streams=_streams(builder, ffn, n_stream),
                memory=_memory(builder, i, n_stream) if i in with_memory else None,
            )
        )
    return builder.model(
        layers,
        may_be_tied=True,
        output_norm=_stream_norm(builder, "output_hc_norm", n_stream),
        n_stream=n_stream,
        output_streams=_streams(builder, "output_hc", n_stream, returns=False),
    )


def _stream_norm(builder: SpecBuilder, name: str, n_stream: int) -> str:
    """A norm of every stream, which files store as one row or as one a stream."""
    name, n_embd = f"{name}.weight", builder.n_embd
    by_stream = len(builder.shape(name)) > 1
    return builder.tensor(name, *((n_embd, n_stream) if by_stream else (n_embd * n_stream,)))


def _streams(builder: SpecBuilder, name: str, n_stream: int, returns: bool = True) -> GatedStreams:
    width, n_low = n_stream * builder.n_embd, builder.keys.count("hyper_connection.low_rank")
    return GatedStreams(
        down=builder.linear(f"{name}_down", width, n_low),
        up=builder.linear(f"{name}_up", n_low, width),
        inject=builder.linear(f"{name}_inject", width, n_stream) if returns else None,
    )


def _sparse_attention(builder: SpecBuilder, layer: int) -> AttentionSpec:
    """Gated attention to the best blocks; to all tokens where the file gives no block size."""
    keys, prefix = builder.keys, f"blk.{layer}.indexer."
    attention = gated_attention(builder, layer)
    block = keys.count_of_layer("attention.compress_ratios", layer, 0, at_least=0)
    if block == 0:
        return attention
    n_head = keys.count("attention.indexer.head_count")
    dim = keys.count("attention.indexer.key_length")
    n_best = keys.count("attention.indexer.top_k") // block
    if PAGE_TOKENS % block or dim % block:
        raise keys.wrong("attention.compress_ratios", "use 1, 2, 4, 8, 16 or 32")
    if n_best < 1:
        raise keys.wrong("attention.indexer.top_k", f"use at least {block}, one block")
    indexer = IndexerSpec(
        n_head=n_head,
        head_dim=dim,
        block=block,
        n_best=n_best,
        query=builder.linear(f"{prefix}q_proj", builder.n_embd, n_head * dim),
        query_norm=builder.tensor(f"{prefix}q_norm.weight", dim),
        key=builder.linear(f"{prefix}k_proj", builder.n_embd, dim),
        key_norm=builder.tensor(f"{prefix}k_norm.weight", dim),
        scale=dim**-0.5,
        rope=builder.rope(RopePairing.NEOX, dim),
    )
    return replace(attention, indexer=indexer)


def _memory(builder: SpecBuilder, layer: int, n_stream: int) -> NgramMemorySpec:
    """The n-gram table of `layer`.

    Raises: CorruptModel where its sizes contradict each other.
    """
    keys, n_embd, prefix = builder.keys, builder.n_embd, f"blk.{layer}.ple_"
    n_gram = keys.count("ple.ngram_size", at_least=2)
    n_heads = (n_gram - 1) * keys.count("ple.heads_per_ngram")
    row_dim = keys.count("embedding_length_per_layer_input")
    multipliers = keys.numbers("ple.layer_multipliers")
    sizes, offsets = keys.numbers("ple.head_vocab_sizes"), keys.numbers("ple.head_offsets")
    if row_dim * n_heads != n_embd:
        raise keys.wrong("embedding_length_per_layer_input", f"{n_heads} rows make {n_embd} values")
    if len(multipliers) < n_gram:
        raise keys.wrong("ple.layer_multipliers", f"use {n_gram} numbers")
    if len(sizes) != n_heads or 0 in sizes:
        raise keys.wrong("ple.head_vocab_sizes", f"use {n_heads} numbers above 0")
    if len(offsets) != n_heads:
        raise keys.wrong("ple.head_offsets", f"use {n_heads} numbers")
    table, n_taps = "per_layer_token_embd.weight", keys.count("ple.conv_kernel", at_least=2)
    n_rows = builder.shape(table)[-1]
    if max(offset + size for offset, size in zip(offsets, sizes, strict=True)) > n_rows:
        raise keys.wrong("ple.head_offsets", f"the table has {n_rows} rows")
    width = n_stream * n_embd
    return NgramMemorySpec(
        table=builder.tensor(table, row_dim, n_rows),
        row_dim=row_dim,
        n_gram=n_gram,
        multipliers=multipliers,
        offsets=offsets,
        sizes=sizes,
        end_token=keys.count("ple.eos_token_id", at_least=0, at_most=builder.n_vocab() - 1),
        key=builder.linear(f"{prefix}key", n_embd, width),
        value=builder.linear(f"{prefix}value", n_embd, n_embd),
        key_norm=_stream_norm(builder, f"{prefix}norm_key", n_stream),
        query_norm=_stream_norm(builder, f"{prefix}norm_query", n_stream),
        conv_norm=_stream_norm(builder, f"{prefix}norm_conv", n_stream),
        conv=builder.tensor(f"{prefix}conv1d.weight", n_taps, width),
        n_taps=n_taps,
    )
