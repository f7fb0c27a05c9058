"""gemm: the bits of ops.arithmetic for dense and for grouped products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from ops.arithmetic import activation_layout, dot_rows, quantize_rows
from ops.gpu.gemm import gemm, shipped_tiles
from ops.gpu.gemm_float import FLOAT_FORMATS, ROWS, SHARED, TOKENS, gemm_float, gemm_float_grid
from ops.gpu.kernel import Kernel
from ops.quants import FORMATS, BlockFormat
from tests.support.blocks import random_rows
from tests.support.cases.case import Case, Outcome, given
from tests.support.cases.expert import activations, place_matrix, place_table
from tests.support.machines import Machine

UNTOUCHED = np.float32(7.5)
"""What lies in a result before the launch."""


@dataclass(frozen=True)
class Product:
    """A product of random operands.

    n, n_rows   values and number of a matrix' rows
    counts      slots of each group; one: a dense product
    absent      the group whose matrix is not here
    extras      with gathered records, scattered results, two columns, factors and biases
    """

    n: int
    n_rows: int
    counts: tuple[int, ...]
    absent: int | None = None
    extras: bool = False

    def __str__(self) -> str:
        groups = f" of {len(self.counts)} groups" if len(self.counts) > 1 else ""
        extras = ", gathered, scattered, biased" if self.extras else ""
        return f"{self.n_rows}x{self.n}, {sum(self.counts)} slots{groups}{extras}"


@dataclass(frozen=True)
class Target:
    """A kernel and its launch: rows and slots of a block, grid, dynamic shared memory."""

    fmt: BlockFormat
    kernel: Kernel
    rows: int
    tokens: int
    grid: Callable[[int, int, int, int], tuple[int, int, int]]
    shared_bytes: int


LARGE = (Product(5120, 300, (40,)), Product(768, 200, (150, 9, 0, 31), extras=True))


def run(target: Target, product: Product, m: Machine) -> Outcome:
    """y f32[columns, rows of y, stride]."""
    fmt, p = target.fmt, product
    rng = np.random.default_rng(5)
    n_groups, n_slots = len(p.counts), sum(p.counts)
    grouped, n_columns = n_groups > 1, 2 if p.extras else 1
    n_records = n_slots // 2 + 1 if p.extras else n_slots
    rows = rng.integers(0, n_records, n_slots) if p.extras else np.arange(n_slots)
    out_rows = rng.permutation(n_slots) if p.extras else np.arange(n_slots)
    offsets = np.cumsum([0, *p.counts])
    records = quantize_rows(fmt.activation, activations(n_records, p.n, seed=9))
    factors = rng.normal(size=(n_columns, n_groups)).astype(np.float32)
    bias = rng.normal(size=(n_columns, n_groups, p.n_rows)).astype(np.float32)
    stride = p.n_rows + 3

    table = np.zeros((n_groups, 4), np.uint64)
    expected = np.full((n_columns, n_slots, stride), UNTOUCHED)
    for group in range(n_groups):
        for column in range(n_columns):
            matrix = random_rows(fmt, p.n_rows, p.n, seed=2 * group + column)
            if group == p.absent:
                continue
            table[group, 1 + column] = place_matrix(m, matrix)
            slots = slice(offsets[group], offsets[group + 1])
            y_rows = dot_rows(fmt, matrix, records[rows[slots]])
            if p.extras:
                y_rows = y_rows * factors[column, group] + bias[column, group]
            expected[column, out_rows[slots], : p.n_rows] = y_rows
    y = m.place(np.full(expected.shape, UNTOUCHED))
    scales_offset, sums_offset, record_bytes = activation_layout(fmt.activation, p.n)
    m.launch(
        target.kernel,
        _grid(target, p, n_columns),
        {
            "records": m.place(records, writable=False),
            "rows": given(m, rows.astype(np.int32), p.extras),
            "offsets": given(m, (offsets if grouped else offsets[1:]).astype(np.int32)),
            "n_groups": n_groups if grouped else 0,
            "matrices": m.place(table, writable=False) if grouped else int(table[0, 1]),
            "column": 1,
            "table": place_table(m, fmt),
            "y": y,
            "y_step": 4 * n_slots * stride,
            "out_rows": given(m, out_rows.astype(np.int32), p.extras),
            "bias": given(m, bias, p.extras),
            "bias_step": 4 * n_groups * p.n_rows,
            "factors": given(m, factors, p.extras),
            "factors_step": 4 * n_groups,
            "n": p.n,
            "n_rows": p.n_rows,
            "y_stride": stride,
            "scales_offset": scales_offset,
            "sums_offset": sums_offset,
            "record_bytes": record_bytes,
        },
        shared_bytes=target.shared_bytes,
    )
    return Outcome(m.read(y, np.float32, expected.shape), expected)


def _grid(target: Target, p: Product, n_columns: int) -> tuple[int, int, int]:
    """With one tile more than there are; fewer than the grid of a step, which knows no counts."""
    n_groups = len(p.counts) if len(p.counts) > 1 else 0
    x, most, z = target.grid(p.n_rows, sum(p.counts), n_groups, n_columns)
    tiles = sum(-(-count // target.tokens) for count in p.counts)
    if tiles > most:
        raise ValueError(f"{tiles} tiles do not fit in a grid of {most}")
    return x, tiles + 1, z


def small(target: Target) -> list[Product]:
    """The dense one has more units than partial sums and more steps than buffers, the grouped one
    ends within a step."""
    units = target.fmt.unit_elems
    many = {1: 200, 256: 2304}.get(units, 2176)
    few = {1: 100, 256: 512}.get(units, 512 + target.fmt.block_elems)
    groups = (3, 0, target.tokens + 1, 2, 0, 0, 1, *[0] * 130, 1)
    products = [
        Product(many, target.rows - 3, (target.tokens // 2 + 1,)),
        Product(few, 12, groups, absent=3, extras=True),
    ]
    if 1 < units < 256:
        products.append(Product(16 * units, 5, (20,)))  # one step
    return products


def targets() -> Iterator[Target]:
    for tile in shipped_tiles():
        kernel = gemm(tile, overlapped=True)
        yield Target(tile.fmt, kernel, tile.rows, tile.tokens, tile.grid, tile.shared_bytes)
    for name in FLOAT_FORMATS:
        kernel = gemm_float(FORMATS[name], overlapped=True)
        yield Target(FORMATS[name], kernel, ROWS, TOKENS, gemm_float_grid, SHARED)


def cases() -> Iterator[Case]:
    """Small shapes that reach every path of every tile; real ones."""
    for target in targets():
        for product in small(target):
            yield Case(str(product), target.kernel, partial(run, target, product))
        for product in LARGE:
            yield Case(str(product), target.kernel, partial(run, target, product), large=True)
