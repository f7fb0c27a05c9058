"""Pages of keys and values as the GPU keeps them, read and written in NumPy."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ops.gpu.kv_layout import PAGE_TOKENS, SCALE_DIMS, GPUPageLayout
from ops.quants.block import F32, U8

DTYPES = {"f32": np.float32, "f16": np.float16, "q8_0": np.int8}


@dataclass
class KVPages:
    """keys, values  u8[n_pages, n_head_kv, head_bytes], all bits set: NaN, or values of -1 scaled
    by NaN"""

    n_head_kv: int
    dim_k: int
    dim_v: int
    k_cache: str = "f16"
    v_cache: str = "f16"
    n_pages: int = 1
    keys: U8 = field(init=False)
    values: U8 = field(init=False)

    def __post_init__(self) -> None:
        self.k_layout = GPUPageLayout("keys", self.k_cache, self.dim_k)
        self.v_layout = GPUPageLayout("values", self.v_cache, self.dim_v)
        self.keys, self.values = (
            np.full((self.n_pages, self.n_head_kv, layout.head_bytes), 0xFF, np.uint8)
            for layout in (self.k_layout, self.v_layout)
        )

    def like(self, keys: U8, values: U8) -> KVPages:
        """Pages of the same kind with other content."""
        pages = KVPages(
            self.n_head_kv, self.dim_k, self.dim_v, self.k_cache, self.v_cache, self.n_pages
        )
        pages.keys, pages.values = keys, values
        return pages

    def parameters(self) -> dict[str, int]:
        """What `heads` has to know of the pages."""
        return {
            "k_cache": self.k_layout.code,
            "k_page_bytes": self.n_head_kv * self.k_layout.head_bytes,
            "k_head_bytes": self.k_layout.head_bytes,
            "v_cache": self.v_layout.code,
            "v_page_bytes": self.n_head_kv * self.v_layout.head_bytes,
            "v_head_bytes": self.v_layout.head_bytes,
        }

    @property
    def step(self) -> float:
        """How far apart values of magnitude 4 and its scale lie in the coarser cache."""
        steps = {"f32": 1e-6, "f16": 2**-8, "q8_0": 4 / 127}
        return max(steps[self.k_cache], steps[self.v_cache])

    def in_steps(self, tolerance: float) -> F32:
        """All keys, then all values, so small that a difference of a rounding step, to whose other
        side a value may fall, is the tolerance."""
        weight = np.float32(tolerance / max(tolerance, self.step))
        return weight * np.concatenate([part.ravel() for part in self.decoded()])

    def store(self, page: int, cell: int, k: F32, v: F32) -> None:
        """One token's keys f32[n_head_kv, dim_k] and values f32[n_head_kv, dim_v]."""
        padded = np.zeros((self.n_head_kv, self.k_layout.padded_dim), np.float32)
        padded[:, : self.dim_k] = k
        for content, layout, x in (
            (self.keys, self.k_layout, padded),
            (self.values, self.v_layout, v),
        ):
            stored, scales = _parts(content[page], layout)
            codes, scale = encoded(layout.cache_type, x)
            if layout.side == "keys":
                stored[:, cell] = codes
                scales[:, cell] = scale
            else:
                stored[:, :, cell] = codes
                scales[:, :, cell] = scale

    def store_sequence(self, table: NDArray[np.int32], k: F32, v: F32) -> None:
        """Tokens from position 0 on: keys f32[n_head_kv, n_tokens, dim_k] and values alike."""
        for start in range(0, k.shape[1], PAGE_TOKENS):
            self._store_page(table[start // PAGE_TOKENS], k[:, start:][:, :PAGE_TOKENS], "keys")
            self._store_page(table[start // PAGE_TOKENS], v[:, start:][:, :PAGE_TOKENS], "values")

    def _store_page(self, page: int, x: F32, side: str) -> None:
        """x f32[n_head_kv, up to 32 tokens, dim]."""
        content, layout = (
            (self.keys, self.k_layout) if side == "keys" else (self.values, self.v_layout)
        )
        stored, scales = _parts(content[page], layout)
        n_tokens = x.shape[1]
        padded = np.zeros((*x.shape[:2], layout.padded_dim), np.float32)
        padded[..., : layout.dim] = x
        codes, scale = encoded(layout.cache_type, padded.reshape(-1, layout.padded_dim))
        codes, scale = codes.reshape(*padded.shape), scale.reshape(*x.shape[:2], -1)
        if side == "keys":
            stored[:, :n_tokens], scales[:, :n_tokens] = codes, scale
        else:
            stored[..., :n_tokens] = codes.transpose(0, 2, 1)
            scales[..., :n_tokens] = scale.transpose(0, 2, 1)

    def load_sequence(self, table: NDArray[np.int32], length: int) -> tuple[F32, F32]:
        """Keys f32[n_head_kv, length, dim_k] and values as cached."""
        k, v = self.decoded()
        n_pages = -(-length // PAGE_TOKENS)
        keys = k[table[:n_pages]].transpose(1, 0, 2, 3).reshape(self.n_head_kv, -1, k.shape[-1])
        values = v[table[:n_pages]].transpose(1, 0, 3, 2).reshape(self.n_head_kv, -1, self.dim_v)
        return keys[:, :length, : self.dim_k], values[:, :length]

    def decoded(self) -> tuple[F32, F32]:
        """Keys f32[n_pages, n_head_kv, 32, padded] and values f32[n_pages, n_head_kv, dim, 32]."""
        keys, key_scales = _parts(self.keys, self.k_layout)
        values, value_scales = _parts(self.values, self.v_layout)
        k, v = keys.astype(np.float32), values.astype(np.float32)
        if self.k_cache == "q8_0":
            k *= np.repeat(key_scales, SCALE_DIMS, axis=-1)
        if self.v_cache == "q8_0":
            v *= np.repeat(value_scales, SCALE_DIMS, axis=-2)
        return k, v


def encoded(cache_type: str, x: F32) -> tuple[NDArray[np.generic], F32]:
    """x f32[n_heads, dim] as stored, and the scales f32[n_heads, dim / 32] of q8_0."""
    if cache_type != "q8_0":
        return x.astype(DTYPES[cache_type]), np.zeros((len(x), 0), np.float32)
    groups = x.reshape(len(x), -1, SCALE_DIMS)
    amax = np.abs(groups).max(-1)
    inverse = np.where(amax < 1e-30, np.float32(0), np.float32(127) / np.maximum(amax, 1e-30))
    codes = np.rint(groups * inverse[..., None].astype(np.float32)).astype(np.int8)
    return codes.reshape(x.shape), (amax / np.float32(127)).astype(np.float32)


def _parts(content: U8, layout: GPUPageLayout) -> tuple[NDArray[np.generic], F32]:
    """Views of heads u8[..., head_bytes]: values, and scales (none: an empty axis)."""
    front = content.shape[:-1]
    n = PAGE_TOKENS * layout.padded_dim * layout.element_bytes
    values = content[..., :n].view(DTYPES[layout.cache_type])
    scales = content[..., n:].view(np.float32)
    groups = scales.shape[-1] // PAGE_TOKENS
    if layout.side == "keys":
        return (
            values.reshape(*front, PAGE_TOKENS, layout.padded_dim),
            scales.reshape(*front, PAGE_TOKENS, groups),
        )
    return (
        values.reshape(*front, layout.padded_dim, PAGE_TOKENS),
        scales.reshape(*front, groups, PAGE_TOKENS),
    )
