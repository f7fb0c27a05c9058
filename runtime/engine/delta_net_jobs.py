"""DeltaNetJobs: the recurrence of gated delta nets and KDA as jobs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ops.cpu import gates
from ops.cpu.convolution import CHANNELS, CONVOLUTION, convolution
from ops.cpu.delta_net import DELTA_NET, SCRATCH_ROWS, delta_net
from ops.cpu.job import record
from ops.cpu.program import address_of, aligned, filled
from runtime.engine.activation_rows import ActivationRows, Rows
from runtime.engine.mixer_jobs import MixerParts
from runtime.engine.step_chunks import StepRows
from runtime.models.delta_net import DeltaNetSpec, GateFunction
from runtime.models.linear import Linear

GATE_KINDS = {GateFunction.SILU: gates.SILU, GateFunction.SIGMOID: gates.SIGMOID}


@dataclass(frozen=True)
class Chain:
    """The rows that one or two products give, and what is between the two."""

    out: Rows
    linears: tuple[Linear, ...]
    between: ActivationRows | None


class DeltaNetJobs:
    """The jobs of layers with `DeltaNetSpec`; see `MixerJobs`."""

    def __init__(self, parts: MixerParts) -> None:
        self._parts = parts
        self._rows: dict[tuple[str, int], Rows] = {}
        self._between: dict[tuple[str, int], ActivationRows] = {}
        self._attended: dict[int, ActivationRows] = {}
        self._scratch: dict[int, NDArray[np.float32]] = {}

    def prepare(self, mixer: DeltaNetSpec, x: ActivationRows) -> _Prepared:
        """See `MixerJobs.prepare`."""
        matrices = self._parts.matrices
        qkv = self._room("qkv", mixer.n_channels)
        beta = self._room("beta", mixer.n_value_head)
        decay, gate = self._chain("decay", mixer.decay), self._chain("gate", mixer.gate)
        products, first = [matrices.part(mixer.beta, x, beta)], 0
        for linear in mixer.qkv:
            products.append(matrices.part(linear, x, qkv, first))
            first += 4 * linear.n_out
        for chain in (decay, gate):
            target = chain.out if chain.between is None else chain.between.f32
            products.append(matrices.part(chain.linears[0], x, target))
        return _Prepared(qkv, beta, decay, gate, products)

    def add(
        self, layer: int, mixer: DeltaNetSpec, prepared: _Prepared, rows: StepRows
    ) -> dict[str, int]:
        """See `MixerJobs.add`."""
        parts = self._parts
        parts.matrices.products(f"{layer}.qkv", prepared.products, parts.chunks.tokens)
        self._second_products(layer, prepared)
        states = parts.states.address(layer)
        self._convolution(layer, mixer, prepared.qkv, states)
        n = mixer.n_value
        attended = self._attended.setdefault(n, ActivationRows(parts.n_tokens, n))
        states += 4 * (mixer.n_taps - 1) * mixer.n_channels
        self._recurrence(layer, mixer, prepared, states, attended.f32)
        return parts.output(f"{layer}.delta_net_", mixer.output, attended, rows)

    def _second_products(self, layer: int, prepared: _Prepared) -> None:
        """The second matrix of decay and gate where they have two."""
        parts, tokens = self._parts, self._parts.chunks.tokens
        products = []
        for name, chain in (("decay", prepared.decay), ("gate", prepared.gate)):
            if chain.between is not None:
                products.append(parts.matrices.part(chain.linears[1], chain.between, chain.out))
                between = chain.between
                parts.row_jobs.quantize(f"{layer}.{name}_quantize", between.f32, between, tokens)
        if products:
            parts.matrices.products(f"{layer}.decay_gate", products, tokens)

    def _convolution(self, layer: int, mixer: DeltaNetSpec, qkv: Rows, states: int) -> None:
        parts = self._parts
        weights = [parts.model.weights[name] for name in mixer.conv]

        def taps() -> NDArray[np.float32]:
            return np.concatenate([w.to_f32().reshape(-1, mixer.n_taps) for w in weights]).T

        by_tap = filled((mixer.n_taps, mixer.n_channels), taps)
        scratch = aligned((parts.n_workers, CHANNELS), np.float32)
        args = record(
            CONVOLUTION,
            spans=address_of(parts.buffers.spans),
            states=states,
            state_bytes=parts.states.slot_bytes,
            x=qkv.address,
            x_stride=qkv.stride,
            weights=address_of(by_tap),
            n_channels=mixer.n_channels,
            n_taps=mixer.n_taps,
            dilation=1,
            scratch=address_of(scratch),
        )
        parts.program.keep += [by_tap, scratch]
        job = parts.program.add(f"{layer}.convolution", convolution.address, args)
        parts.chunks.per_sequence.append((job, -(-mixer.n_channels // CHANNELS)))

    def _recurrence(
        self, layer: int, mixer: DeltaNetSpec, prepared: _Prepared, states: int, out: Rows
    ) -> None:
        parts, n = self._parts, mixer.head_dim
        room = aligned((parts.n_workers, SCRATCH_ROWS, n), np.float32)
        scratch = self._scratch.setdefault(n, room)
        floor = mixer.decay_floor
        args = record(
            DELTA_NET,
            spans=address_of(parts.buffers.spans),
            states=states,
            state_bytes=parts.states.slot_bytes,
            n_key_head=mixer.n_key_head,
            n_value_head=mixer.n_value_head,
            head_dim=n,
            qkv=prepared.qkv.address,
            qkv_stride=prepared.qkv.stride,
            decay=prepared.decay.out.address,
            decay_stride=prepared.decay.out.stride,
            decay_width=mixer.decay[-1].n_out // mixer.n_value_head,
            decay_bias=parts.matrices.vector(mixer.decay_bias),
            decay_rate=parts.matrices.vector(mixer.decay_rate),
            has_floor=floor is not None,
            beta=prepared.beta.address,
            beta_stride=prepared.beta.stride,
            gate=prepared.gate.out.address,
            gate_stride=prepared.gate.out.stride,
            gate_kind=GATE_KINDS[mixer.gate_function],
            norm=parts.matrices.vector(mixer.norm),
            out=out.address,
            out_stride=out.stride,
            scratch=address_of(scratch),
            decay_floor=0.0 if floor is None else floor,
            q_scale=n**-0.5,
            l2_eps=mixer.l2_eps,
            eps=parts.model.spec.eps,
        )
        parts.program.keep += [scratch, out, prepared, parts.states]
        job = parts.program.add(f"{layer}.delta_net", delta_net.address, args)
        parts.chunks.per_sequence.append((job, mixer.n_value_head))

    def _chain(self, role: str, linears: tuple[Linear, ...]) -> Chain:
        between = None
        if len(linears) == 2:
            width = linears[0].n_out
            between = self._between.setdefault(
                (role, width), ActivationRows(self._parts.n_tokens, width)
            )
        return Chain(self._room(role, linears[-1].n_out), linears, between)

    def _room(self, role: str, width: int) -> Rows:
        """f32 rows that layers of the same sizes share."""
        return self._rows.setdefault((role, width), Rows(self._parts.n_tokens, 4 * width))


@dataclass(frozen=True)
class _Prepared:
    qkv: Rows
    beta: Rows
    decay: Chain
    gate: Chain
    products: list[NDArray[np.void]]
