"""StreamJobs: what blocks read of several residual streams, and how their results return."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ops.cpu import streams as kernels
from ops.cpu.job import record
from ops.cpu.program import Program, address_of, aligned
from ops.cpu.streams import (
    STREAMS,
    enter_streams,
    gated_input,
    gated_low,
    sinkhorn_input,
    spread_streams,
)
from runtime.engine.activation_rows import ActivationRows, Rows
from runtime.engine.matrix_jobs import MatrixJobs
from runtime.engine.row_jobs import RowJobs
from runtime.engine.step_chunks import StepChunks, StepRows
from runtime.models.spec import ModelSpec
from runtime.models.streams import GatedStreams, SinkhornStreams, Streams


class StreamJobs:
    """Adds the jobs before each block of a model with several streams; blocks share the buffers.

    x: rows of n_stream * n_embd values, one a token.
    """

    def __init__(
        self,
        program: Program,
        matrices: MatrixJobs,
        row_jobs: RowJobs,
        chunks: StepChunks,
        spec: ModelSpec,
        x: Rows,
        n_workers: int,
    ) -> None:
        self._program, self._matrices = program, matrices
        self._row_jobs, self._chunks = row_jobs, chunks
        self._n_tokens = len(x.memory)
        n_stream, n_embd = spec.n_stream, spec.n_embd
        self._n_stream = n_stream
        self._flat = ActivationRows(self._n_tokens, n_stream * n_embd)
        scratch = aligned((n_workers, (1 + n_stream) * n_embd), np.float32)
        self._shared = {
            "x": x.address,
            "x_stride": x.stride,
            "n": n_embd,
            "n_stream": n_stream,
            "scratch": address_of(scratch),
            "scratch_bytes": scratch.strides[0],
            "eps": spec.eps,
            "flat": self._flat.f32.address,
            "flat_stride": self._flat.f32.stride,
        }
        self._rooms: dict[tuple[str, int], Any] = {}
        self._returns: dict[str, int] = {}
        self._returns_rows = chunks.tokens
        program.keep += [scratch, x, self._flat, self._rooms]

    def spread(self) -> None:
        """Begin: every stream is the token's embedding."""
        args = record(STREAMS, **self._shared)
        job = self._program.add("spread_streams", spread_streams.address, args)
        self._chunks.tokens.per_row.append(job)

    def settle(self, name: str, rows: StepRows, pending: Mapping[str, int]) -> None:
        """Return the last block's result, whose fields are `pending`, before the next enters."""
        self._enter(f"{name}settle", kernels.NO_STREAMS, rows, pending)

    def enter(
        self,
        name: str,
        norm: str,
        streams: Streams | None,
        out: ActivationRows,
        rows: StepRows,
        pending: Mapping[str, int],
    ) -> None:
        """Return the last block's result, and write the input of the next to `out`."""
        weight = self._matrices.vector(norm)
        self._program.keep.append(out)
        if isinstance(streams, GatedStreams):
            self._gated(name, weight, streams, out, rows, pending)
        elif isinstance(streams, SinkhornStreams):
            self._sinkhorn(name, weight, streams, out, rows, pending)
        else:
            fields = {"norm": weight, **_forms(out)}
            self._enter(f"{name}mean", kernels.MEAN, rows, pending, **fields)

    def _gated(
        self,
        name: str,
        norm: int,
        streams: GatedStreams,
        out: ActivationRows,
        rows: StepRows,
        pending: Mapping[str, int],
    ) -> None:
        n_low, part = streams.down.n_out, self._matrices.part
        low: ActivationRows = self._room("low", n_low, ActivationRows)
        gate: Rows = self._room("gate", 4 * streams.up.n_out, Rows)
        first = [part(streams.down, self._flat, low.f32)]
        second = [part(streams.up, low, gate)]
        returns: Rows = self._room("inject", 4 * self._n_stream, Rows)
        if streams.inject is not None:
            first.append(part(streams.inject, self._flat, returns))
        self._enter(f"{name}streams", kernels.GATED, rows, pending, norm=norm)
        self._matrices.products(f"{name}streams_down", first, rows)
        fields = {"low": low.f32.address, "low_stride": low.f32.stride, "n_low": n_low}
        self._row(f"{name}streams_low", gated_low, rows, **fields, **low.record_fields())
        self._matrices.products(f"{name}streams_up", second, rows)
        fields = {"gate": gate.address, "gate_stride": gate.stride}
        self._row(f"{name}input", gated_input, rows, **fields, **_forms(out))
        self._return_by(kernels.GATED, returns.address, returns.stride, rows)

    def _sinkhorn(
        self,
        name: str,
        norm: int,
        streams: SinkhornStreams,
        out: ActivationRows,
        rows: StepRows,
        pending: Mapping[str, int],
    ) -> None:
        mix: Rows = self._room("mix", 4 * streams.mix.n_out, Rows)
        part = self._matrices.part(streams.mix, self._flat, mix)
        self._enter(f"{name}streams", kernels.SINKHORN, rows, pending)
        self._matrices.products(f"{name}streams_mix", [part], rows)
        fields = {
            "norm": norm,
            "mix": mix.address,
            "mix_stride": mix.stride,
            "mix_base": self._matrices.vector(streams.base),
            "mix_scale": self._matrices.vector(streams.scale),
            "n_iterations": streams.n_iterations,
            "epsilon": streams.epsilon,
        }
        self._row(f"{name}input", sinkhorn_input, rows, **fields, **_forms(out))
        self._return_by(kernels.SINKHORN, mix.address + 4 * self._n_stream, mix.stride, rows)

    def _enter(
        self, name: str, kind: int, rows: StepRows, pending: Mapping[str, int], **fields: int
    ) -> None:
        returns = self._returns if pending else {}
        by_token = self._returns_rows is self._chunks.tokens and rows is not self._chunks.tokens
        forms = {} if kind in (kernels.NO_STREAMS, kernels.MEAN) else self._flat.record_fields()
        self._row(
            name,
            enter_streams,
            rows,
            kind=kind,
            returns_by_token=by_token,
            **returns,
            **pending,
            **forms,
            **fields,
        )
        self._returns = {}

    def _return_by(self, kind: int, address: int, stride: int, rows: StepRows) -> None:
        self._returns = {"returning": kind, "returns": address, "returns_stride": stride}
        self._returns_rows = rows

    def _row(self, name: str, kernel: Any, rows: StepRows, **fields: Any) -> None:
        tokens = self._row_jobs.tokens_of(rows)
        args = record(STREAMS, tokens=tokens, **self._shared, **fields)
        rows.per_row.append(self._program.add(name, kernel.address, args))

    def _room(self, role: str, width: int, kind: Any) -> Any:
        """Buffers that blocks of the same sizes share: `kind(n_tokens, width)`."""
        if (role, width) not in self._rooms:
            self._rooms[role, width] = kind(self._n_tokens, width)
        return self._rooms[role, width]


def _forms(out: ActivationRows) -> dict[str, int]:
    """The fields of everything that a job writes of its result."""
    f32 = {"out_f32": out.f32.address, "out_f32_stride": out.f32.stride}
    return {**f32, **out.record_fields()}
