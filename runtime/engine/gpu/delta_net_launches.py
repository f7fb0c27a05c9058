"""Delta nets as launches: products, convolution and gates, the recurrence, the gated norm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ops.gpu.delta_gates import GATE_FORMATS, delta_gates, delta_gates_grid
from ops.gpu.delta_gates import WIDTH as GATE_WIDTH
from ops.gpu.delta_net import (
    CHUNK_SHARED_BYTES,
    DIMS,
    INPUTS_RUN,
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
from ops.gpu.row_launch import Multiprocessors, best_team, down_launch, in_one_wave
from runtime.engine.gpu.attention_launches import add_output
from runtime.engine.gpu.matrix_launches import (
    Output,
    Product,
    add_products,
    joined,
    want_inputs,
)
from runtime.engine.gpu.plan_parts import DeviceRows, PlanParts, record_bytes, record_fields
from runtime.engine.gpu.row_launches import add_records
from runtime.engine.gpu.state_slots import GPUStates
from runtime.engine.step import StepKind
from runtime.models.delta_net import DeltaNetSpec, GateFunction
from runtime.models.linear import Linear

PHASE = "delta net"
"""Of a layer: `Room.place`."""
MANY_TOKENS = 64
"""Of a prompt's step: then each warp of `delta_inputs` takes several."""
FLOATS = 4
"""Parts of a row begin at multiples of so many values: 16-byte loads."""


@dataclass(frozen=True)
class DeltaRow:
    """Where the parts of a token's products lie in its row of `stride` f32 values.

    narrow  what gate and decay are made from, one behind the other, where each has two matrices
    """

    gate: int
    decay: int
    beta: int
    narrow: int
    stride: int

    @classmethod
    def of(cls, mixer: DeltaNetSpec) -> DeltaRow:
        """Channels first."""
        at, starts = mixer.n_channels, []
        for n in (mixer.n_value, mixer.decay[-1].n_out, mixer.n_value_head):
            starts.append(at)
            at += -(-n // FLOATS) * FLOATS
        gate, decay, beta = starts
        narrow = at
        if len(mixer.gate) == len(mixer.decay) == 2:
            at += mixer.gate[0].n_out + mixer.decay[0].n_out
        return cls(gate, decay, beta, narrow, stride=at)


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
        n_bytes = 4 * parts.n_tokens * row.stride
        rows = parts.room.place(f"delta products {row.stride}", n_bytes, PHASE)
        self._products(layer, mixer, x, Output(rows, row.stride))
        n = mixer.n_value
        gates = Output(rows + 4 * row.gate, row.stride)
        if self._is_pair(mixer):
            gates = Output(parts.room.place(f"delta gates {n}", 4 * n, PHASE), n)
            self._gates(layer, mixer, rows, gates.address)
        self._inputs(layer, mixer, rows)
        result = self._recurrence(layer, mixer)
        gated = DeviceRows(parts.room, f"gated {n}", parts.n_tokens, n, PHASE)
        want_inputs(parts, [mixer.output], gated)
        parts.plan.add(
            f"{layer}.gated_norm",
            gated_norm(overlapped=parts.overlapped),
            gated_norm_grid(n, parts.n_tokens),
            {
                "counts": parts.token_count,
                "x": result,
                "gates": gates.address,
                "weight": parts.weights.vector(mixer.norm),
                "out_f32": gated.wanted("f32"),
                "q8_256": gated.wanted("q8_256"),
                "q8_32": gated.wanted("q8_32"),
                "gates_stride": gates.stride,
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
        chains = [("decay", mixer.decay, row.decay), ("gate", mixer.gate, row.gate)]
        products += [Product(c[0], at) for _, c, at in chains if len(c) == 1]
        n, is_pair = parts.n_tokens, self._is_pair(mixer)
        if is_pair:
            products += joined((mixer.gate[0], mixer.decay[0]), row.narrow)
            chains = []
        add_products(parts, f"{layer}.delta_products", products, x, out, parts.token_count, n)
        for name, linears, at in chains:
            if len(linears) == 2:
                self._chain(f"{layer}.{name}", linears, x, Product(linears[1], at), out)

    def _is_pair(self, mixer: DeltaNetSpec) -> bool:
        """Whether `delta_gates` has the second products of gate and decay: those of one token."""
        parts, chains = self._parts, (mixer.gate, mixer.decay)
        if parts.n_tokens > 1 or any(len(chain) != 2 for chain in chains):
            return False
        (a, b), formats = (c[1] for c in chains), [parts.format_of(c[1].weight) for c in chains]
        plain = all(m.bias is None and m.scale is None for m in (a, b))
        alike = formats[0] is formats[1] and (a.n_in, a.n_out) == (b.n_in, b.n_out)
        return plain and alike and a.n_in == GATE_WIDTH and formats[0].name in GATE_FORMATS

    def _gates(self, layer: int, mixer: DeltaNetSpec, rows: int, gates: int) -> None:
        """Gates, f32[n_value] at `gates`, and decays; `delta_inputs` makes none then."""
        parts, row, taken = self._parts, DeltaRow.of(mixer), self._taken(mixer)
        gate, decay, vector = mixer.gate[1], mixer.decay[1], parts.weights.vector
        fmt, n, floor = parts.format_of(gate.weight), gate.n_in, mixer.decay_floor
        gpu = Multiprocessors(parts.gpu.n_multiprocessors, parts.gpu.block_shared_bytes)
        launch = down_launch(fmt, best_team(fmt, n), overlapped=parts.overlapped)
        launch = in_one_wave(launch, fmt, n, gate.n_out, gpu)
        parts.plan.add(
            f"{layer}.gates",
            delta_gates(fmt, launch),
            delta_gates_grid(launch, gate.n_out),
            {
                "narrow": rows + 4 * row.narrow,
                "gate_matrix": parts.weights.matrix(gate.weight),
                "decay_matrix": parts.weights.matrix(decay.weight),
                "table": parts.grid_table(fmt),
                "gates": gates,
                "decay": taken.decay,
                "decay_bias": vector(mixer.decay_bias),
                "decay_rate": vector(mixer.decay_rate),
                "dim": decay_width(mixer),
                "has_floor": floor is not None,
                "decay_floor": 0.0 if floor is None else floor,
                "n": n,
                "n_rows": gate.n_out,
                "rounds": launch.rounds,
                **record_fields(fmt.activation, n),
            },
            shared_bytes=launch.shared_bytes(fmt, n),
            overlapped=parts.overlapped,
        )

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
        """What the recurrence takes, at `_Taken`; beside `delta_gates` all but the decays."""
        parts, row, taken = self._parts, DeltaRow.of(mixer), self._taken(mixer)
        n, floor, is_pair = parts.n_tokens, mixer.decay_floor, self._is_pair(mixer)
        width = 0 if is_pair else decay_width(mixer)
        run = INPUTS_RUN if parts.shape.kind is StepKind.PREFILL and n >= MANY_TOKENS else 1
        parts.plan.add(
            f"{layer}.delta_inputs",
            delta_inputs(overlapped=parts.overlapped),
            delta_inputs_grid(mixer.n_key_head, mixer.n_value_head, width, n, run),
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
                "decay": 0 if is_pair else taken.decay,
                "betas": rows + 4 * row.beta,
                "betas_stride": row.stride,
                "run": run,
                "late": is_pair,
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
        n_bytes = 4 * parts.n_tokens * mixer.n_value
        out = parts.room.place(f"delta out {mixer.n_value}", n_bytes, PHASE)
        sizes = mixer.n_value_head, mixer.head_dim, parts.shape.n_sequences
        fits = parts.gpu.block_shared_bytes >= CHUNK_SHARED_BYTES
        chunks = fits and parts.shape.kind is StepKind.PREFILL
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

    def _taken(self, mixer: DeltaNetSpec) -> _Taken:
        room, n = self._parts.room, 4 * self._parts.n_tokens
        n_decay = mixer.decay[-1].n_out
        return _Taken(
            qkv=room.place(f"delta qkv {mixer.n_channels}", n * mixer.n_channels, PHASE),
            decay=room.place(f"delta decay {n_decay}", n * n_decay, PHASE),
            beta=room.place(f"delta beta {mixer.n_value_head}", n * mixer.n_value_head, PHASE),
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
