"""RopeTables: the cosines and sines of all positions, computed once for all layers alike."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ops.cpu.heads import ROPE_NEOX, ROPE_NORM
from ops.cpu.program import address_of, filled
from runtime.models.model import Model
from runtime.models.rope import RopePairing, RopeSpec, rope_frequencies
from runtime.models.vectors import rope_factors

KINDS = {RopePairing.NEOX: ROPE_NEOX, RopePairing.NORM: ROPE_NORM}


class RopeTables:
    """f32[n_positions, n_rot / 2] cosines and sines for each rope of a model."""

    def __init__(self, model: Model, n_positions: int) -> None:
        self._model, self._n_positions = model, n_positions
        self._tables: dict[RopeSpec, tuple[NDArray[Any], NDArray[Any]]] = {}

    def fields(self, rope: RopeSpec | None) -> dict[str, int]:
        """The rope fields of a job's record; none without rope."""
        if rope is None:
            return {}
        cosines, sines = self._of(rope)
        return {
            "rope_kind": KINDS[rope.pairing],
            "n_rot": rope.n_rot,
            "cosines": address_of(cosines),
            "sines": address_of(sines),
        }

    def _of(self, rope: RopeSpec) -> tuple[NDArray[Any], NDArray[Any]]:
        if rope not in self._tables:
            shape = (self._n_positions, rope.n_rot // 2)
            angles = cache(partial(self._angles, rope))
            cosines = filled(shape, lambda: np.cos(angles()) * rope.magnitude)
            sines = filled(shape, lambda: np.sin(angles()) * rope.magnitude)
            self._tables[rope] = (cosines, sines)
        return self._tables[rope]

    def _angles(self, rope: RopeSpec) -> NDArray[np.float64]:
        frequencies = rope_frequencies(rope, rope_factors(self._model, rope))
        return np.arange(self._n_positions)[:, None] * frequencies
