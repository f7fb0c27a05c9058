"""heads: norms, rope and the KV store, for tokens whose pages hold garbage before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ops.gpu.heads import (
    NORM_HEAD,
    NORM_NONE,
    NORM_ROW,
    ROPE_NEOX,
    ROPE_NONE,
    ROPE_NORM,
    heads,
    heads_grid,
    heads_reference,
    heads_shared_bytes,
    turns_of,
)
from ops.gpu.kv_layout import PAGE_TOKENS
from ops.quants.block import F32
from tests.support.cases.case import Array, Case, Outcome
from tests.support.kv_pages import KVPages
from tests.support.machines import Machine


@dataclass(frozen=True)
class HeadsShape:
    """gap: values between the heads of q, as where gates lie between them."""

    n_head: int
    n_head_kv: int
    dim_k: int
    dim_v: int
    norm: int = NORM_NONE
    rope: int = ROPE_NEOX
    n_rot: int = 0
    k_cache: str = "f16"
    v_cache: str = "f16"
    gap: int = 0
    magnitude: float = 1.0

    def __str__(self) -> str:
        kinds = f"norm {self.norm}, rope {self.rope} {self.n_rot}, {self.k_cache} {self.v_cache}"
        return f"{self.n_head}/{self.n_head_kv} x {self.dim_k}/{self.dim_v}, {kinds}"


SMALL = (
    HeadsShape(2, 1, 128, 128, NORM_HEAD, ROPE_NEOX, 128),
    HeadsShape(12, 4, 80, 80, NORM_ROW, ROPE_NORM, 64, "f32", "f32"),
    HeadsShape(3, 1, 192, 128, NORM_NONE, ROPE_NONE, 0, "q8_0", "q8_0", gap=32),
    HeadsShape(2, 2, 64, 160, NORM_NONE, ROPE_NEOX, 32, "q8_0", "f16", magnitude=1.25),
    HeadsShape(36, 36, 64, 16, NORM_ROW, ROPE_NEOX, 64),
    HeadsShape(1, 1, 288, 16, NORM_HEAD, ROPE_NEOX, 32),
)
LARGE = (
    HeadsShape(32, 4, 128, 128, NORM_HEAD, ROPE_NEOX, 128),
    HeadsShape(16, 16, 128, 128, NORM_ROW, ROPE_NEOX, 128, "q8_0", "q8_0"),
    HeadsShape(64, 8, 64, 64, NORM_NONE, ROPE_NEOX, 64, magnitude=1.3465736),
    HeadsShape(64, 4, 192, 128, NORM_HEAD, ROPE_NEOX, 64, "f32", "f16"),
    HeadsShape(16, 2, 256, 256, NORM_HEAD, ROPE_NEOX, 64, gap=256),
)
POSITIONS = (63, 1_000_003, 64, 5)
CELL_PAGES = (1, 3, 0, -1)
"""The last token has no page: nothing of it is kept."""
EPS = 1e-5
Q_SCALE = 0.125
TOLERANCE = 2e-5


def run(shape: HeadsShape, overlapped: bool, m: Machine) -> Outcome:
    """The queries, then keys and values as they lie in the pages, these in units of their steps."""
    s, n_tokens = shape, len(POSITIONS)
    generator = np.random.default_rng(5)
    q_stride = s.dim_k + s.gap
    k_first = s.n_head * q_stride
    v_first = k_first + s.n_head_kv * s.dim_k
    rows = generator.normal(size=(n_tokens + 1, v_first + s.n_head_kv * s.dim_v + 4))
    qkv = rows.astype(np.float32)
    pages = KVPages(s.n_head_kv, s.dim_k, s.dim_v, s.k_cache, s.v_cache, n_pages=4)
    q_norm, k_norm = (_norm_weights(s, n, generator) for n in (s.n_head, s.n_head_kv))
    frequencies = 1e4 ** (-2.0 * np.arange(s.n_rot // 2) / max(1, s.n_rot))
    q = m.place(np.full((n_tokens + 1, s.n_head, s.dim_k), 7.5, np.float32))
    k_pages, v_pages = m.place(pages.keys), m.place(pages.values)
    sizes = ("n_head", "n_head_kv", "dim_k", "dim_v", "n_rot", "magnitude")
    m.launch(
        heads(overlapped=overlapped),
        heads_grid(s.n_head, s.n_head_kv, n_tokens + 1),
        {
            "counts": m.place(np.array([n_tokens, 0, 0, 0], np.uint32), writable=False),
            "positions": m.place(np.array([*POSITIONS, 0], np.int32), writable=False),
            "cell_pages": m.place(np.array([*CELL_PAGES, 0], np.int32), writable=False),
            "qkv": m.place(qkv, writable=False),
            "q": q,
            "q_norm": m.place(q_norm, writable=False) if s.norm else 0,
            "k_norm": m.place(k_norm, writable=False) if s.norm else 0,
            "turns": m.place(turns_of(frequencies), writable=False) if s.n_rot else 0,
            "k_pages": k_pages,
            "v_pages": v_pages,
            "row_values": qkv.shape[1],
            "q_stride": q_stride,
            "k_first": k_first,
            "v_first": v_first,
            **{name: getattr(s, name) for name in sizes},
            "norm_kind": s.norm,
            "rope_kind": s.rope,
            "eps": EPS,
            "q_scale": Q_SCALE,
            **pages.parameters(),
        },
        shared_bytes=heads_shared_bytes(s.dim_k, s.dim_v),
    )
    result = m.read(q, np.float32, (n_tokens + 1, s.n_head, s.dim_k))
    expected = np.full(result.shape, 7.5, np.float32)
    stored = pages.like(
        m.read(k_pages, np.uint8, pages.keys.shape), m.read(v_pages, np.uint8, pages.values.shape)
    )
    for token in range(n_tokens):
        wanted_q, wanted_k, wanted_v = _expected(s, qkv[token], token, q_norm, k_norm, frequencies)
        expected[token] = Q_SCALE * wanted_q
        if CELL_PAGES[token] >= 0:
            pages.store(CELL_PAGES[token], POSITIONS[token] % PAGE_TOKENS, wanted_k, wanted_v)
    return Outcome(
        np.concatenate([result.ravel(), stored.in_steps(TOLERANCE)]),
        np.concatenate([expected.ravel(), pages.in_steps(TOLERANCE)]),
        TOLERANCE,
    )


def _norm_weights(s: HeadsShape, n_heads: int, generator: np.random.Generator) -> F32:
    shape = (s.dim_k,) if s.norm == NORM_HEAD else (n_heads * s.dim_k,)
    return generator.uniform(0.5, 1.5, shape).astype(np.float32)


def _expected(
    s: HeadsShape,
    row: F32,
    token: int,
    q_norm: F32,
    k_norm: F32,
    frequencies: NDArray[np.float64],
) -> tuple[Array, Array, Array]:
    """Queries before their scale, keys and values of one token, f32[heads, dim]."""
    q_end = s.n_head * (s.dim_k + s.gap)
    k_end = q_end + s.n_head_kv * s.dim_k
    q = row[:q_end].reshape(s.n_head, -1)[:, : s.dim_k]
    k = row[q_end:k_end].reshape(s.n_head_kv, s.dim_k)
    v = row[k_end : k_end + s.n_head_kv * s.dim_v].reshape(s.n_head_kv, s.dim_v)
    angles = POSITIONS[token] * frequencies
    neox = s.rope == ROPE_NEOX

    def prepared(x: Array, weight: F32) -> F32:
        used = None if s.norm == NORM_NONE else weight
        if s.norm == NORM_HEAD:
            used = weight[None]
        return heads_reference(x, used, angles, neox, s.magnitude, EPS)

    return prepared(q, q_norm), prepared(k, k_norm), v


def cases() -> Iterator[Case]:
    """Small shapes alone and overlapped, real ones."""
    for shapes, large in ((SMALL, False), (LARGE, True)):
        for shape in shapes:
            for overlapped in (False,) if large else (False, True):
                kernel = heads(overlapped=overlapped)
                yield Case(str(shape), kernel, partial(run, shape, overlapped), large)
