"""Rotary position embedding as data, and the table of angles that every executor turns it into."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray


class RopePairing(Enum):
    """Which two of the first n_rot dimensions of a head form pair i."""

    NEOX = auto()  # i and i + n_rot/2
    NORM = auto()  # 2i and 2i + 1


@dataclass(frozen=True)
class YarnSpec:
    """YaRN: low frequencies are interpolated, high ones kept, with a ramp between.

    n_ctx_original  context the model was trained with before it was extended
    beta_fast/slow  rotations within that context at which the ramp starts and ends
    """

    n_ctx_original: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True)
class RopeSpec:
    """Rotation of the first `n_rot` dimensions of each head; the others pass through.

    factor     the context is stretched by this much (angles are divided by it)
    yarn       None: every angle is divided alike
    magnitude  multiplies both cosine and sine (YaRN sharpens attention so)
    factors    name of the tensor f32[n_rot/2] of per-pair divisors, or None
    """

    pairing: RopePairing
    n_rot: int
    base: float
    factor: float = 1.0
    yarn: YarnSpec | None = None
    magnitude: float = 1.0
    factors: str | None = None


def rope_frequencies(
    rope: RopeSpec, factors: NDArray[np.float32] | None = None
) -> NDArray[np.float64]:
    """Angle per position of each pair, f64[n_rot/2]: pair i at position p turns by p times that.

    factors: values of the tensor `rope.factors`, f32[n_rot/2].
    """
    pair = np.arange(rope.n_rot // 2, dtype=np.float64)
    plain = rope.base ** (-2.0 * pair / rope.n_rot)
    if factors is not None:
        plain = plain / factors.astype(np.float64)
    stretched = plain / rope.factor
    if rope.yarn is None:
        return stretched
    low = max(0, math.floor(_pair_of_rotations(rope, rope.yarn, rope.yarn.beta_fast)))
    high = min(rope.n_rot - 1, math.ceil(_pair_of_rotations(rope, rope.yarn, rope.yarn.beta_slow)))
    kept = 1.0 - np.clip((pair - low) / max(0.001, high - low), 0.0, 1.0)
    mixed: NDArray[np.float64] = stretched * (1.0 - kept) + plain * kept
    return mixed


def _pair_of_rotations(rope: RopeSpec, yarn: YarnSpec, rotations: float) -> float:
    """The (fractional) pair that turns `rotations` times within the original context."""
    turns = yarn.n_ctx_original / (rotations * 2.0 * math.pi)
    return rope.n_rot * math.log(turns) / (2.0 * math.log(rope.base))
