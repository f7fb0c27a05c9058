"""What the jobs of every kind of mixer are made from, and the interface they have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from ops.cpu.program import Program
from runtime.engine.activation_rows import ActivationRows, Rows
from runtime.engine.kv_pages import KVPages
from runtime.engine.matrix_jobs import MatrixJobs
from runtime.engine.row_jobs import RowJobs
from runtime.engine.state_slots import StateSlots
from runtime.engine.step_buffers import StepBuffers
from runtime.engine.step_chunks import StepChunks, StepRows
from runtime.models.model import Model
from runtime.models.spec import Linear


@dataclass(frozen=True)
class MixerParts:
    """The parts of a program under construction that mixers use.

    delta  f32 rows of n_embd values: what a mixer adds to the residual stream
    """

    model: Model
    program: Program
    matrices: MatrixJobs
    row_jobs: RowJobs
    buffers: StepBuffers
    pages: KVPages
    states: StateSlots
    chunks: StepChunks
    delta: Rows
    n_workers: int
    n_tokens: int

    def output(
        self, name: str, linear: Linear, x: ActivationRows, rows: StepRows
    ) -> dict[str, int]:
        """The product that ends a mixer, of the f32 rows x that each token has.

        Returns the fields of the next norm that add the result to the stream.
        """
        source = x.f32
        if rows is not self.chunks.tokens:
            x = ActivationRows(self.n_tokens, x.width)
            rows.own.append(x)
        part = self.matrices.part(linear, x, self.delta)
        self.row_jobs.quantize(f"{name}quantize", source, x, rows)
        self.matrices.products(f"{name}output", [part], rows)
        return {"delta": self.delta.address, "delta_stride": self.delta.stride}


class MixerJobs(Protocol):
    """The jobs of one kind of mixer; layers alike share their buffers."""

    def prepare(self, mixer: Any, x: ActivationRows) -> Any:
        """Ask x, the normalised rows, for the forms that the first products need."""
        ...

    def add(self, layer: int, mixer: Any, prepared: Any, rows: StepRows) -> dict[str, int]:
        """Add the jobs; the fields of the next norm that add their result to the stream.

        rows: those that go on after the mixer, which has the keys, values and states of all tokens.
        """
        ...
