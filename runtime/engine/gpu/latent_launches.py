"""Latent attention as launches: all heads read one narrow cached row of each token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ops.gpu.attention import WIDE_BLOCKS_AT_ONCE, max_splits
from ops.gpu.expert import ADDRESSES
from ops.gpu.latent_heads import latent_heads, latent_heads_grid, latent_heads_shared_bytes
from ops.gpu.latent_pairs import pair_page_bytes
from runtime.engine.gpu.attention_launches import add_output
from runtime.engine.gpu.indexer_launches import (
    IndexerLaunches,
    Place,
    index_products,
    inputs,
)
from runtime.engine.gpu.kv import GPUPages
from runtime.engine.gpu.matrix_launches import (
    GEMM_ROWS,
    GemmSize,
    Output,
    add_gemm,
    add_products,
    joined,
    want_inputs,
)
from runtime.engine.gpu.paged_attention import (
    PagedAttention,
    add_attention,
    add_latent_pairs,
    add_latent_prompt,
    latent_prompt_shape,
    prompt_splits,
)
from runtime.engine.gpu.plan_parts import DeviceRows, PlanParts
from runtime.engine.gpu.rope_fields import rope_fields
from runtime.engine.gpu.row_launches import add_norm, add_records
from runtime.engine.gpu.slot_products import add_slot_products, are_slot_matrices
from runtime.engine.step import StepKind
from runtime.models.latent_attention import LatentAttentionSpec
from runtime.models.linear import Linear
from runtime.models.spec import ModelSpec, MoeSpec

PHASE = "latent attention"
"""Of a layer: `Room.place`."""
MOST_HEAD_ROWS = 1 << 17
"""Heads of all tokens of a step: their rows of a latent each, f32, take 256 MiB for latents of 512
values, and there are three such arrays.  Fewer tokens a step would cost more where experts come
over the link, all of them for each step: 2048 tokens of 64 heads read them half as often as 1024.
"""
MOST_SLOTS = (1 << 16) - 1
"""Experts of all tokens of a step: blocks of a launch in its second dimension."""


def most_tokens(spec: ModelSpec, most: int) -> int:
    """Tokens of a step whose rows of heads and of experts are not too many, `most` at most."""
    latent = [m for layer in spec.layers if isinstance(m := layer.mixer, LatentAttentionSpec)]
    routed = [b for layer in spec.layers if isinstance(b := layer.feed_forward, MoeSpec)]
    by_heads = [max(1, MOST_HEAD_ROWS // mixer.n_head) for mixer in latent]
    return min([most, *by_heads, *(max(1, MOST_SLOTS // block.n_used) for block in routed)])


@dataclass(frozen=True)
class Projected:
    """Where a token's numbers before its heads lie.

    q        address of f32[n_tokens, q_row], which begins with all heads' queries
    latents  address of f32[n_tokens, latent_row], which begins with latent and key part
    index    of what the indexer needs, where there is one
    """

    q: int
    q_row: int
    latents: int
    latent_row: int
    index: dict[str, Place]


class LatentLaunches:
    """The launches of layers with `LatentAttentionSpec`; see `MixerLaunches`."""

    def __init__(self, parts: PlanParts, pages: GPUPages, indexers: IndexerLaunches) -> None:
        self._parts, self._pages, self._indexers = parts, pages, indexers
        self._head_rows: dict[int, tuple[int, int]] = {}

    def prepare(self, mixer: LatentAttentionSpec, x: DeviceRows) -> None:
        """Ask x, the normalised rows, for the forms that the first products need."""
        want_inputs(self._parts, (mixer.query[0], mixer.latent), x)
        if mixer.indexer is not None:
            want_inputs(self._parts, list(inputs(mixer.indexer, is_narrow=True).values()), x)

    def add(self, layer: int, mixer: LatentAttentionSpec, x: DeviceRows) -> Mapping[str, int]:
        """See `MixerLaunches.add`."""
        parts, n_head, n = self._parts, mixer.n_head, self._parts.n_tokens
        projected = self._project(layer, mixer, x)
        plain, queries = self._heads(layer, mixer, projected)
        indexer, cache = mixer.indexer, self._pages.layer(layer)
        scores = indexer is not None and self._indexers.chooses(indexer)
        if indexer is not None and scores:
            self._indexers.score(layer, indexer, cache, projected.index, late=True)
        self._head_products(f"{layer}.key_up", mixer.key_up, plain, queries, mixer.dim_k)
        if indexer is not None and scores:
            self._indexers.choose(layer, indexer, late=True)
        width = n_head * mixer.dim_latent
        mixed = DeviceRows(parts.room, f"mixed latents {width}", n, width, PHASE)
        chooses = mixer.indexer is not None or mixer.reads_as_before
        attention = PagedAttention(
            name=f"{layer}.attention",
            cache=cache,
            n_head=n_head,
            q=queries,
            out=mixed,
            choice=self._indexers.choice if chooses else None,
        )
        mixed_at = mixed.want("f32")
        self._attend(mixer, attention)
        values = DeviceRows(
            parts.room, f"head values {n_head * mixer.dim_v}", n, n_head * mixer.dim_v, PHASE
        )
        values.lies_at("f32", plain)  # which nobody reads any more
        want_inputs(parts, [mixer.output], values)
        values_at = values.want("f32")
        self._head_products(f"{layer}.value_up", mixer.value_up, mixed_at, values_at, mixer.dim_v)
        add_records(parts, f"{layer}.attention_output", values_at, values)
        return add_output(parts, layer, mixer.output, values)

    def _attend(self, mixer: LatentAttentionSpec, attention: PagedAttention) -> None:
        """Its launches: many rows share their keys in prompts, where a kernel takes them."""
        parts = self._parts
        if parts.shape.kind is not StepKind.PREFILL:
            add_attention(parts, attention, max_splits(mixer.n_head, 1, WIDE_BLOCKS_AT_ONCE))
        elif shape := latent_prompt_shape(parts, attention):
            pairs = 0
            if shape.pairs:
                n_bytes = self._pages.n_pages * pair_page_bytes(shape.dim_k)
                pairs = parts.room.place(f"latent pairs {n_bytes}", n_bytes, PHASE)
                add_latent_pairs(parts, attention, pairs)
            add_latent_prompt(parts, attention, shape, pairs)
        else:
            add_attention(parts, attention, prompt_splits(mixer.n_head, 1))

    def _project(self, layer: int, mixer: LatentAttentionSpec, x: DeviceRows) -> Projected:
        """The products of x, and those of the narrow queries where there are such."""
        parts, n = self._parts, self._parts.n_tokens
        first, indexer = joined((mixer.query[0], mixer.latent)), mixer.indexer
        is_narrow = mixer.query_norm is not None
        latent_at, starts = first[1].y_first, dict[str, int]()
        stride = latent_at + mixer.latent.n_out
        if indexer is not None:
            more, starts, stride = index_products(indexer, stride, is_narrow=is_narrow)
            first += tuple(more)
        rows = parts.room.place(f"query and latent {stride}", 4 * n * stride, PHASE)
        out = Output(rows, stride)
        add_products(parts, f"{layer}.query_latent", first, x, out, parts.token_count, n)
        latents = rows + 4 * latent_at
        index = {name: (rows + 4 * start, stride) for name, start in starts.items()}
        if mixer.query_norm is None:
            self._keep(layer, mixer, index)
            return Projected(rows, stride, latents, stride, index)
        narrow = DeviceRows(parts.room, f"narrow queries {latent_at}", n, latent_at, PHASE)
        linears = [mixer.query[1]]
        if indexer is not None and self._indexers.chooses(indexer):
            linears.append(indexer.query)
        want_inputs(parts, linears, narrow)
        name = f"{layer}.query_norm"
        add_norm(parts, name, mixer.query_norm, rows, narrow, {}, x_stride=stride)
        products = joined(linears)
        n_q = products[-1].y_first + linears[-1].n_out
        q = parts.room.place(f"q {n_q}", 4 * n * n_q, PHASE)
        out = Output(q, n_q)
        add_products(parts, f"{layer}.query", products, narrow, out, parts.token_count, n)
        self._keep(layer, mixer, index, late=True)
        if len(products) > 1:
            index["query"] = (q + 4 * products[1].y_first, n_q)
        return Projected(q, n_q, latents, stride, index)

    def _keep(
        self,
        layer: int,
        mixer: LatentAttentionSpec,
        index: Mapping[str, Place],
        *,
        late: bool = False,
    ) -> None:
        if mixer.indexer is not None:
            self._indexers.keep(layer, mixer.indexer, self._pages.layer(layer), index, late=late)

    def _heads(
        self, layer: int, mixer: LatentAttentionSpec, projected: Projected
    ) -> tuple[int, int]:
        """Addresses of the parts of the queries: what `key_up` multiplies, f32[n_tokens, n_head,
        dim_nope], and the rows it multiplies them into, f32[n_tokens, n_head, dim_k]."""
        parts, n_head = self._parts, mixer.n_head
        n_rows = parts.n_tokens * n_head
        n_plain = n_rows * max(mixer.dim_nope, mixer.dim_v)
        plain = parts.room.place(f"plain queries {n_plain}", 4 * n_plain, PHASE)
        n_queries = n_rows * mixer.dim_k
        queries = parts.room.place(f"latent queries {n_queries}", 4 * n_queries, PHASE)
        fields = self._pages.layer(layer).fields()
        parts.plan.add(
            f"{layer}.heads",
            latent_heads(overlapped=parts.overlapped),
            latent_heads_grid(n_head, parts.n_tokens),
            {
                "counts": parts.token_count,
                "positions": parts.control("positions"),
                "cell_pages": parts.control("cell_pages"),
                "q": projected.q,
                "latents": projected.latents,
                "norm": parts.weights.vector(mixer.latent_norm),
                "plain": plain,
                "queries": queries,
                "q_row": projected.q_row,
                "latent_row": projected.latent_row,
                "n_head": n_head,
                "dim_nope": mixer.dim_nope,
                "dim_rope": mixer.dim_rope,
                "dim_latent": mixer.dim_latent,
                "eps": parts.model.spec.eps,
                "q_scale": mixer.scale,
                **rope_fields(parts, mixer.rope),
                **{name: fields[name] for name in fields if not name.endswith("head_bytes")},
            },
            shared_bytes=latent_heads_shared_bytes(
                mixer.dim_nope, mixer.dim_rope, mixer.dim_latent
            ),
            overlapped=parts.overlapped,
        )
        return plain, queries

    def _head_products(self, name: str, linear: Linear, x: int, y: int, y_stride: int) -> None:
        """y[t, h] = the h-th matrix times x[t, h]: x f32[n_tokens, n_head, n_in], rows of y lie
        y_stride values apart.  Tokens that the step does not have are multiplied too."""
        parts, n_head = self._parts, linear.n_expert or 1
        weight = parts.model.weights[linear.weight]
        if y_stride == linear.n_out and self._are_few(linear):
            addresses = self._matrices(linear) * parts.n_tokens
            size = (linear.n_in, linear.n_out)
            add_slot_products(parts, name, weight.format, size, addresses, (x, y))
            return
        kind, n_rows, records = weight.format.activation, parts.n_tokens * n_head, x
        if kind != "f32":
            rows = DeviceRows(parts.room, f"head rows {linear.n_in}", n_rows, linear.n_in, PHASE)
            records = rows.want(kind)
            add_records(parts, name, x, rows)
        matrices = np.zeros((n_head, ADDRESSES), np.uint64)
        matrices[:, 0] = self._matrices(linear)
        order, offsets = self._order(n_head)
        add_gemm(
            parts,
            name,
            GemmSize(weight.format, linear.n_in, linear.n_out, n_rows, n_head),
            {
                "records": records,
                "rows": order,
                "out_rows": order,
                "offsets": offsets,
                "matrices": parts.constants.place(matrices),
                "y": y,
                "y_stride": y_stride,
                "bias": parts.weights.vector(linear.bias),
                "factors": parts.weights.vector(linear.scale),
            },
        )

    def _are_few(self, linear: Linear) -> bool:
        """Whether every head of every token reads its matrix by itself."""
        fmt, few = self._parts.format_of(linear.weight), self._parts.n_tokens < GEMM_ROWS
        plain = linear.bias is None and linear.scale is None
        return few and plain and are_slot_matrices(fmt, linear.n_in, linear.n_out)

    def _matrices(self, linear: Linear) -> list[int]:
        """Addresses of the heads' matrices."""
        weight = self._parts.model.weights[linear.weight]
        first = self._parts.weights.matrix(linear.weight)
        n_bytes = linear.n_out * weight.row_bytes
        return [first + head * n_bytes for head in range(linear.n_expert or 1)]

    def _order(self, n_head: int) -> tuple[int, int]:
        """Addresses of the rows of every head's tokens, head after head, i32[n_head, n_tokens], and
        of where each head's begin, i32[n_head + 1]."""
        if n_head not in self._head_rows:
            n = self._parts.n_tokens
            order = np.arange(n * n_head, dtype=np.int32).reshape(n, n_head).T
            offsets = n * np.arange(n_head + 1, dtype=np.int32)
            place = self._parts.constants.place
            self._head_rows[n_head] = place(np.ascontiguousarray(order)), place(offsets)
        return self._head_rows[n_head]
