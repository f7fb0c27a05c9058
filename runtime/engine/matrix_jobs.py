"""MatrixJobs: the records and chunk sizes of matrix products, from the weights of a model."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ops.cpu.job import record
from ops.cpu.linear import MATRIX, PART, PRODUCTS, products
from ops.cpu.matmul import SCRATCH_BYTES, matmul_address
from ops.cpu.program import Program, address_of, aligned, filled
from runtime.engine.activation_rows import ActivationRows, Rows
from runtime.engine.step_chunks import StepRows
from runtime.models.model import Model
from runtime.models.spec import Linear

CHUNKS_PER_WORKER = 4  # so that a slow core holds the others up by a fraction of a job
CHUNK_BYTES = 48 * 1024  # of weights in a chunk at least, about 2 us of work: a chunk costs 0.2 us
SMALL_CHUNK_BYTES = 16 * 1024  # at least, where otherwise workers would have nothing to do
ROWS = 16  # chunks are multiples of it


def rows_per_chunk(n_rows: int, row_bytes: int, n_workers: int, n_alike: int = 1) -> int:
    """Rows of a chunk, when `n_alike` matrices of this size are multiplied together."""
    n_bytes = n_rows * row_bytes * n_alike
    most = max(n_bytes // CHUNK_BYTES, min(n_workers, n_bytes // SMALL_CHUNK_BYTES), 1)
    n_chunks = min(CHUNKS_PER_WORKER * n_workers, most)
    if n_chunks > n_workers:
        n_chunks -= n_chunks % n_workers  # as many for each worker
    rows = -(-n_rows * n_alike // n_chunks)
    return min(-(-rows // ROWS) * ROWS, max(n_rows, 1))


class MatrixJobs:
    """Adds jobs of dense products to a program, and keeps what their records point to."""

    def __init__(self, program: Program, model: Model, n_workers: int) -> None:
        self._program, self._model = program, model
        self._n_workers = n_workers
        self._scratch = aligned((n_workers, SCRATCH_BYTES), np.uint8)
        self._vectors: dict[str, NDArray[np.float32]] = {}
        program.keep += [self._scratch, self._vectors]

    def vector(self, name: str | None) -> int:
        """Address of a small tensor as f32 values; 0 for None."""
        if name is None:
            return 0
        if name not in self._vectors:
            weight = self._model.weights[name]
            self._vectors[name] = filled(weight.shape[::-1], weight.to_f32)
        return address_of(self._vectors[name])

    def matrix(self, linear: Linear) -> NDArray[Any]:
        """The MATRIX record of `linear`."""
        weight = self._model.weights[linear.weight]
        made = record(
            MATRIX,
            matmul=matmul_address(weight.format.name),
            weights=weight.address,
            row_bytes=weight.row_bytes,
            n_elems=linear.n_in,
            slab_bytes=linear.n_out * weight.row_bytes,
            bias=self.vector(linear.bias),
            bias_slab_bytes=4 * linear.n_out,
            scale=self.vector(linear.scale),
        )
        self._program.keep += [made, weight]
        return made

    def part(
        self,
        linear: Linear,
        x: ActivationRows,
        y: Rows | NDArray[np.float32],
        y_offset: int = 0,
    ) -> NDArray[Any]:
        """The PART record of `linear` from the rows x to f32 rows y, `y_offset` bytes into each."""
        weight = self._model.weights[linear.weight]
        x_rows = x.want(weight.format.activation)
        if isinstance(y, Rows):
            y_pointers = y.pointers + y_offset
        else:
            y_pointers = address_of(y) + y.strides[0] * np.arange(len(y))
        y_table = aligned(len(y_pointers), np.int64)
        y_table[:] = y_pointers
        self._program.keep += [y_table, x_rows, y]
        return record(
            PART,
            matrix=address_of(self.matrix(linear)),
            n_rows=linear.n_out,
            x_ptrs=address_of(x_rows.pointers),
            y_ptrs=address_of(y_table),
            rows_per_chunk=rows_per_chunk(linear.n_out, weight.row_bytes, self._n_workers),
        )

    def products(
        self,
        name: str,
        parts: list[NDArray[Any]],
        rows: StepRows,
        not_finite: NDArray[np.int32] | None = None,
    ) -> None:
        """Add one job that multiplies all parts with the step's `rows`."""
        joined = aligned(len(parts), PART)
        n_chunks = 0
        for i, part in enumerate(parts):
            n_chunks += -(-int(part["n_rows"][0]) // int(part["rows_per_chunk"][0]))
            joined[i] = part[0]
            joined[i]["end_chunk"] = n_chunks
        args = record(
            PRODUCTS,
            parts=address_of(joined),
            n_tokens=address_of(rows.n_rows),
            scratch=address_of(self._scratch),
            scratch_bytes=self._scratch.strides[0],
            not_finite=0 if not_finite is None else address_of(not_finite),
        )
        self._program.keep += [joined, rows, not_finite]
        job = self._program.add(name, products.address, args, n_chunks)
        rows.if_any.append((job, n_chunks))
