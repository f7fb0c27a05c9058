"""MoE layers of random weights without a model file, and what their experts have to give."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ops.arithmetic import dot_rows, quantize_rows, silu_mul
from ops.cpu.program import aligned
from ops.quants import FORMATS
from ops.quants.block import F32
from runtime.models.linear import Linear
from runtime.models.spec import MoeSpec, RouterScore, RouterSpec
from tests.support.blocks import random_rows

U8 = NDArray[np.uint8]


@dataclass(frozen=True)
class Stack:
    """A stand-in for `runtime.models.weights.Weight`: one matrix an expert."""

    format: Any
    data: U8

    @property
    def row_bytes(self) -> int:
        return int(self.data.shape[-1])

    @property
    def address(self) -> int:
        return int(self.data.ctypes.data)

    @property
    def n_bytes(self) -> int:
        return self.data.nbytes


class MoeLayers:
    """`specs` of layers, and their `weights` by name."""

    def __init__(self) -> None:
        self.weights: dict[str, Any] = {}
        self.specs: list[MoeSpec] = []

    def add(
        self, up_format: str, down_format: str, sizes: tuple[int, int], n_expert: int, n_used: int
    ) -> MoeSpec:
        """A layer with sizes (n_embd, n_ff)."""
        n_embd, n_ff = sizes
        index = len(self.specs)

        def linear(role: str, fmt: str, n_in: int, n_out: int) -> Linear:
            name = f"{index}.{role}"
            rows = random_rows(FORMATS[fmt], n_expert * n_out, n_in, len(name) + index)
            data = aligned((n_expert, n_out, rows.shape[-1]), np.uint8)
            data[:] = rows.reshape(data.shape)
            self.weights[name] = Stack(FORMATS[fmt], data)
            return Linear(name, n_in, n_out, n_expert=n_expert)

        router = RouterSpec(Linear("router", n_embd, n_expert), RouterScore.SOFTMAX, True)
        gate = linear("gate", up_format, n_embd, n_ff)
        up = linear("upward", up_format, n_embd, n_ff)
        down = linear("downward", down_format, n_ff, n_embd)
        spec = MoeSpec(n_expert, n_used, n_ff, router, (gate, up), down)
        self.specs.append(spec)
        return spec

    @property
    def layer_numbers(self) -> list[int]:
        """Of the layers in `model_spec`, where a dense one comes first."""
        return list(range(1, 1 + len(self.specs)))

    def model_spec(self) -> Any:
        """As much of a ModelSpec as the experts' code reads."""
        dense = SimpleNamespace(feed_forward=None)
        layers = [dense, *(SimpleNamespace(feed_forward=spec) for spec in self.specs)]
        n_expert_max = max(spec.n_expert for spec in self.specs)
        moe_layers = tuple(enumerate(self.specs, start=1))
        return SimpleNamespace(layers=layers, moe_layers=moe_layers, n_expert_max=n_expert_max)

    def records(self, layer: int, x: F32) -> U8:
        """Activation records of f32 rows."""
        weight = self.weights[self.specs[layer].gate_up[0].weight]
        return quantize_rows(weight.format.activation, x)

    def expected(self, layer: int, x: F32, expert: int) -> F32:
        """The expert's output f32[n_tokens, n_embd]."""
        spec = self.specs[layer]
        gate, up, down = (self.weights[m.weight] for m in (*spec.gate_up, spec.down))
        records = quantize_rows(gate.format.activation, x)
        hidden = silu_mul(*(dot_rows(w.format, w.data[expert], records) for w in (gate, up)))
        kind = down.format.activation
        return dot_rows(down.format, down.data[expert], quantize_rows(kind, hidden))
