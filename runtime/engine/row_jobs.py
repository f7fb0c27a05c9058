"""RowJobs: the jobs between products, of a chunk a row: norms, and copies in other stored forms."""

from __future__ import annotations

from collections.abc import Mapping

from ops.cpu.job import record
from ops.cpu.norm import NORM, QUANTIZE, norm, quantize
from ops.cpu.program import Program, address_of
from runtime.engine.activation_rows import ActivationRows, Rows
from runtime.engine.matrix_jobs import MatrixJobs
from runtime.engine.step_buffers import StepBuffers
from runtime.engine.step_chunks import StepChunks, StepRows


class RowJobs:
    """Adds jobs on the rows of a step; eps: of every RMS norm."""

    def __init__(
        self,
        program: Program,
        matrices: MatrixJobs,
        buffers: StepBuffers,
        chunks: StepChunks,
        eps: float,
    ) -> None:
        self._program, self._matrices = program, matrices
        self._buffers, self._chunks, self._eps = buffers, chunks, eps

    def tokens_of(self, rows: StepRows) -> int:
        """Address of the token of each row; 0: row i is token i."""
        return 0 if rows is self._chunks.tokens else address_of(self._buffers.output_tokens)

    def norm(
        self,
        name: str,
        weight: str,
        x: Rows,
        out: ActivationRows,
        rows: StepRows,
        pending: Mapping[str, int] | None = None,
    ) -> None:
        """RMS norm of the first `out.width` values of x's rows, every token having one.

        pending: fields of `ops.cpu.norm.NORM` that are added to the row before, or nothing is.
        """
        args = record(
            NORM,
            x=x.address,
            x_stride=x.stride,
            n=out.width,
            tokens=self.tokens_of(rows),
            weight=self._matrices.vector(weight),
            eps=self._eps,
            out_f32=out.f32.address,
            out_f32_stride=out.f32.stride,
            **out.record_fields(),
            **(pending or {}),
        )
        self._program.keep += [x, out]
        rows.per_row.append(self._program.add(name, norm.address, args))

    def quantize(self, name: str, x: Rows, out: ActivationRows, rows: StepRows) -> None:
        """From the f32 rows x of all tokens to every wanted form of `rows`."""
        is_copied = out.f32 is not x
        if not (is_copied or out.quantized):
            return
        args = record(
            QUANTIZE,
            x=x.address,
            x_stride=x.stride,
            n=out.width,
            tokens=self.tokens_of(rows),
            out_f32=out.f32.address if is_copied else 0,
            out_f32_stride=out.f32.stride,
            **out.record_fields(),
        )
        self._program.keep += [x, out]
        rows.per_row.append(self._program.add(name, quantize.address, args))
