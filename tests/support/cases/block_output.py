"""What a block of a model gave for rows, as the kernels of residual streams take it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ops.quants.block import F32
from tests.support.cases.case import Array, given, normal_of
from tests.support.machines import Machine


@dataclass(frozen=True)
class BlockOutput:
    """A delta f32[rows, n], or none, and of k routed experts beside a shared one, where there are
    any, outputs f32[rows * k, n] behind `slots` i32[rows, k] and weights."""

    delta: F32
    outputs: F32
    weights: F32
    shared: F32
    shared_weights: F32
    slots: Array
    has_delta: bool

    @classmethod
    def drawn(
        cls, rng: np.random.Generator, rows: int, n: int, k: int, *, delta: bool = True
    ) -> BlockOutput:
        normal = normal_of(rng)
        return cls(
            normal(rows, n),
            normal(rows * k, n),
            normal(rows, k),
            normal(rows, n),
            rng.random(rows).astype(np.float32),
            rng.permutation(rows * k).astype(np.int32).reshape(rows, k),
            delta,
        )

    @property
    def total(self) -> F32:
        """f32[rows, n]: what returns to the streams."""
        total = self.delta * np.float32(self.has_delta)
        if self.slots.size:
            routed = (self.weights[..., None] * self.outputs[self.slots]).sum(axis=1)
            total = total + routed + self.shared_weights[:, None] * self.shared
        return total

    def fields(self, m: Machine) -> dict[str, int]:
        """The arguments of a launch."""
        k = self.slots.shape[1]
        return {
            "delta": given(m, self.delta, self.has_delta),
            "expert_out": given(m, self.outputs, k),
            "slots": given(m, self.slots, k),
            "weights": given(m, self.weights, k),
            "n_used": k,
            "shared": given(m, self.shared, k),
            "shared_weights": given(m, self.shared_weights, k),
        }
