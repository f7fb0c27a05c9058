"""norm: the bits of the expert sum and of the records, and the norm within a tolerance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from ops.arithmetic import activation_layout, quantize_rows
from ops.gpu.kernel import Kernel
from ops.gpu.norm import BLOCKS, norm, norm_of_block, norm_reference
from ops.quants.block import ACTIVATION_GROUP, F32, SUM_ELEMS, U8, ActivationKind
from tests.support.cases.case import Array, Case, Outcome, given
from tests.support.machines import Machine

RELATIVE = 1e-6
EPS = 1e-6
UNTOUCHED = 0x33
"""What bytes hold that no block writes."""


@dataclass(frozen=True)
class Setting:
    """Which operands a launch has.

    rows    of this step; the grid has one more if they are counted
    k       routed experts a row, 0: none
    slots   the rows of the expert outputs are shuffled
    gather  row r is x[rows - 1 - r], with 16 values between the rows of x
    """

    n: int
    rows: int = 2
    counted: bool = False
    gather: bool = False
    delta: bool = False
    k: int = 0
    slots: bool = False
    shared: bool = False
    shared_weights: bool = False
    normed: bool = True
    kinds: tuple[ActivationKind, ...] = ()
    scale: float = 1.0


SMALL = {
    "a delta, all forms": Setting(
        512, counted=True, gather=True, delta=True, kinds=("f32", "q8_256", "q8_32")
    ),
    "experts in slots": Setting(
        288, k=10, slots=True, shared=True, shared_weights=True, kinds=("f32", "q8_32"), scale=1e3
    ),
    "a delta and experts": Setting(768, delta=True, k=8, shared=True, kinds=("f32", "q8_256")),
    "nothing added": Setting(8, kinds=("f32",), scale=1e-4),
    "nothing stored": Setting(40, delta=True),
    "a shared expert, no norm": Setting(24, shared=True, normed=False),
}

LARGE = {
    **{f"delta {n}": Setting(n, delta=True, kinds=("f32", "q8_32")) for n in (2880, 5120)},
    **{
        f"8 experts {n}, {rows} rows": Setting(
            n, rows, counted=rows > 1, k=8, slots=rows > 1, shared=True, kinds=("f32", "q8_256")
        )
        for n, rows in ((2048, 1), (4096, 31), (7168, 8), (8192, 1))
    },
}


class Operands:
    """Host arrays of a setting and what they must become."""

    def __init__(self, setting: Setting) -> None:
        rng = np.random.default_rng(setting.n)
        n, rows, k = setting.n, setting.rows, setting.k

        def normal(*shape: int) -> F32:
            return (rng.normal(size=shape) * setting.scale).astype(np.float32)

        self.x = normal(rows, n + 16 * setting.gather)
        self.tokens = np.arange(rows, dtype=np.int32)[::-1].copy()
        self.delta, self.shared = normal(rows, n), normal(rows, n)
        self.outputs = normal(rows * k, n)
        self.weights = rng.random((rows, k)).astype(np.float32)
        self.slots = rng.permutation(rows * k).astype(np.int32).reshape(rows, k)
        if not setting.slots:
            self.slots = np.arange(rows * k, dtype=np.int32).reshape(rows, k)
        self.shared_weights = rng.random(rows).astype(np.float32)
        self.weight = rng.normal(size=n).astype(np.float32)
        self.updated, self.normed = self._expected(setting)

    def _expected(self, setting: Setting) -> tuple[F32, F32]:
        weights, outputs = self.weights, self.outputs[self.slots]
        if setting.shared:
            last = (
                self.shared_weights if setting.shared_weights else np.ones(setting.rows, np.float32)
            )
            weights = np.concatenate([weights, last[:, None]], axis=1)
            outputs = np.concatenate([outputs, self.shared[:, None]], axis=1)
        order = self.tokens if setting.gather else slice(None)
        has_sum = setting.k or setting.shared
        return norm_reference(
            self.x[order, : setting.n],
            self.weight,
            EPS,
            self.delta if setting.delta else None,
            weights if has_sum else None,
            outputs if has_sum else None,
        )


def run(setting: Setting, kernel: Kernel, machine: Machine) -> Outcome:
    """Ratios of the f32 rows to what they have to be; before them how many bytes of x, of the
    records (those of the f32 rows) and of rows beyond the count are wrong.
    """
    operands = Operands(setting)
    n, rows = setting.n, setting.rows
    launched = rows + setting.counted
    widths = {kind: activation_layout(kind, n)[2] for kind in setting.kinds}
    outs = {
        kind: machine.place(np.full((launched, width), UNTOUCHED, np.uint8))
        for kind, width in widths.items()
    }
    x = machine.place(operands.x)
    machine.launch(kernel, (launched,), _arguments(setting, operands, x, outs, machine))

    updated = operands.x.copy()
    order = operands.tokens if setting.gather else slice(None)
    updated[order, :n] = operands.updated
    wrong = [differing(machine.read(x, np.float32, updated.shape), updated)]
    if not outs:
        return Outcome(np.array(wrong), np.zeros(1, np.int64))
    read = {kind: machine.read(at, np.uint8, (launched, widths[kind])) for kind, at in outs.items()}
    normed = np.ascontiguousarray(read["f32"][:rows, : 4 * n]).view(np.float32)
    for kind, records in read.items():
        expected = np.full_like(records, UNTOUCHED)
        put_record(kind, n, expected[:rows], quantize_rows(kind, normed))
        wrong.append(differing(records, expected))
    result = np.concatenate([np.array(wrong), (normed / operands.normed).reshape(-1)])
    return Outcome(result, np.concatenate([np.zeros(len(wrong)), np.ones(normed.size)]), RELATIVE)


def _arguments(
    setting: Setting, operands: Operands, x: int, outs: dict[ActivationKind, int], machine: Machine
) -> dict[str, float]:
    return {
        "x": x,
        "x_stride": operands.x.shape[1],
        "n": setting.n,
        "count": given(machine, np.array([setting.rows], np.uint32), setting.counted),
        "tokens": given(machine, operands.tokens, setting.gather),
        "delta": given(machine, operands.delta, setting.delta),
        "expert_out": given(machine, operands.outputs, setting.k),
        "slots": given(machine, operands.slots, setting.slots),
        "weights": given(machine, operands.weights, setting.k),
        "n_used": setting.k,
        "shared": given(machine, operands.shared, setting.shared),
        "shared_weights": given(machine, operands.shared_weights, setting.shared_weights),
        "weight": given(machine, operands.weight, setting.normed),
        "out_f32": outs.get("f32", 0),
        "q8_256": outs.get("q8_256", 0),
        "q8_32": outs.get("q8_32", 0),
        "eps": EPS,
    }


def differing(result: Array, expected: Array) -> int:
    """Bytes of two arrays that differ."""
    return int(np.count_nonzero(result.view(np.uint8) != expected.view(np.uint8)))


def put_record(kind: ActivationKind, n: int, to: U8, records: U8) -> None:
    """Copy records without their padding, which the kernel leaves as it is."""
    scales, sums, _ = activation_layout(kind, n)
    if kind == "f32":
        to[:, : 4 * n] = records[:, : 4 * n]
        return
    scale_bytes, sum_bytes = 4 * n // ACTIVATION_GROUP[kind], 2 * -(-n // SUM_ELEMS)
    for start, size in ((0, n), (scales, scale_bytes), (sums, sum_bytes)):
        to[:, start : start + size] = records[:, start : start + size]


def cases() -> Iterator[Case]:
    """The small settings in every block, alone and overlapped."""
    for block in BLOCKS:
        for overlapped in (False, True):
            kernel = norm_of_block(block, overlapped=overlapped)
            for name, setting in SMALL.items():
                yield Case(name, kernel, partial(run, setting, kernel))
    for name, setting in LARGE.items():
        kernel = norm(setting.n)
        yield Case(name, kernel, partial(run, setting, kernel), large=True)
