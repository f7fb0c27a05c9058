"""Latent attention: rows in pages, attention that reads them, and products of a matrix a head."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from ops.arithmetic import activation_layout, dot_rows, quantize_rows
from ops.cpu.attention import (
    ATTENTION,
    ITEM,
    PARTIAL_HEAD,
    attention_end,
    attention_workspaces,
    tile_tokens,
)
from ops.cpu.general_attention import general_attention
from ops.cpu.heads import ROPE_NORM
from ops.cpu.kv_layout import BLOCK_TOKENS, PAGE_TOKENS, PageLayout
from ops.cpu.latent import (
    HEAD_PRODUCTS,
    LATENT_HEADS,
    head_products,
    head_products_scratch,
    latent_heads,
)
from ops.cpu.linear import MATRIX
from ops.cpu.matmul import SCRATCH_BYTES, matmul_address
from ops.cpu.program import aligned
from ops.quants import FORMATS
from ops.quants.block import ACTIVATION_GROUP
from tests.support.attention_cache import partial_spans, singles, split_by_block, tiles
from tests.support.blocks import random_rows
from tests.support.jobs import job_args, run_job

F32 = NDArray[np.float32]
TOLERANCE = {"f32": 3e-6, "f16": 4e-3, "q8_0": 6e-2}
NOPE = 24
EPS = 1e-6


@dataclass
class Latent:
    """Tokens' rows of a layer of latent attention, and pages in random order."""

    cache_type: str
    n_head: int = 5
    n_groups: int = 1
    dim_latent: int = 48
    dim_rope: int = 16
    n_tokens: int = 70

    def __post_init__(self) -> None:
        rng, n = np.random.default_rng(self.n_tokens), self.n_tokens
        self.layout = PageLayout(self.cache_type, self.dim_latent + self.dim_rope)
        self.row_dim = self.layout.padded_dim
        self.rows = np.zeros((n, self.row_dim), np.float32)
        self.rows[:, : self.dim_latent + self.dim_rope] = rng.normal(
            size=(n, self.dim_latent + self.dim_rope)
        )
        self.q = rng.normal(size=(n, self.n_head, NOPE + self.dim_rope)).astype(np.float32)
        absorbed = rng.normal(size=(n, self.n_head, self.dim_latent)) / self.dim_latent**0.5
        self.absorbed = absorbed.astype(np.float32)
        self.norm = (1 + 0.2 * rng.normal(size=self.dim_latent)).astype(np.float32)
        n_pages = -(-n // PAGE_TOKENS) + 1
        self.table = rng.permutation(n_pages).astype(np.int32)[None, : -(-n // PAGE_TOKENS)].copy()
        self.pages = aligned((n_pages, 1, self.layout.head_bytes), np.uint8)
        self.pages[:] = 0xFF  # NaN everywhere: nothing unwritten may be read
        self.positions = np.arange(n, dtype=np.int32)
        self.angles = np.arange(n)[:, None] * 0.7 ** np.arange(self.dim_rope // 2)

    def store(self) -> F32:
        """Run `latent_heads` on all tokens; the queries, with absorbed parts put in."""
        n, rows, q = self.n_tokens, self.rows.copy(), self.q.copy()
        queries = np.zeros((n, self.n_head, self.row_dim), np.float32)
        cells = self.table[0][self.positions // PAGE_TOKENS]
        cosines, sines = (f(self.angles).astype(np.float32) for f in (np.cos, np.sin))
        args = job_args(
            LATENT_HEADS, q=q, q_stride=q.strides[0], n_head=self.n_head, dim_nope=NOPE,
            dim_rope=self.dim_rope, dim_latent=self.dim_latent, row=rows,
            row_stride=rows.strides[0], row_dim=self.row_dim, norm=self.norm, queries=queries,
            queries_stride=queries.strides[0], rope_kind=ROPE_NORM if self.dim_rope else 0,
            n_rot=self.dim_rope, cosines=cosines, sines=sines, positions=self.positions,
            cell_pages=cells, cache=self.layout.code, pages=self.pages,
            page_bytes=self.pages[0].nbytes, eps=EPS, q_scale=0.25,
        )  # fmt: skip
        run_job(latent_heads, args, n)
        assert np.allclose(q[:, :, :NOPE], 0.25 * self.q[:, :, :NOPE])
        queries[:, :, : self.dim_latent] = self.absorbed
        return queries

    def attend(self, queries: F32, items: list[tuple[int, ...]], n_partials: int = 0) -> F32:
        n, padded = self.n_tokens, -(-self.dim_latent // 16) * 16
        out = np.full((n, self.n_head * self.dim_latent), np.nan, np.float32)
        partial_bytes = self.n_head * (PARTIAL_HEAD + 4 * padded)
        partials = np.zeros((n_partials, partial_bytes), np.uint8)
        workspaces, arrays = attention_workspaces(1, self.n_head, self.n_groups, self.row_dim)
        for array in arrays:
            array[:] = 77
        work, sequences = np.array(items, ITEM), np.zeros(n, np.int32)
        pages = {}
        for side in "kv":
            pages |= {f"{side}_cache": self.layout.code, f"{side}_pages": self.pages}
            pages[f"{side}_page_bytes"] = self.pages[0].nbytes
        args = job_args(
            ATTENTION, items=work, n_head=self.n_head, n_head_kv=self.n_groups, dim_k=self.row_dim,
            dim_v=self.dim_latent, dim_v_padded=padded, row_dim=self.row_dim, keys_are_rows=1,
            q=queries, q_stride=queries.strides[0], out=out, out_stride=out.strides[0],
            positions=self.positions, sequences=sequences, page_tables=self.table,
            table_stride=self.table.strides[0], partials=partials, partial_bytes=partial_bytes,
            workspaces=workspaces, value_scale=1, **pages,
        )  # fmt: skip
        run_job(general_attention, args, len(items) * self.n_groups)
        if n_partials:
            spans = partial_spans(items, n)
            args["partial_spans"] = spans.ctypes.data
            run_job(attention_end, args, n)
        return out

    def expected(self) -> NDArray[np.float64]:
        wide = self.rows.astype(np.float64)
        latent = wide[:, : self.dim_latent]
        latent = latent / np.sqrt((latent**2).mean(1, keepdims=True) + EPS) * self.norm
        key_part = wide[:, self.dim_latent : self.dim_latent + self.dim_rope]
        q_part = 0.25 * self.q[:, :, NOPE:].astype(np.float64)
        scores = np.einsum("qhd,kd->hqk", self.absorbed.astype(np.float64), latent)
        scores += np.einsum("qhd,kd->hqk", self.turned(q_part), self.turned(key_part))
        scores = np.where(np.tri(self.n_tokens, dtype=bool), scores, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        return np.einsum("hqk,kd->qhd", p, latent).reshape(self.n_tokens, -1)

    def turned(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        angles = self.angles.reshape(len(x), *[1] * (x.ndim - 2), -1)
        out = np.empty_like(x)
        out[..., ::2] = x[..., ::2] * np.cos(angles) - x[..., 1::2] * np.sin(angles)
        out[..., 1::2] = x[..., ::2] * np.sin(angles) + x[..., 1::2] * np.cos(angles)
        return out


@pytest.mark.parametrize("cache_type", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize(("n_head", "n_groups"), [(1, 1), (5, 1), (8, 1), (16, 2), (12, 3)])
def test_latent_attention(cache_type: str, n_head: int, n_groups: int) -> None:
    layer = Latent(cache_type, n_head, n_groups)
    queries = layer.store()
    tiled = layer.attend(queries, tiles(layer.n_tokens, tile_tokens(n_head, n_groups)))
    assert np.abs(tiled - layer.expected()).max() < TOLERANCE[cache_type]
    assert np.array_equal(tiled, layer.attend(queries, singles(layer.n_tokens)))


@pytest.mark.parametrize(("dim_latent", "dim_rope"), [(32, 8), (512, 64), (64, 0), (24, 4)])
@pytest.mark.parametrize("cache_type", ["f32", "f16"])
def test_rows_of_any_even_width(dim_latent: int, dim_rope: int, cache_type: str) -> None:
    layer = Latent(cache_type, 4, 1, dim_latent, dim_rope, n_tokens=40)
    out = layer.attend(layer.store(), tiles(40, 8))
    scale = np.abs(layer.expected()).max()
    assert np.abs(out - layer.expected()).max() < scale * TOLERANCE[cache_type]


def test_long_contexts_are_cut_into_blocks_without_changing_bits() -> None:
    n = BLOCK_TOKENS + 40
    layer = Latent("f16", 4, 2, 32, 8, n_tokens=n)
    queries = layer.store()
    tiled = layer.attend(queries, tiles(n, 8))
    assert np.abs(tiled - layer.expected()).max() < 2 * TOLERANCE["f16"]
    chosen = [0, 31, 511, 512, n - 1]
    items = split_by_block(chosen)
    split = layer.attend(queries, items, len(items))
    assert np.array_equal(split[chosen], tiled[chosen])


@pytest.mark.parametrize("name", ["F32", "F16", "Q8_0", "Q4_K", "IQ4_NL"])
@pytest.mark.parametrize("rows_per_chunk", [16, 48])
def test_each_head_has_its_matrix(name: str, rows_per_chunk: int) -> None:
    """The bits of the contract; more rows than a batch, in the order of a table."""
    fmt, n_head, n_in, n_out, n_tokens = FORMATS[name], 3, 256, 48, 70
    stack = np.stack([random_rows(fmt, n_out, n_in, seed) for seed in range(n_head)])
    rng = np.random.default_rng(1)
    x = rng.normal(size=(80, n_head, n_in)).astype(np.float32)
    y = np.full((80, n_head, n_out), np.nan, np.float32)
    tokens = rng.permutation(80)[:n_tokens].astype(np.int32)
    kind = fmt.activation
    record_bytes = activation_layout(kind, n_in)[2]
    count = np.array([n_tokens], np.int64)
    scratch = aligned(head_products_scratch(record_bytes) + SCRATCH_BYTES, np.uint8)
    matrix = job_args(
        MATRIX, matmul=matmul_address(name), weights=stack, n_elems=n_in,
        row_bytes=stack.shape[-1], slab_bytes=stack[0].nbytes,
    )  # fmt: skip
    args = job_args(
        HEAD_PRODUCTS, matrix=matrix, n_rows=n_out, n_in=n_in, rows_per_chunk=rows_per_chunk,
        group=ACTIVATION_GROUP[kind], tokens=tokens, n_tokens=count, scratch=scratch, x=x,
        x_stride=x.strides[0], x_head_bytes=x.strides[1], y=y, y_stride=y.strides[0],
        y_head_bytes=y.strides[1], record_bytes=record_bytes,
    )  # fmt: skip
    run_job(head_products, args, n_head * -(-n_out // rows_per_chunk))
    for head in range(n_head):
        expected = dot_rows(fmt, stack[head], quantize_rows(kind, x[tokens, head]))
        assert np.array_equal(y[tokens, head], expected, equal_nan=True)
    rest = np.setdiff1d(np.arange(80), tokens)
    assert np.isnan(y[rest]).all()
