"""Small cases of the expert kernels, run by the interpreter and compared with `ops.arithmetic`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ops.arithmetic import activation_layout, quantize_rows
from ops.expert import ADDRESSES, RowLaunch, down_reference, gate_up_reference
from ops.kernel import Kernel, format_table
from ops.quants import BlockFormat
from tests.support import ptx as interpreter
from tests.support.blocks import random_rows

UNTOUCHED = np.float32(7.5)
"""What lies in a result before the launch."""

Floats = NDArray[np.float32]


def same_bits(result: Floats, expected: Floats) -> bool:
    """Equal bits; any NaN equals any other."""
    equal = result.view(np.uint32) == expected.view(np.uint32)
    return bool(np.all(equal | (np.isnan(result) & np.isnan(expected))))


def activations(n_rows: int, n: int, seed: int) -> Floats:
    """f32[n_rows, n]: plain values, then a zero group, ties, a tiny and a huge group."""
    x = np.random.default_rng(seed).normal(size=(n_rows, n)).astype(np.float32)
    x[0, :256] = 0
    x[-1, :32] = np.arange(32, dtype=np.float32) - 15.5
    x[-1, 31] = 127
    x[-1, 256:512] *= np.float32(1e-31)
    x[0, 512:] *= np.float32(1e30)
    return x


class ExpertCase:
    """Three experts in four slots of two tokens; slot 1 has no expert.

    n values a row of the multiplied matrix, n_rows rows.
    """

    def __init__(self, fmt: BlockFormat, n: int, n_rows: int) -> None:
        self.fmt, self.n, self.n_rows = fmt, n, n_rows
        self.matrices = [random_rows(fmt, n_rows, n, seed) for seed in range(6)]
        self.x = activations(2, n, seed=9)
        self.h = activations(4, n, seed=10)

    def run_gate_up(self, kernel: interpreter.Kernel, launch: RowLaunch) -> Floats:
        """h f32[4, n_rows] of the kernel."""
        memory = interpreter.Memory()
        gates, ups = self._place(memory, (0, 2, 4)), self._place(memory, (1, 3, 5))
        experts = _slots(np.stack([gates, ups, [0, 0, 0]], axis=1))
        records = memory.place(quantize_rows(self.fmt.activation, self.x), writable=False)
        return self._launch(memory, kernel, launch, self.n_rows, records, experts, 2)

    def run_down(self, kernel: interpreter.Kernel, launch: RowLaunch) -> Floats:
        """y f32[4, n_rows] of the kernel."""
        memory = interpreter.Memory()
        downs = self._place(memory, (0, 1, 2))
        experts = _slots(np.stack([[16, 16, 16], [16, 16, 16], downs], axis=1))
        h = memory.place(self.h, writable=False)
        n_pairs = -(-self.n_rows // 2)
        return self._launch(memory, kernel, launch, n_pairs, h, experts)

    def gate_up(self) -> Floats:
        """What h has to be."""
        records = quantize_rows(self.fmt.activation, self.x)
        expected = np.full((4, self.n_rows), UNTOUCHED)
        for slot, expert in ((0, 0), (2, 1), (3, 2)):
            gate, up = self.matrices[2 * expert : 2 * expert + 2]
            token = slot // 2
            expected[slot] = gate_up_reference(self.fmt, gate, up, records[token : token + 1])[0]
        return expected

    def down(self) -> Floats:
        """What y has to be."""
        expected = np.full((4, self.n_rows), UNTOUCHED)
        for slot, expert in ((0, 0), (2, 1), (3, 2)):
            h = self.h[slot : slot + 1]
            expected[slot] = down_reference(self.fmt, self.matrices[expert], h)[0]
        return expected

    def _place(self, memory: interpreter.Memory, indices: tuple[int, ...]) -> list[int]:
        """Addresses of matrices, each rounded up to 16 bytes as a tensor in a file is."""
        addresses = []
        for index in indices:
            content = self.matrices[index].reshape(-1)
            padded = np.zeros(-(-content.nbytes // 16) * 16, np.uint8)
            padded[: content.nbytes] = content
            addresses.append(memory.place(padded, writable=False))
        return addresses

    def _launch(
        self,
        memory: interpreter.Memory,
        kernel: interpreter.Kernel,
        launch: RowLaunch,
        n_pairs: int,
        operand: int,
        experts: NDArray[np.uint64],
        *more: int,
    ) -> Floats:
        table = format_table(self.fmt)
        result = memory.place(np.full((4, self.n_rows), UNTOUCHED))
        args: list[Any] = [
            operand,
            memory.place(experts, writable=False),
            memory.place(table, writable=False) if table.nbytes else 0,
            result,
            self.n,
            self.n_rows,
            *more,
            *activation_layout(self.fmt.activation, self.n),
        ]
        kernel.launch(
            memory,
            launch.grid(n_pairs, 4),
            (launch.block,),
            args,
            dynamic_shared=launch.shared_bytes(self.fmt, self.n),
        )
        return memory.read(result, np.float32, (4, self.n_rows))


def interpreted(kernel: Kernel, text: str | None = None) -> interpreter.Kernel:
    """The kernel in the interpreter, from its own text or a changed one."""
    return interpreter.load(text or kernel.text, kernel.entry)[kernel.entry]


def _slots(experts: NDArray[Any]) -> NDArray[np.uint64]:
    """Addresses [3, 3] of experts -> the table of four slots, the second one empty."""
    table = np.zeros((4, ADDRESSES), np.uint64)
    table[[0, 2, 3], :3] = experts
    return table
