"""How one page of keys and values of one kv head lies in memory, by cache type.

A page holds 32 tokens.  Keys are stored transposed, [dimension][token], so that the scores of 16
keys are one vector and need no horizontal sum; values are [token][dimension], dimensions padded to
a multiple of 16.  q8_0 keeps int8 values with one f32 scale per token and 32 dimensions, the scales
behind the values: of keys f32[dimension / 32][token], of values f32[token][dimension / 32].
"""

from __future__ import annotations

from dataclasses import dataclass

from ops.cpu.vector import LANES

PAGE_TOKENS = 32
BLOCK_TOKENS = 512  # keys of one softmax; see ops.cpu.attention
SCALE_DIMS = 32
F32_CACHE, F16_CACHE, Q8_CACHE = 0, 1, 2
CACHE_CODES = {"f32": F32_CACHE, "f16": F16_CACHE, "q8_0": Q8_CACHE}
VALUE_BYTES = {F32_CACHE: 4, F16_CACHE: 2, Q8_CACHE: 1}


@dataclass(frozen=True)
class PageLayout:
    """One side (keys or values) of the cache: `cache_type` f16, f32 or q8_0, `dim` per head.

    Raises: ValueError when q8_0 meets a head that is not a multiple of 32.
    """

    cache_type: str
    dim: int

    def __post_init__(self) -> None:
        if self.cache_type == "q8_0" and self.dim % SCALE_DIMS:
            raise ValueError(
                f"the cache type q8_0 needs heads of a multiple of {SCALE_DIMS} dimensions, "
                f"this model has {self.dim}: use f16"
            )

    @property
    def code(self) -> int:
        """How compiled code names the cache type."""
        return CACHE_CODES[self.cache_type]

    @property
    def padded_dim(self) -> int:
        return -(-self.dim // LANES) * LANES

    @property
    def head_bytes(self) -> int:
        """Bytes of one kv head in one page."""
        values = PAGE_TOKENS * self.padded_dim * VALUE_BYTES[self.code]
        scales = PAGE_TOKENS * self.dim // SCALE_DIMS * 4 if self.code == Q8_CACHE else 0
        return values + scales
