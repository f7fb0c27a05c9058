"""Delta nets as launches: products, convolution and gates, the recurrence, the gated norm."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ops.gpu.delta_net import (
    CHUNK_DECAY_FLOOR,
    CHUNK_SHARED_BYTES,
    DIMS,
    N_TAPS,
    delta_chunk,
    delta_chunk_grid,
    delta_inputs,
    delta_inputs_grid,
    delta_net,
    delta_net_grid,
    gated_norm,
    gated_norm_grid,
)
from runtime.engine.gpu.attention_launches import add_output
from runtime.engine.gpu.matrix_launches import Output, Product, add_products, want_inputs
from runtime.engine.gpu.plan_parts import DeviceRows, PlanParts, record_bytes
from runtime.engine.gpu.row_launches import add_records
from runtime.engine.gpu.state_slots import GPUStates
from runtime.engine.step import StepKind
from runtime.models.delta_net import DeltaNetSpec, GateFunction
from runtime.models.linear import Linear

FLOATS = 4
"""Parts of a row begin at multiples of so many values: 16-byte loads."""


@dataclass(frozen=True)
class DeltaRow:
    """Where the parts of a token's products lie in its row of `stride` f32 values."""

    gate: int
    decay: int
    beta: int
    stride: int

    @classmethod
    def of(cls, mixer: DeltaNetSpec) -> DeltaRow:
        """Channels first."""
        at, starts = mixer.n_channels, []
        for n in (mixer.n_value, mixer.decay[-1].n_out, mixer.n_value_head):
            starts.append(at)
            at += -(-n // FLOATS) * FLOATS
        gate, decay, beta = starts
        return cls(gate, decay, beta, stride=at)


class DeltaNetLaunches:
    """The launches of layers with `DeltaNetSpec`; see `MixerLaunches`."""

    def __init__(self, parts: PlanParts, states: GPUStates) -> None:
        self._parts, self._states = parts, states

    def prepare(self, mixer: DeltaNetSpec, x: DeviceRows) -> None:
        """Ask x, the normalised rows, for the forms that the first products need."""
        first = (*mixer.qkv, mixer.beta, mixer.decay[0], mixer.gate[0])
        want_inputs(self._parts, first, x)

    def add(self, layer: int, mixer: DeltaNetSpec, x: DeviceRows) -> Mapping[str, int]:
        """See `MixerLaunches.add`."""
        parts, row = self._parts, DeltaRow.of(mixer)
        rows = parts.room.place(f"delta products {row.stride}", 4 * parts.n_tokens * row.stride)
        self._products(layer, mixer, x, Output(rows, row.stride))
        self._inputs(layer, mixer, rows)
        result = self._recurrence(layer, mixer)
        n = mixer.n_value
        gated = DeviceRows(parts.room, f"gated {n}", parts.n_tokens, n)
        want_inputs(parts, [mixer.output], gated)
        parts.plan.add(
            f"{layer}.gated_norm",
            gated_norm(overlapped=parts.overlapped),
            gated_norm_grid(n, parts.n_tokens),
            {
                "counts": parts.token_count,
                "x": result,
                "gates": rows + 4 * row.gate,
                "weight": parts.weights.vector(mixer.norm),
                "out_f32": gated.wanted("f32"),
                "q8_256": gated.wanted("q8_256"),
                "q8_32": gated.wanted("q8_32"),
                "gates_stride": row.stride,
                "n": n,
                "dim": mixer.head_dim,
                "is_sigmoid": mixer.gate_function is GateFunction.SIGMOID,
                "eps": parts.model.spec.eps,
            },
            overlapped=parts.overlapped,
        )
        return add_output(parts, layer, mixer.output, gated)

    def _products(self, layer: int, mixer: DeltaNetSpec, x: DeviceRows, out: Output) -> None:
        """The rows of `DeltaRow`; decay and gate by two matrices where they have two."""
        parts, row, products, first = self._parts, DeltaRow.of(mixer), [], 0
        for linear in mixer.qkv:
            products.append(Product(linear, first))
            first += linear.n_out
        products.append(Product(mixer.beta, row.beta))
        chains = (("decay", mixer.decay, row.decay), ("gate", mixer.gate, row.gate))
        products += [Product(c[0], at) for _, c, at in chains if len(c) == 1]
        n = parts.n_tokens
        add_products(parts, f"{layer}.delta_products", products, x, out, parts.token_count, n)
        for name, linears, at in chains:
            if len(linears) == 2:
                self._chain(f"{layer}.{name}", linears, x, Product(linears[1], at), out)

    def _chain(
        self, name: str, linears: tuple[Linear, ...], x: DeviceRows, last: Product, out: Output
    ) -> None:
        """The product of a product."""
        parts, width = self._parts, linears[0].n_out
        between = DeviceRows(parts.room, f"between {width}", parts.n_tokens, width)
        want_inputs(parts, [last.linear], between)
        at = between.want("f32")
        narrow = Output(at, record_bytes("f32", width) // 4)
        count, n = parts.token_count, parts.n_tokens
        add_products(parts, f"{name}_narrow", [Product(linears[0])], x, narrow, count, n)
        add_records(parts, f"{name}_narrow", at, between)
        add_products(parts, name, [last], between, out, count, n)

    def _inputs(self, layer: int, mixer: DeltaNetSpec, rows: int) -> None:
        """What the recurrence takes, at `_Taken`."""
        parts, row, taken = self._parts, DeltaRow.of(mixer), self._taken(mixer)
        n, width, floor = parts.n_tokens, decay_width(mixer), mixer.decay_floor
        parts.plan.add(
            f"{layer}.delta_inputs",
            delta_inputs(overlapped=parts.overlapped),
            delta_inputs_grid(mixer.n_key_head, mixer.n_value_head, width, n),
            {
                "counts": parts.token_count,
                "rows": parts.control("rows"),
                "spans": parts.control("spans"),
                "states": self._states.address(layer),
                "slot_bytes": self._states.slot_bytes,
                "x": rows,
                "x_stride": row.stride,
                **self._taps(mixer),
                "qkv": taken.qkv,
                "decays": rows + 4 * row.decay,
                "decays_stride": row.stride,
                "decay_width": width,
                "decay_bias": parts.weights.vector(mixer.decay_bias),
                "decay_rate": parts.weights.vector(mixer.decay_rate),
                "has_floor": floor is not None,
                "decay_floor": 0.0 if floor is None else floor,
                "decay": taken.decay,
                "betas": rows + 4 * row.beta,
                "betas_stride": row.stride,
                "beta": taken.beta,
                "n_key_head": mixer.n_key_head,
                "n_value_head": mixer.n_value_head,
                "dim": mixer.head_dim,
                "q_scale": mixer.head_dim**-0.5,
                "l2_eps": mixer.l2_eps,
            },
            overlapped=parts.overlapped,
        )

    def _recurrence(self, layer: int, mixer: DeltaNetSpec) -> int:
        """Address of f32[n_tokens, n_value]."""
        parts, taken = self._parts, self._taken(mixer)
        out = parts.room.place(f"delta out {mixer.n_value}", 4 * parts.n_tokens * mixer.n_value)
        sizes = mixer.n_value_head, mixer.head_dim, parts.shape.n_sequences
        chunks = self._takes_chunks(mixer)
        kernel = (delta_chunk if chunks else delta_net)(overlapped=parts.overlapped)
        parts.plan.add(
            f"{layer}.{kernel.entry}",
            kernel,
            (delta_chunk_grid if chunks else delta_net_grid)(*sizes),
            {
                "counts": parts.token_count,
                "spans": parts.control("spans"),
                "states": self._states.address(layer) + 4 * (N_TAPS - 1) * mixer.n_channels,
                "slot_bytes": self._states.slot_bytes,
                "qkv": taken.qkv,
                "decay": taken.decay,
                "beta": taken.beta,
                "out": out,
                "n_key_head": mixer.n_key_head,
                "n_value_head": mixer.n_value_head,
                "dim": mixer.head_dim,
                "decay_width": decay_width(mixer),
            },
            shared_bytes=CHUNK_SHARED_BYTES if chunks else 0,
            overlapped=parts.overlapped,
        )
        return out

    def _takes_chunks(self, mixer: DeltaNetSpec) -> bool:
        """Whether several tokens at a time: of prompts, where that is exact and there is room."""
        floor = -math.inf if mixer.decay_floor is None else mixer.decay_floor
        return (
            self._parts.shape.kind is StepKind.PREFILL
            and (decay_width(mixer) == 1 or floor >= CHUNK_DECAY_FLOOR)
            and self._parts.gpu.block_shared_bytes >= CHUNK_SHARED_BYTES
        )

    def _taken(self, mixer: DeltaNetSpec) -> _Taken:
        room, n = self._parts.room, 4 * self._parts.n_tokens
        n_decay = mixer.decay[-1].n_out
        return _Taken(
            qkv=room.place(f"delta qkv {mixer.n_channels}", n * mixer.n_channels),
            decay=room.place(f"delta decay {n_decay}", n * n_decay),
            beta=room.place(f"delta beta {mixer.n_value_head}", n * mixer.n_value_head),
        )

    def _taps(self, mixer: DeltaNetSpec) -> dict[str, int]:
        """Addresses of the convolution's weights: one tensor for all channels, or three."""
        addresses = [self._parts.weights.vector(name) for name in mixer.conv]
        if len(addresses) == 1:
            key_bytes = 4 * N_TAPS * mixer.n_key
            addresses = [addresses[0] + i * key_bytes for i in range(3)]
        return dict(zip(("taps_q", "taps_k", "taps_v"), addresses, strict=True))


@dataclass(frozen=True)
class _Taken:
    """Addresses of what the recurrence takes; see `ops.gpu.delta_net`."""

    qkv: int
    decay: int
    beta: int


def decay_width(mixer: DeltaNetSpec) -> int:
    """Decays of a value head: one, or one a key channel."""
    return mixer.decay[-1].n_out // mixer.n_value_head


def delta_net_obstacles(mixer: DeltaNetSpec) -> Iterator[str]:
    """Why the kernels cannot compute such a layer."""
    if mixer.head_dim not in DIMS:
        yield f"delta nets of heads of {mixer.head_dim} values"
    if mixer.n_taps != N_TAPS:
        yield f"convolutions of {mixer.n_taps} taps"
    for chain in (mixer.decay, mixer.gate):
        if len(chain) == 2 and chain[0].n_out % 16:
            yield f"a gate by way of {chain[0].n_out} values"
