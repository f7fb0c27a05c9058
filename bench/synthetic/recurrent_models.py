"""Shapes of the Qwen models that alternate gated delta nets with gated attention."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bench.synthetic.sketch import Sketch

INTERVAL = 4
"""Every so many'th layer attends."""
TABLE_HOLE_ROWS = 4 << 20
"""An n-gram table of more rows is a hole in the file: all zeros, and no byte on the disk."""


@dataclass(frozen=True)
class Hybrid:
    """What the hybrid models share."""

    n_layers: int
    n_embd: int
    n_head: int
    n_head_kv: int
    n_vocab: int = 248_320
    head_dim: int = 256
    n_rot: int = 64
    state_dim: int = 128
    n_key_head: int = 16
    n_value_head: int = 48

    def keys(self, sketch: Sketch, n_ff: int) -> None:
        """The keys of attention and delta nets."""
        sketch.base(self.n_embd, self.n_vocab, n_ff, 1e-6, 1e7)
        sketch.heads(self.n_head, self.n_head_kv, self.head_dim, self.head_dim)
        sections = [11 * self.n_rot // 64, 11 * self.n_rot // 64, 10 * self.n_rot // 64, 0]
        sketch.set(rope__dimension_count=self.n_rot, rope__dimension_sections=sections)
        sketch.set(full_attention_interval=INTERVAL, ssm__conv_kernel=4)
        sketch.set(ssm__state_size=self.state_dim, ssm__group_count=self.n_key_head)
        sketch.set(ssm__time_step_rank=self.n_value_head)
        sketch.set(ssm__inner_size=self.n_value_head * self.state_dim)

    def mixer(self, sketch: Sketch, layer: int, fmt: str, output: str) -> None:
        """The mixer of a layer: its input matrices and its output matrix in two formats."""
        name = f"blk.{layer}."
        if attends(layer):
            self._attention(sketch, name, fmt, output)
        else:
            self._delta_net(sketch, name, fmt, output)

    def _attention(self, sketch: Sketch, name: str, fmt: str, output: str) -> None:
        n_q, n_kv = self.n_head * self.head_dim, self.n_head_kv * self.head_dim
        sketch.matrices(f"{name}attn_", fmt, self.n_embd, q=2 * n_q, k=n_kv, v=n_kv)
        sketch.matrix(f"{name}attn_output", output, n_q, self.n_embd)
        sketch.norms(name, attn_q_norm=self.head_dim, attn_k_norm=self.head_dim)

    def _delta_net(self, sketch: Sketch, name: str, fmt: str, output: str) -> None:
        n_key, n_value = self.n_key_head * self.state_dim, self.n_value_head * self.state_dim
        sketch.matrices(f"{name}attn_", fmt, self.n_embd, qkv=2 * n_key + n_value, gate=n_value)
        sketch.normal(f"{name}ssm_conv1d.weight", 4, 2 * n_key + n_value, std=0.5, mean=0.3)
        sketch.normal(f"{name}ssm_dt.bias", self.n_value_head, std=0.3)
        sketch.rates(f"{name}ssm_a", self.n_value_head)
        heads = self.n_value_head
        sketch.matrices(f"{name}ssm_", "Q8_0", self.n_embd, beta=heads, alpha=heads)
        sketch.ones(f"{name}ssm_norm.weight", self.state_dim)
        sketch.matrix(f"{name}ssm_out", output, n_value, self.n_embd)


@dataclass(frozen=True)
class Qwen35(Hybrid):
    """Qwen3.8-27B: dense."""

    n_layers: int = 64
    n_embd: int = 5120
    n_head: int = 24
    n_head_kv: int = 4
    n_ff: int = 17408
    architecture: str = "qwen35"

    def describe(self, sketch: Sketch) -> None:
        """IQ4_NL, the output matrix Q6_K."""
        n_embd = self.n_embd
        self.keys(sketch, self.n_ff)
        sketch.ends(n_embd, self.n_vocab, "IQ4_NL", "Q6_K")
        for i in range(sketch.n_layers):
            name = f"blk.{i}."
            sketch.norms(name, attn_norm=n_embd, post_attention_norm=n_embd)
            self.mixer(sketch, i, "IQ4_NL", "IQ4_NL")
            sketch.dense(name, "IQ4_NL", "IQ4_NL", n_embd, self.n_ff)


@dataclass(frozen=True)
class Qwen4Exp(Hybrid):
    """Qwen3.8-Flash-Next: gated streams, sparse attention, an n-gram table.

    n_table_rows  of the table: more than TABLE_HOLE_ROWS are a hole
    """

    n_layers: int = 48
    n_embd: int = 2560
    n_head: int = 24
    n_head_kv: int = 2
    n_ff: int = 640
    n_expert: int = 512
    n_used: int = 10
    n_stream: int = 4
    n_low: int = 320
    n_index_head: int = 4
    index_dim: int = 128
    top_k: int = 2048
    n_table_head: int = 16
    n_table_rows: int = 320_001_536
    end_token: int = 248_044
    architecture: str = "qwen4exp"

    def describe(self, sketch: Sketch) -> None:
        """IQ3_S and IQ4_XS experts whose down matrices are IQ4_NL, the rest Q5_K to Q8_0.

        The real file's mix is not known; this one has its size.
        """
        n_embd, n_layers = self.n_embd, sketch.n_layers
        self.keys(sketch, self.n_ff)
        sketch.routed(self.n_expert, self.n_used, self.n_ff)
        self._more_keys(sketch)
        sketch.matrix("token_embd", "Q4_K", n_embd, self.n_vocab, std=1.0)
        sketch.matrix("output", "Q6_K", n_embd, self.n_vocab)
        self._streams(sketch, "output_hc", returns=False)
        is_hole = self.n_table_rows > TABLE_HOLE_ROWS
        width = n_embd // self.n_table_head
        sketch.table("per_layer_token_embd", "IQ4_NL", width, self.n_table_rows, is_hole)
        for i in range(n_layers):
            name, is_end = f"blk.{i}.", i < n_layers // 8 or i >= n_layers - n_layers // 8
            self._streams(sketch, f"{name}hc_attn")
            self._streams(sketch, f"{name}hc_ffn")
            self.mixer(sketch, i, "Q5_K", "Q6_K")
            if attends(i):
                sketch.matrix(f"{name}indexer.q_proj", "Q8_0", n_embd, self._index_width)
                sketch.matrix(f"{name}indexer.k_proj", "Q8_0", n_embd, self.index_dim)
                sketch.ones(f"{name}indexer.q_norm.weight", self.index_dim)
                sketch.ones(f"{name}indexer.k_norm.weight", self.index_dim)
            if i == 1:
                self._table_mixer(sketch, name)
            gate_up = "IQ4_XS" if is_end else "IQ3_S"
            sketch.experts(name, gate_up, "IQ4_NL", n_embd, self.n_ff, self.n_expert)
            sketch.dense(name, "Q5_K", "Q8_0", n_embd, self.n_ff, "_shexp")
            sketch.normal(f"{name}ffn_gate_inp_shexp.weight", n_embd, std=n_embd**-0.5)

    @property
    def _index_width(self) -> int:
        return self.n_index_head * self.index_dim

    def _more_keys(self, sketch: Sketch) -> None:
        rows = self.n_table_rows // self.n_table_head
        sketch.set(expert_shared_feed_forward_length=self.n_ff)
        sketch.set(hyper_connection__count=self.n_stream, hyper_connection__low_rank=self.n_low)
        sketch.set(attention__indexer__head_count=self.n_index_head)
        sketch.set(attention__indexer__key_length=self.index_dim)
        sketch.set(attention__indexer__top_k=self.top_k)
        ratios = [4 if attends(i) else 0 for i in range(sketch.n_layers)]
        sketch.set(attention__compress_ratios=ratios, ple__layers=[1], ple__ngram_size=3)
        sketch.set(ple__heads_per_ngram=self.n_table_head // 2, ple__conv_kernel=4)
        sketch.set(ple__eos_token_id=self.end_token)
        sketch.set(embedding_length_per_layer_input=self.n_embd // self.n_table_head)
        multipliers = [35_184_372_088_833, 17_592_186_044_399, 29_000_000_000_033]
        offsets = np.arange(self.n_table_head, dtype=np.uint64) * np.uint64(rows)
        sketch.set(ple__layer_multipliers=multipliers, ple__head_offsets=list(offsets))
        sketch.set(ple__head_vocab_sizes=[np.uint64(rows)] * self.n_table_head)

    def _streams(self, sketch: Sketch, name: str, returns: bool = True) -> None:
        width = self.n_stream * self.n_embd
        sketch.ones(f"{name}_norm.weight", width)
        sketch.matrix(f"{name}_down", "Q8_0", width, self.n_low)
        sketch.matrix(f"{name}_up", "Q8_0", self.n_low, width)
        if returns:
            sketch.normal(f"{name}_inject.weight", width, self.n_stream, std=width**-0.5)

    def _table_mixer(self, sketch: Sketch, name: str) -> None:
        width = self.n_stream * self.n_embd
        sketch.matrices(f"{name}ple_", "Q8_0", self.n_embd, key=width, value=self.n_embd)
        sketch.norms(name, ple_norm_key=width, ple_norm_query=width, ple_norm_conv=width)
        sketch.normal(f"{name}ple_conv1d.weight", 4, width, std=0.5, mean=0.3)


def attends(layer: int) -> bool:
    """Whether a layer of a hybrid model is attention."""
    return layer % INTERVAL == INTERVAL - 1
