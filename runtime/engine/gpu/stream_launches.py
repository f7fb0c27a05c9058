"""The residual between blocks as launches: one stream and its norm, or several and their mixes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from ops.gpu import streams as kernels
from ops.gpu.streams import (
    MAX_N,
    N_RETURNS,
    N_STREAM,
    block_of,
    enter_streams,
    gated_mean,
    gated_mean_grid,
    sinkhorn_input,
)
from runtime.engine.gpu.gated_launches import Entry, add_gated, enters_by_parts
from runtime.engine.gpu.matrix_launches import Output, Product, add_products, want_inputs
from runtime.engine.gpu.mixed_launches import (
    Mixed,
    add_mean_of_mixed,
    add_mixed,
    takes_few_mixed,
)
from runtime.engine.gpu.plan_parts import DeviceRows, PlanParts, record_bytes
from runtime.engine.gpu.row_launches import NOTHING_PENDING, NormEntry, add_norm
from runtime.models.model import Model
from runtime.models.streams import GatedStreams, SinkhornStreams, Streams

FLOATS = 4
"""Rows of f32 values begin at multiples of so many: 16-byte loads."""


class Residual(Protocol):
    """Adds what stands between the blocks of a model.  `x`: address of f32[n_tokens, n_stream, n].

    pending  what a block gave, see `add_norm`; empty: nothing
    outputs  the rows are those of the step's outputs, not all tokens
    """

    x: int

    def enter(
        self,
        name: str,
        norm: str,
        streams: Streams | None,
        out: DeviceRows,
        pending: Mapping[str, int],
        *,
        outputs: bool = False,
    ) -> None:
        """Return the last block's result, and write the input of the next to `out`."""
        ...

    def leave_norm(self, norm: str, pending: Mapping[str, int]) -> NormEntry | None:
        """What `enter` would do, for the launch behind it; None: it cannot."""
        ...

    def settle(self, name: str, pending: Mapping[str, int]) -> None:
        """Return the last block's result, and nothing else."""
        ...


class OneStream:
    """x += the last block's result; its norm enters the next.  `x` has the embeddings."""

    def __init__(self, parts: PlanParts, x: int) -> None:
        n_bytes = 4 * parts.n_tokens * parts.model.spec.n_embd
        self.x, self._other = x, parts.room.place("residual", n_bytes)
        self._parts = parts

    def enter(
        self,
        name: str,
        norm: str,
        streams: Streams | None,
        out: DeviceRows,
        pending: Mapping[str, int],
        *,
        outputs: bool = False,
    ) -> None:
        """See `Residual`."""
        add_norm(self._parts, name, norm, self.x, out, pending, outputs=outputs)

    def leave_norm(self, norm: str, pending: Mapping[str, int]) -> NormEntry | None:
        """See `Residual`; from here on x lies elsewhere."""
        if set(pending) != {"delta"}:
            return None
        before, self.x = self.x, self._other
        self._other = before
        return NormEntry(before, self.x, pending["delta"], norm)

    def settle(self, name: str, pending: Mapping[str, int]) -> None:
        """See `Residual`."""
        parts = self._parts
        nothing = DeviceRows(parts.room, "settled", parts.n_tokens, parts.model.spec.n_embd)
        add_norm(parts, name, None, self.x, nothing, pending)


class SeveralStreams:
    """Mixes of `N_STREAM` streams; blocks share their places."""

    def __init__(self, parts: PlanParts, x: int) -> None:
        self.x = x
        self._parts, self._n = parts, parts.model.spec.n_embd
        self._returns = {"returning": kernels.RETURN_TO_ALL, "returns": 0, "returns_stride": 0}
        self._mixed: Mixed | None = None
        self._takes_few = takes_few_mixed(parts)

    def enter(
        self,
        name: str,
        norm: str,
        streams: Streams | None,
        out: DeviceRows,
        pending: Mapping[str, int],
        *,
        outputs: bool = False,
    ) -> None:
        """See `Residual`."""
        weight = self._parts.weights.vector(norm)
        if isinstance(streams, GatedStreams):
            self._gated(name, weight, streams, out, pending, outputs)
        elif isinstance(streams, SinkhornStreams):
            self._sinkhorn(name, weight, streams, out, pending)
        elif self._mixed is not None and pending and not outputs:
            parts, forms = self._parts, _forms(out)
            add_mean_of_mixed(parts, name, self.x, weight, self._mixed, pending, forms)
        else:
            self._enter(name, kernels.ENTER_MEAN, weight, out, pending, outputs)

    def leave_norm(self, norm: str, pending: Mapping[str, int]) -> NormEntry | None:
        """See `Residual`."""
        return None

    def settle(self, name: str, pending: Mapping[str, int]) -> None:
        """See `Residual`."""
        self._enter(name, kernels.ENTER_NOTHING, 0, self._flat(), pending, outputs=False)

    def _gated(
        self,
        name: str,
        norm: int,
        streams: GatedStreams,
        out: DeviceRows,
        pending: Mapping[str, int],
        outputs: bool,
    ) -> None:
        parts, flat, n_low = self._parts, self._flat(), streams.down.n_out
        if enters_by_parts(parts, streams):
            entry = Entry(name, streams, norm, self.x, outputs)
            returns = add_gated(parts, entry, flat, out, pending, self._returns)
            self._return_by(kernels.RETURN_GATED, returns, N_STREAM)
            return
        n, n_rows, count = self._n, *self._rows(outputs)
        products = [Product(streams.down)]
        inject_at = -(-n_low // FLOATS) * FLOATS
        if streams.inject is not None:
            products.append(Product(streams.inject, inject_at))
        stride = inject_at + (0 if streams.inject is None else FLOATS)
        want_inputs(parts, [product.linear for product in products], flat)
        flat_at = flat.want("f32")
        self._enter(f"{name}_streams", kernels.ENTER_GATED, norm, flat, pending, outputs)
        low = parts.room.place(f"low {stride}", 4 * parts.n_tokens * stride)
        rows = Output(low, stride)
        add_products(parts, f"{name}_streams_down", products, flat, rows, count, n_rows)
        bent = DeviceRows(parts.room, f"bent {n_low}", parts.n_tokens, n_low)
        want_inputs(parts, [streams.up], bent)
        scale = 1.0 / N_STREAM
        fields = {"x": low, "gates": low, "x_stride": stride, "gates_stride": stride}
        scales = {"n_parts": 1, "scale": scale, "gate_scale": scale}
        self._mean(f"{name}_streams_low", n_low, fields | scales, bent, outputs)
        gates = parts.room.place("stream gates", 4 * parts.n_tokens * N_STREAM * n)
        rows = Output(gates, N_STREAM * n)
        add_products(parts, f"{name}_streams_up", [Product(streams.up)], bent, rows, count, n_rows)
        flat_stride = record_bytes("f32", N_STREAM * n) // 4
        fields = {"x": flat_at, "gates": gates, "x_stride": flat_stride}
        scales = {"n_parts": N_STREAM, "scale": scale, "gate_scale": 1.0}
        fields |= {"gates_stride": N_STREAM * n}
        self._mean(f"{name}_input", n, fields | scales, out, outputs)
        self._return_by(kernels.RETURN_GATED, low + 4 * inject_at, stride)

    def _sinkhorn(
        self,
        name: str,
        norm: int,
        streams: SinkhornStreams,
        out: DeviceRows,
        pending: Mapping[str, int],
    ) -> None:
        parts, flat = self._parts, self._flat()
        if self._takes_few:
            returning, before, forms = self._returns["returning"], self._mixed, _forms(out)
            self._mixed = add_mixed(
                parts, name, self.x, norm, streams, before, returning, pending, forms
            )
            return
        want_inputs(parts, [streams.mix], flat)
        self._enter(f"{name}_streams", kernels.ENTER_MIXED, 0, flat, pending, outputs=False)
        n_mix, count, n = streams.mix.n_out, parts.token_count, parts.n_tokens
        mix = parts.room.place("stream mix", 4 * n * n_mix)
        products = [Product(streams.mix)]
        add_products(parts, f"{name}_streams_mix", products, flat, Output(mix, n_mix), count, n)
        self._input(f"{name}_input", Mixed(mix, streams), norm, _forms(out))

    def _input(self, name: str, mixed: Mixed, norm: int, forms: Mapping[str, int] | None) -> None:
        """How the block's result returns, and with `forms` the block's input."""
        parts, n, streams = self._parts, self._parts.n_tokens, mixed.streams
        returns = parts.room.place("stream returns", 4 * n * N_RETURNS)
        parts.plan.add(
            name,
            sinkhorn_input(block_of(self._n), overlapped=parts.overlapped),
            (1 if forms is None else 2, n),
            {
                "x": self.x,
                "n": self._n,
                "count": parts.token_count,
                "mix": mixed.mix,
                "base": parts.weights.vector(streams.base),
                "scales": parts.weights.vector(streams.scale),
                "weight": norm,
                "returns": returns,
                **(forms or _NO_FORMS),
                "n_iterations": streams.n_iterations,
                "epsilon": streams.epsilon,
                "eps": parts.model.spec.eps,
            },
            overlapped=parts.overlapped,
        )
        self._return_by(kernels.RETURN_MIXED, returns, N_RETURNS)

    def _enter(
        self,
        name: str,
        kind: int,
        weight: int,
        out: DeviceRows,
        pending: Mapping[str, int],
        outputs: bool,
    ) -> None:
        parts, (n_rows, count) = self._parts, self._rows(outputs)
        if pending and self._mixed is not None:
            self._input(f"{name}_returns", self._mixed, 0, None)
        returns = self._returns if pending else _NO_RETURNS
        parts.plan.add(
            name,
            enter_streams(block_of(self._n), overlapped=parts.overlapped),
            (n_rows,),
            {
                **NOTHING_PENDING,
                **pending,
                **returns,
                "x": self.x,
                "n": self._n,
                "count": count,
                "tokens": parts.control("output_tokens") if outputs else 0,
                "kind": kind,
                "weight": weight,
                **_forms(out),
                "eps": parts.model.spec.eps,
            },
            overlapped=parts.overlapped,
        )

    def _mean(
        self, name: str, n: int, fields: Mapping[str, float], out: DeviceRows, outputs: bool
    ) -> None:
        parts, (n_rows, count) = self._parts, self._rows(outputs)
        parts.plan.add(
            name,
            gated_mean(overlapped=parts.overlapped),
            gated_mean_grid(n, n_rows),
            {"counts": count, "n": n, **fields, **_forms(out)},
            overlapped=parts.overlapped,
        )

    def _rows(self, outputs: bool) -> tuple[int, int]:
        """How many there may be, and the address of how many there are."""
        parts = self._parts
        if outputs:
            return parts.shape.n_outputs, parts.output_count
        return parts.n_tokens, parts.token_count

    def _flat(self) -> DeviceRows:
        """Normed streams of a token in a row: what a mix's first product reads."""
        parts = self._parts
        return DeviceRows(parts.room, "flat streams", parts.n_tokens, N_STREAM * self._n)

    def _return_by(self, kind: int, address: int, stride: int) -> None:
        self._returns = {"returning": kind, "returns": address, "returns_stride": stride}
        self._mixed = None


def begin_residual(parts: PlanParts, embeddings: int) -> tuple[Residual, Mapping[str, int]]:
    """The residual of tokens, and what is pending at the start."""
    spec = parts.model.spec
    if spec.n_stream == 1:
        return OneStream(parts, embeddings), {}
    x = parts.room.place("streams", 4 * parts.n_tokens * spec.n_stream * spec.n_embd)
    return SeveralStreams(parts, x), {"delta": embeddings}  # all streams are the embedding


def continue_residual(parts: PlanParts, x: int) -> Residual:
    """The residual that lies at x."""
    return OneStream(parts, x) if parts.model.spec.n_stream == 1 else SeveralStreams(parts, x)


_NO_RETURNS = {"returning": kernels.RETURN_NOTHING, "returns": 0, "returns_stride": 0}

_NO_FORMS = {"out_f32": 0, "q8_256": 0, "q8_32": 0}


def _forms(out: DeviceRows) -> dict[str, int]:
    """The addresses of the forms that somebody wants."""
    return {
        "out_f32": out.wanted("f32"),
        "q8_256": out.wanted("q8_256"),
        "q8_32": out.wanted("q8_32"),
    }


def stream_obstacles(model: Model) -> Iterator[str]:
    """Why the kernels cannot compute a model's streams."""
    spec = model.spec
    if spec.n_stream == 1:
        return
    if spec.n_stream != N_STREAM or spec.n_embd > MAX_N:
        yield f"{spec.n_stream} streams of {spec.n_embd} values"
    for streams in _all_streams(model):
        for linear in streams.linears:
            kind = model.weights[linear.weight].format.activation
            if kind == "q8_256" and spec.n_embd % 256:
                yield f"streams of {spec.n_embd} values, quantized"


def _all_streams(model: Model) -> Iterator[Streams]:
    layers = model.spec.layers
    found = [s for layer in layers for s in (layer.mixer_streams, layer.feed_forward_streams)]
    yield from (s for s in (*found, model.spec.output_streams) if s is not None)
