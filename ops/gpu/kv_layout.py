"""How one page of keys and values of one kv head lies in a GPU's memory, by cache type.

A page holds 32 tokens.  Keys are [token][dimension], dimensions padded with zeros to a multiple of
32; values are transposed, [dimension][token].  So a lane's 16 bytes are eight neighbouring values
of the sum that a tensor core forms, and a head of a page is one run of bytes.  q8_0 keeps int8
values with one f32 scale per token and 32 dimensions, the scales behind the values: of keys
f32[token][dimension / 32], of values f32[dimension / 32][token].

Pages of one layer lie page_bytes = n_head_kv * head_bytes apart or more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

PAGE_TOKENS = 32
SCALE_DIMS = 32
VALUE_DIMS = 16
"""Value dimensions of a warp: values have a multiple of it."""
KEY_DIMS = 8
"""Keys, which are padded, have a multiple of these."""

F32_CACHE, F16_CACHE, Q8_CACHE = 0, 1, 2
CACHE_CODES = {"f32": F32_CACHE, "f16": F16_CACHE, "q8_0": Q8_CACHE}
ELEMENT_BYTES = {F32_CACHE: 4, F16_CACHE: 2, Q8_CACHE: 1}


@dataclass(frozen=True)
class GPUPageLayout:
    """One side of the cache: `cache_type` f16, f32 or q8_0, `dim` per head.

    Raises: ValueError when a key is no multiple of 8 dimensions, a value of 16, either of 32 for
    q8_0.
    """

    side: Literal["keys", "values"]
    cache_type: str
    dim: int

    def __post_init__(self) -> None:
        step = KEY_DIMS if self.side == "keys" else VALUE_DIMS
        if self.dim % step:
            raise ValueError(
                f"GPU attention needs {self.side} of a multiple of {step} dimensions, "
                f"this model has {self.dim}"
            )
        if self.cache_type == "q8_0" and self.dim % SCALE_DIMS:
            raise ValueError(
                f"the cache type q8_0 needs heads of a multiple of {SCALE_DIMS} dimensions, "
                f"this model has {self.dim}: use f16"
            )

    @property
    def code(self) -> int:
        """How kernels name the cache type."""
        return CACHE_CODES[self.cache_type]

    @cached_property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.code]

    @property
    def padded_dim(self) -> int:
        """Dimensions with their padding."""
        return -(-self.dim // SCALE_DIMS) * SCALE_DIMS if self.side == "keys" else self.dim

    @cached_property
    def value_bytes(self) -> int:
        """Bytes of the values of one head in one page: where the scales begin."""
        return PAGE_TOKENS * self.padded_dim * self.element_bytes

    @cached_property
    def head_bytes(self) -> int:
        """Bytes of one kv head in one page, a multiple of 16."""
        scales = PAGE_TOKENS * self.dim // SCALE_DIMS * 4 if self.code == Q8_CACHE else 0
        return self.value_bytes + scales
