"""TableRows: rows of n-gram tables that CPU workers gather while a GPU's step runs.

A step whose tokens the GPU chooses need not wait for the host then: a worker sees what the step
before has chosen, and the rows arrive while the first layers are computed.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ops.cpu.c_functions import c_function
from ops.cpu.gather_rows import GATHER, TOKENS_A_CHUNK, gather_rows, show_rows
from ops.cpu.job import record
from ops.cpu.posts import ABORT, EPOCH
from ops.cpu.program import Program, address_of, aligned
from ops.cpu.team import Team, TeamError
from ops.gathering import FAILED, PLACES, ROWS
from ops.gpu.step_io import RING
from ops.gpu.take_rows import PATIENCE_NS
from runtime.cuda.device import Device
from runtime.cuda.memory import PinnedBuffer, slot_bytes
from runtime.engine.gpu.memory_launches import row_bytes
from runtime.engine.gpu.plan_parts import RowSource
from runtime.engine.gpu.results import CHOSEN_BYTES, Results
from runtime.engine.step import I32
from runtime.errors import EngineBug, ExchangeStalled
from runtime.experts.lost_steps import LostSteps
from runtime.models.mapped_file import WANTED
from runtime.models.model import Model
from runtime.models.ngram_memory import NgramMemorySpec
from runtime.models.weights import Weight

MOST_BEGUN = 2
"""Steps that have not ended: of one rows are gathered, one waits behind it."""


@dataclass(frozen=True)
class Table:
    """token_bytes: from the rows of a token to those of the next one, a multiple of 16."""

    memory: NgramMemorySpec
    weight: Weight
    token_bytes: int


class TableRows:
    """The memory that rows arrive in, and the programs that fill it.

    team     the workers; it outlives this, and so do the model's weights and `results`
    results  which step has ended, and the tokens that it chose
    most     tokens of a step
    """

    def __init__(
        self,
        device: Device,
        team: Team,
        model: Model,
        results: Results,
        most: int,
        patience_ns: int = PATIENCE_NS,
    ) -> None:
        """Raises: PinningFailed, CudaError."""
        self._team, self._most, self._patience_ns = team, most, patience_ns
        tables = [
            Table(memory, model.weights[memory.table], row_bytes(memory, model))
            for memory in model.spec.memories
        ]
        self._stride = slot_bytes(most * sum(table.token_bytes for table in tables))
        with ExitStack() as resources:
            n_bytes = ROWS + PLACES * self._stride
            self._buffer = resources.enter_context(PinnedBuffer(device, n_bytes, "table rows"))
            self._lost = LostSteps(self._buffer.view[FAILED:][:16].view(np.uint32))
            self._programs = [
                _RowProgram(tables, self._buffer.host, results, most, self._stride)
                for _ in range(MOST_BEGUN)
            ]
            for own in self._programs:
                resources.callback(own.program.close)
            self._resources = resources.pop_all()

    def on(self, device: Device) -> RowSource:
        """Where a GPU's kernels take the rows.  Raises: CudaError."""
        words = self._buffer.address_on(device)
        return RowSource(words, words + ROWS, self._stride, self._most, self._patience_ns)

    def begin(self, epoch: int, contexts: I32) -> None:
        """Have the rows of step `epoch` gathered once the step before it has ended.

        contexts  i32[n_tokens, n_gram], see `ops.cpu.gather_rows`

        Raises: EngineBug while a worker is still at an earlier step.
        """
        own = self._of(epoch)
        if own.program.running:
            raise EngineBug("the CPU workers have not gathered the rows of an earlier step")
        own.take_event()
        own.ask(epoch, contexts)
        try:
            self._team.submit(own.program)
        except TeamError as error:
            raise EngineBug(f"the CPU workers cannot gather rows: {error}") from error
        own.begun = True

    def ended(self, epoch: int) -> bool:
        """Whether the workers have done with step `epoch`, or never had anything to do for it."""
        return not self._of(epoch).program.running

    def check(self, epoch: int, *, behind: bool = False) -> None:
        """Raises: ExchangeStalled if the GPU waited in vain in that step, or in the one before it
        and this one was launched `behind` it."""
        if self._lost.take(epoch, behind=behind) is not None:
            raise ExchangeStalled(
                f"the CPU workers showed no progress for {self._patience_ns / 1e9:g} s with the "
                "rows of an n-gram table"
            )

    def close(self) -> None:
        """Let the workers go, wait for them, then give the memory back."""
        for own in self._programs:
            own.step[ABORT // 8] = 1
        for own in self._programs:
            own.take_event()
        self._resources.close()

    def _of(self, epoch: int) -> _RowProgram:
        """That of the step, which the step before it does not have."""
        return self._programs[epoch % MOST_BEGUN]


class _RowProgram:
    """The jobs of one step: a table each, then the word that says that all rows are there.

    begun  it was submitted, and its event was not taken since
    """

    def __init__(
        self, tables: Sequence[Table], words: int, results: Results, most: int, stride: int
    ) -> None:
        self.program = Program(len(tables) + 1)
        self.step, self._n_tokens = aligned(3, np.int64), aligned(1, np.int64)
        self.pace = aligned(2, np.int64)
        width = max(table.memory.n_gram for table in tables)
        self._contexts = aligned((most, width), np.int32)
        self.begun = False
        shared = {
            "exchange": words,
            "done": results.done_host,
            "step": address_of(self.step),
            "sched_yield": c_function("sched_yield"),
            "usleep": c_function("usleep"),
            "pace": address_of(self.pace),
            "madvise": 0 if WANTED is None else c_function("madvise"),
            "advice": WANTED or 0,
            "page_bytes": mmap.PAGESIZE,
            "contexts": address_of(self._contexts),
            "width": width,
            "n_tokens": address_of(self._n_tokens),
            "chosen": results.chosen_host,
            "chosen_stride": CHOSEN_BYTES,
            "ring_mask": RING - 1,
            "out_stride": stride,
        }
        out = words + ROWS
        for index, table in enumerate(tables):
            args = self._gathering(table, most, shared | {"out": out})
            self.program.add(f"{index}.gather_rows", gather_rows.address, args, 0)
            out += most * table.token_bytes
        self.program.add("show_rows", show_rows.address, args, 1)

    def ask(self, epoch: int, contexts: I32) -> None:
        """What the next run is for."""
        n = len(contexts)
        self._contexts[:n] = contexts
        self._n_tokens[0], self.step[EPOCH // 8] = n, epoch
        self.program.n_chunks[:-1] = -(-n // TOKENS_A_CHUNK)

    def take_event(self) -> None:
        """An event may be given back, or waited for anew, once the last one was taken."""
        if self.begun:
            self.program.wait()
            self.begun = False

    def _gathering(self, table: Table, most: int, shared: dict[str, int]) -> NDArray[Any]:
        memory, n_heads = table.memory, len(table.memory.sizes)
        arrays = [
            np.array(memory.multipliers[: memory.n_gram], np.uint64),
            np.array(memory.sizes, np.uint64),
            np.array(memory.offsets, np.int64),
            aligned((most, n_heads), np.int64),
        ]
        multipliers, sizes, offsets, places = map(address_of, arrays)
        self.program.keep += [self._contexts, self._n_tokens, self.step, self.pace, *arrays]
        return record(
            GATHER,
            **shared,
            table=table.weight.address,
            row_bytes=table.weight.row_bytes,
            multipliers=multipliers,
            sizes=sizes,
            offsets=offsets,
            n_heads=n_heads,
            n_gram=memory.n_gram,
            end_token=memory.end_token,
            places=places,
            token_bytes=table.token_bytes,
        )
