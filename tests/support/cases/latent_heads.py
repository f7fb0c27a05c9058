"""latent_heads: parts of queries, and the latent as a key and as a value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from ops.gpu.heads import ROPE_NEOX, ROPE_NONE, ROPE_NORM, heads_reference, turns_of
from ops.gpu.kv_layout import PAGE_TOKENS
from ops.gpu.latent_heads import latent_heads, latent_heads_grid, latent_heads_shared_bytes
from tests.support.cases.case import Case, Outcome
from tests.support.kv_pages import KVPages
from tests.support.machines import Machine

POSITIONS = (63, 1_000_003, 64, 5)
CELL_PAGES = (1, 3, 0, -1)
"""The last token has no page: nothing of it is kept."""
EPS = 1e-6
Q_SCALE = 0.07
TOLERANCE = 2e-5


@dataclass(frozen=True)
class LatentShape:
    n_head: int
    dim_nope: int
    dim_rope: int
    dim_latent: int
    rope: int = ROPE_NORM
    cache: str = "f16"
    once: bool = False

    @property
    def n_rot(self) -> int:
        return 0 if self.rope == ROPE_NONE else self.dim_rope

    def __str__(self) -> str:
        dims = f"{self.dim_nope} + {self.dim_rope}, {self.dim_latent}"
        return f"{self.n_head} x {dims}, rope {self.rope}, {self.cache}{' once' * self.once}"


SMALL = (
    LatentShape(3, 128, 64, 512),
    LatentShape(3, 128, 64, 512, once=True),
    LatentShape(8, 32, 16, 48, ROPE_NEOX, "f32"),
    LatentShape(2, 192, 64, 192, ROPE_NONE, "q8_0"),
)
LARGE = (LatentShape(16, 128, 64, 512), LatentShape(128, 128, 64, 512, cache="q8_0"))


def run(s: LatentShape, overlapped: bool, m: Machine) -> Outcome:
    """Both parts of the queries, then key and value in units of the cache's steps."""
    n, generator = len(POSITIONS), np.random.default_rng(6)
    dim_q, dim_k = s.dim_nope + s.dim_rope, s.dim_latent + s.dim_rope
    q = generator.normal(size=(n + 1, s.n_head, dim_q)).astype(np.float32)
    rows = generator.normal(size=(n + 1, dim_k + 4)).astype(np.float32)
    norm = generator.uniform(0.5, 1.5, s.dim_latent).astype(np.float32)
    frequencies = 1e4 ** (-2.0 * np.arange(s.n_rot // 2) / max(1, s.n_rot))
    pages = KVPages(1, dim_k, s.dim_latent, s.cache, s.cache, n_pages=4)
    plain = np.full((n + 1, s.n_head, s.dim_nope), 7.5, np.float32)
    queries = np.full((n + 1, s.n_head, dim_k), 7.5, np.float32)
    places = [m.place(array) for array in (plain, queries, pages.keys, pages.values)]
    sizes = ("n_head", "dim_nope", "dim_rope", "dim_latent", "n_rot")
    m.launch(
        latent_heads(overlapped=overlapped),
        latent_heads_grid(s.n_head, n + 1),
        {
            "counts": m.place(np.array([n, 0, 0, 0], np.uint32), writable=False),
            "positions": m.place(np.array([*POSITIONS, 0], np.int32), writable=False),
            "cell_pages": m.place(np.array([*CELL_PAGES, 0], np.int32), writable=False),
            "q": m.place(q, writable=False),
            "latents": m.place(rows, writable=False),
            "norm": m.place(norm, writable=False),
            "turns": m.place(turns_of(frequencies), writable=False) if s.n_rot else 0,
            **dict(zip(("plain", "queries", "k_pages", "v_pages"), places, strict=True)),
            **({"v_pages": 0} if s.once else {}),
            "q_row": s.n_head * dim_q,
            "latent_row": rows.shape[1],
            **{name: getattr(s, name) for name in sizes},
            "rope_kind": s.rope,
            **{k: v for k, v in pages.parameters().items() if not k.endswith("head_bytes")},
            "eps": EPS,
            "q_scale": Q_SCALE,
            "magnitude": 1.0,
        },
        shared_bytes=latent_heads_shared_bytes(s.dim_nope, s.dim_rope, s.dim_latent),
    )
    arrays = (plain, queries, pages.keys, pages.values)
    got = [m.read(p, a.dtype, a.shape) for p, a in zip(places, arrays, strict=True)]
    if s.once:
        assert (got[3] == pages.values).all()
        got[3] = pages.values
    for token, position in enumerate(POSITIONS):
        angles, neox = position * frequencies, s.rope == ROPE_NEOX
        plain[token] = Q_SCALE * q[token, :, : s.dim_nope]
        turned = heads_reference(q[token, :, s.dim_nope :], None, angles, neox, 1.0, EPS)
        queries[token, :, s.dim_latent :] = Q_SCALE * turned
        latent = heads_reference(
            rows[token : token + 1, : s.dim_latent], norm[None], angles[:0], neox, 1.0, EPS
        )
        part = rows[token : token + 1, s.dim_latent : dim_k]
        key = np.concatenate([latent, heads_reference(part, None, angles, neox, 1.0, EPS)], 1)
        if CELL_PAGES[token] >= 0:
            pages.store(CELL_PAGES[token], position % PAGE_TOKENS, key, latent)
    stored = pages.like(*got[2:]).in_steps(TOLERANCE)
    return Outcome(
        np.concatenate([*(a.ravel() for a in got[:2]), stored]),
        np.concatenate([plain.ravel(), queries.ravel(), pages.in_steps(TOLERANCE)]),
        TOLERANCE,
    )


def cases() -> Iterator[Case]:
    for shapes, large in ((SMALL, False), (LARGE, True)):
        for shape in shapes:
            for overlapped in (False,) if large else (False, True):
                kernel = latent_heads(overlapped=overlapped)
                yield Case(str(shape), kernel, partial(run, shape, overlapped), large)
