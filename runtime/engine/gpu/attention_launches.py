"""Softmax attention over cached keys and values as launches."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ops.arithmetic import activation_layout
from ops.gpu import heads as heads_kernel
from ops.gpu.attention import (
    AttentionShape,
    attention,
    attention_grid,
    attention_join,
    attention_join_grid,
    attention_prompt,
    attention_prompt_grid,
    attention_prompt_shared_bytes,
    attention_shared_bytes,
    max_splits,
    n_splits,
    partials_bytes,
)
from ops.gpu.heads import heads, heads_grid, heads_shared_bytes, turns_of
from ops.quants.block import ActivationKind
from runtime.engine.gpu.kv import GPUPages, LayerCache
from runtime.engine.gpu.matrix_launches import (
    Output,
    Product,
    add_products,
    joined,
    want_inputs,
)
from runtime.engine.gpu.plan_parts import DeviceRows, PlanParts
from runtime.engine.gpu.row_launches import add_records
from runtime.engine.step import StepKind
from runtime.errors import EngineBug
from runtime.models.rope import RopePairing, RopeSpec, rope_frequencies
from runtime.models.spec import AttentionSpec, Mixer, QKNorm

NORM_KINDS = {
    QKNorm.NONE: heads_kernel.NORM_NONE,
    QKNorm.HEAD: heads_kernel.NORM_HEAD,
    QKNorm.ROW: heads_kernel.NORM_ROW,
}
ROPE_KINDS = {
    RopePairing.NEOX: heads_kernel.ROPE_NEOX,
    RopePairing.NORM: heads_kernel.ROPE_NORM,
}


class AttentionLaunches:
    """Adds the launches of layers with `AttentionSpec`; layers alike share their places."""

    def __init__(self, parts: PlanParts, pages: GPUPages) -> None:
        self._parts, self._pages = parts, pages

    def prepare(self, mixer: Mixer, x: DeviceRows) -> None:
        """Ask x, the normalised rows, for the forms that the first products need."""
        want_inputs(self._parts, self._attention(mixer).qkv, x)

    def add(self, layer: int, mixer: Mixer, x: DeviceRows) -> Mapping[str, int]:
        """Add the layer's mixer; what the next norm adds to the residual stream."""
        parts, spec = self._parts, self._attention(mixer)
        cache = self._pages.layers[layer]
        if cache is None:
            raise EngineBug(f"layer {layer} has no keys and values")
        width = self._width(spec)
        qkv = parts.room.place(f"qkv {width}", 4 * parts.n_tokens * width)
        add_products(
            parts,
            f"{layer}.qkv",
            joined(spec.qkv),
            x,
            Output(qkv, width),
            parts.token_count,
            parts.n_tokens,
        )
        q = self._heads(layer, spec, cache, qkv, width)
        attended = DeviceRows(
            parts.room, f"attended {spec.n_head}", parts.n_tokens, spec.n_head * spec.head_dim_v
        )
        want_inputs(parts, [spec.output], attended)
        if parts.shape.kind is StepKind.PREFILL:
            self._attend_prompt(layer, spec, cache, q, qkv, attended)
        else:
            self._attend(layer, spec, cache, q, qkv, attended)
        n_out = spec.output.n_out
        delta = parts.room.place(f"attention out {n_out}", 4 * parts.n_tokens * n_out)
        add_products(
            parts,
            f"{layer}.attention_output",
            [Product(spec.output)],
            attended,
            Output(delta, n_out),
            parts.token_count,
            parts.n_tokens,
        )
        return {"delta": delta}

    def _heads(
        self, layer: int, spec: AttentionSpec, cache: LayerCache, qkv: int, width: int
    ) -> int:
        """Address of the scaled queries f32[n_tokens, n_head, dim_k]; keys and values are kept."""
        parts, rope = self._parts, spec.rope
        q = parts.room.place(f"q {spec.n_q}", 4 * parts.n_tokens * spec.n_q)
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
                "turns": 0 if rope is None else self._turns(rope),
                "row_values": width,
                "q_stride": spec.head_dim_k + (spec.head_dim_v if spec.gated else 0),
                "k_first": spec.n_q + spec.n_gate,
                "v_first": spec.n_q + spec.n_gate + spec.n_k,
                "n_head": spec.n_head,
                "n_head_kv": spec.n_head_kv,
                "dim_k": spec.head_dim_k,
                "dim_v": spec.head_dim_v,
                "norm_kind": NORM_KINDS[spec.qk_norm],
                "rope_kind": heads_kernel.ROPE_NONE if rope is None else ROPE_KINDS[rope.pairing],
                "n_rot": 0 if rope is None else rope.n_rot,
                "eps": parts.model.spec.eps,
                "q_scale": spec.scale,
                "magnitude": 1.0 if rope is None else rope.magnitude,
                **cache.fields(),
            },
            shared_bytes=heads_shared_bytes(spec.head_dim_k, spec.head_dim_v),
            overlapped=parts.overlapped,
        )
        return q

    def _turns(self, rope: RopeSpec) -> int:
        """Address of the rope's angles per position."""
        factors = None
        if rope.factors is not None:
            values = self._parts.model.weights[rope.factors].to_f32()
            factors = np.asarray(values, np.float32).reshape(-1)
        return self._parts.constants.place(turns_of(rope_frequencies(rope, factors)))

    def _attend(
        self, layer: int, spec: AttentionSpec, cache: LayerCache, q: int, qkv: int, out: DeviceRows
    ) -> None:
        """out[t] = attention of token t over the keys and values of its sequence."""
        parts, shape = self._parts, self._shape(cache)
        window = spec.window or 0
        most = max_splits(spec.n_head, spec.n_head_kv)
        splits = n_splits(parts.shape.n_context - 1, most, window)
        sizes = partials_bytes(splits, spec.n_head, spec.head_dim_v, parts.n_tokens)
        partials = parts.room.place(f"attention partials {sizes[0]}", sizes[0])
        states = parts.room.place(f"attention states {sizes[1]}", sizes[1])
        parts.plan.add(
            f"{layer}.attention",
            attention(shape),
            attention_grid(splits, spec.n_head, spec.n_head_kv, parts.n_tokens),
            {
                **self._reading(spec, cache, q),
                "partials": partials,
                "states": states,
                "max_splits": most,
            },
            shared_bytes=attention_shared_bytes(shape),
            overlapped=parts.overlapped,
        )
        parts.plan.add(
            f"{layer}.attention_join",
            attention_join(overlapped=parts.overlapped),
            attention_join_grid(spec.n_head, spec.head_dim_v, parts.n_tokens),
            {
                "counts": parts.token_count,
                "positions": parts.control("positions"),
                "partials": partials,
                "states": states,
                **self._ending(spec, qkv),
                "out": out.wanted("f32"),
                "n_head": spec.n_head,
                "dim_v": spec.head_dim_v,
                "n_splits": splits,
                "window": window,
                "max_splits": most,
                **_records(out, "q8_256", "256"),
                **_records(out, "q8_32", "32"),
            },
            overlapped=parts.overlapped,
        )

    def _attend_prompt(
        self, layer: int, spec: AttentionSpec, cache: LayerCache, q: int, qkv: int, out: DeviceRows
    ) -> None:
        """The same for tokens that follow each other; then the records of it."""
        parts, shape = self._parts, self._shape(cache)
        result = out.want("f32")
        parts.plan.add(
            f"{layer}.attention_prompt",
            attention_prompt(shape),
            attention_prompt_grid(spec.n_head, spec.n_head_kv, parts.n_tokens),
            {
                **self._reading(spec, cache, q),
                **self._ending(spec, qkv),
                "out": result,
            },
            shared_bytes=attention_prompt_shared_bytes(shape),
            overlapped=parts.overlapped,
        )
        add_records(parts, f"{layer}.attended", result, out)

    def _reading(self, spec: AttentionSpec, cache: LayerCache, q: int) -> dict[str, int]:
        """The arguments that say which tokens read which keys and values."""
        parts = self._parts
        return {
            "counts": parts.token_count,
            "positions": parts.control("positions"),
            "rows": parts.control("rows"),
            "page_tables": parts.control("page_tables"),
            "q": q,
            "k_pages": cache.k_pages,
            "v_pages": cache.v_pages,
            "n_head": spec.n_head,
            "group": spec.n_head // spec.n_head_kv,
            "table_stride": parts.layout.max_pages,
            "k_page_bytes": cache.k_page_bytes,
            "v_page_bytes": cache.v_page_bytes,
            "window": spec.window or 0,
        }

    def _ending(self, spec: AttentionSpec, qkv: int) -> dict[str, float]:
        """The arguments that say what becomes of the weighted values."""
        return {
            "sinks": self._parts.weights.vector(spec.sinks),
            "gates": qkv + 4 * spec.head_dim_k if spec.gated else 0,
            "gate_row": self._width(spec),
            "gate_stride": spec.head_dim_k + spec.head_dim_v,
            "value_scale": spec.value_scale,
        }

    def _shape(self, cache: LayerCache) -> AttentionShape:
        """What the attention kernels of the layer are made for."""
        return AttentionShape(
            cache.keys.dim,
            cache.values.dim,
            cache.keys.cache_type,
            cache.values.cache_type,
            overlapped=self._parts.overlapped,
        )

    def _width(self, spec: AttentionSpec) -> int:
        """Values of a token's queries, gates, keys and values."""
        return spec.n_q + spec.n_gate + spec.n_k + spec.n_v

    def _attention(self, mixer: Mixer) -> AttentionSpec:
        if not isinstance(mixer, AttentionSpec):
            raise EngineBug(f"there are no launches for {type(mixer).__name__}")
        return mixer


def _records(rows: DeviceRows, kind: ActivationKind, suffix: str) -> dict[str, int]:
    """The arguments of `attention_join` for the records of a kind; zeros where nobody wants it."""
    address = rows.wanted(kind)
    scales, sums, n_bytes = activation_layout(kind, rows.width) if address else (0, 0, 0)
    return {
        f"records_{suffix}": address,
        f"scales_{suffix}": scales,
        f"sums_{suffix}": sums,
        f"bytes_{suffix}": n_bytes,
    }
