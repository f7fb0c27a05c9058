"""Random numbers that depend on nothing but (seed, position, draw): Philox4x32-10.

A counter instead of a state: a batch, a preemption or another executor cannot change what a
position draws, and a device kernel computes the same number from the same four words.
Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from functools import lru_cache

ROUNDS = 10
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF

Words = tuple[int, int, int, int]


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Four random 32-bit words of a 128-bit counter and a 64-bit key."""
    c0, c1, c2, c3 = counter
    for k0, k1 in _round_keys(*key):
        product_0 = _MULTIPLIER_0 * c0
        product_1 = _MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (
            (product_1 >> 32) ^ c1 ^ k0,
            product_1 & _MASK,
            (product_0 >> 32) ^ c3 ^ k1,
            product_0 & _MASK,
        )
    return c0, c1, c2, c3


def uniform(seed: int, position: int, draw: int = 0) -> float:
    """The number in [0, 1) that `draw` of `position` gets: the first word in units of 2^-32."""
    word = philox4x32((position & _MASK, position >> 32, draw, 0), (seed & _MASK, 0))[0]
    return word * 2.0**-32


@lru_cache  # a sequence keeps its seed, and this is half of the work
def _round_keys(k0: int, k1: int) -> tuple[tuple[int, int], ...]:
    return tuple(((k0 + i * _WEYL_0) & _MASK, (k1 + i * _WEYL_1) & _MASK) for i in range(ROUNDS))
