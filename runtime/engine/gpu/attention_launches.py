"""Softmax attention over cached keys and values as launches."""

from __future__ import annotations

from collections.abc import Mapping

from ops.gpu.attention import max_splits
from ops.gpu.heads import NORM_HEAD, NORM_NONE, NORM_ROW, heads, heads_grid, heads_shared_bytes
from runtime.engine.gpu.indexer_launches import (
    IndexerLaunches,
    index_products,
    inputs,
)
from runtime.engine.gpu.kv import GPUPages, LayerCache
from runtime.engine.gpu.matrix_launches import (
    Output,
    Product,
    add_products,
    joined,
    want_inputs,
)
from runtime.engine.gpu.paged_attention import (
    PagedAttention,
    add_attention,
    add_prompt_attention,
    attends_prompts,
    prompt_splits,
)
from runtime.engine.gpu.plan_parts import DeviceRows, PlanParts
from runtime.engine.gpu.rope_fields import rope_fields
from runtime.engine.step import StepKind
from runtime.models.spec import AttentionSpec, Linear, QKNorm

PHASE = "attention"
"""Of a layer: `Room.place`."""
NORM_KINDS = {QKNorm.NONE: NORM_NONE, QKNorm.HEAD: NORM_HEAD, QKNorm.ROW: NORM_ROW}


class AttentionLaunches:
    """The launches of layers with `AttentionSpec`; see `MixerLaunches`."""

    def __init__(self, parts: PlanParts, pages: GPUPages, indexers: IndexerLaunches) -> None:
        self._parts, self._pages, self._indexers = parts, pages, indexers

    def prepare(self, mixer: AttentionSpec, x: DeviceRows) -> None:
        """Ask x, the normalised rows, for the forms that the first products need."""
        want_inputs(self._parts, mixer.qkv, x)
        if mixer.indexer is not None:
            want_inputs(self._parts, list(inputs(mixer.indexer, is_narrow=False).values()), x)

    def add(self, layer: int, mixer: AttentionSpec, x: DeviceRows) -> Mapping[str, int]:
        """See `MixerLaunches.add`."""
        parts, cache = self._parts, self._pages.layer(layer)
        width = mixer.n_q + mixer.n_gate + mixer.n_k + mixer.n_v
        products, starts = list(joined(mixer.qkv)), dict[str, int]()
        if mixer.indexer is not None:
            more, starts, width = index_products(mixer.indexer, width, is_narrow=False)
            products += more
        n = parts.n_tokens
        qkv = parts.room.place(f"qkv {width}", 4 * n * width, PHASE)
        out = Output(qkv, width)
        add_products(parts, f"{layer}.qkv", products, x, out, parts.token_count, n)
        n_out = mixer.n_head * mixer.head_dim_v
        attended = DeviceRows(parts.room, f"attended {n_out}", parts.n_tokens, n_out, PHASE)
        want_inputs(parts, [mixer.output], attended)
        if mixer.indexer is not None:
            places = {name: (qkv + 4 * start, width) for name, start in starts.items()}
            self._indexers.add(layer, mixer.indexer, cache, places)
        attention = PagedAttention(
            name=f"{layer}.attention",
            cache=cache,
            n_head=mixer.n_head,
            q=self._heads(layer, mixer, cache, qkv, width),
            out=attended,
            window=mixer.window or 0,
            sinks=parts.weights.vector(mixer.sinks),
            gates=qkv + 4 * mixer.head_dim_k if mixer.gated else 0,
            gate_row=width,
            gate_stride=mixer.head_dim_k + mixer.head_dim_v,
            value_scale=mixer.value_scale,
            choice=None if mixer.indexer is None else self._indexers.choice,
        )
        sizes = mixer.n_head, mixer.n_head_kv
        if parts.shape.kind is StepKind.DECODE:
            add_attention(parts, attention, max_splits(*sizes))
        elif mixer.indexer is None and attends_prompts(parts, cache, mixer.n_head):
            add_prompt_attention(parts, attention)
        else:
            add_attention(parts, attention, prompt_splits(*sizes))
        return add_output(parts, layer, mixer.output, attended)

    def _heads(
        self, layer: int, spec: AttentionSpec, cache: LayerCache, qkv: int, width: int
    ) -> int:
        """Address of the scaled queries f32[n_tokens, n_head, dim_k]; keys and values are kept."""
        parts = self._parts
        q = parts.room.place(f"q {spec.n_q}", 4 * parts.n_tokens * spec.n_q, PHASE)
        parts.plan.add(
            f"{layer}.heads",
            heads(overlapped=parts.overlapped),
            heads_grid(spec.n_head, spec.n_head_kv, parts.n_tokens),
            {
                "counts": parts.token_count,
                "positions": parts.control("positions"),
                "cell_pages": parts.control("cell_pages"),
                "qkv": qkv,
                "q": q,
                "q_norm": parts.weights.vector(spec.q_norm),
                "k_norm": parts.weights.vector(spec.k_norm),
                "row_values": width,
                "q_stride": spec.head_dim_k + (spec.head_dim_v if spec.gated else 0),
                "k_first": spec.n_q + spec.n_gate,
                "v_first": spec.n_q + spec.n_gate + spec.n_k,
                "n_head": spec.n_head,
                "n_head_kv": spec.n_head_kv,
                "dim_k": spec.head_dim_k,
                "dim_v": spec.head_dim_v,
                "norm_kind": NORM_KINDS[spec.qk_norm],
                "eps": parts.model.spec.eps,
                "q_scale": spec.scale,
                **rope_fields(parts, spec.rope),
                **cache.fields(),
            },
            shared_bytes=heads_shared_bytes(spec.head_dim_k, spec.head_dim_v),
            overlapped=parts.overlapped,
        )
        return q


def add_output(parts: PlanParts, layer: int, output: Linear, x: DeviceRows) -> Mapping[str, int]:
    """The product that ends a mixer; what the next norm adds to the residual stream."""
    n_out = output.n_out
    delta = parts.room.place(f"attention out {n_out}", 4 * parts.n_tokens * n_out)
    add_products(
        parts,
        f"{layer}.attention_output",
        [Product(output)],
        x,
        Output(delta, n_out),
        parts.token_count,
        parts.n_tokens,
    )
    return {"delta": delta}
