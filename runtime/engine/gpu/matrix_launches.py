"""Products of dense matrices: one launch for all matrices of a format that have the same input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ops.gpu.gemm import best_tile, gemm
from ops.gpu.gemm_float import SHARED as GEMM_FLOAT_SHARED
from ops.gpu.gemm_float import gemm_float, gemm_float_grid
from ops.gpu.linear import Segment, linear, segments
from ops.gpu.row_launch import FEW_ROWS, best_launch, is_float
from ops.quants import BlockFormat
from runtime.engine.gpu.plan_parts import DeviceRows, PlanParts, record_fields
from runtime.models.linear import Linear

GEMM_ROWS = 4
"""From so many rows on each weight is read once for all of them; the bits are the same.

On an H200, 4 rows of 6144x2048 Q4_K took 5.6 us instead of 10.4, of 50304x2048 Q6_K 38 instead of
85; with 2 rows only the latter gained.
"""

LARGE_MATRIX, LARGE_MATRIX_GEMM_ROWS = 1 << 15, 2
"""Rows of a matrix that is multiplied so from fewer on: an output matrix."""

FEW_ROWS_GEMM_ROWS = 16
"""The same for all matrices of a launch with up to `FEW_ROWS` rows: tiles of them would be few."""

FLOAT_GEMM_ROWS = 32
"""The same for matrices of numbers, mostly routers: small, and slow where a block has many rows."""

PLAIN_GEMM = {
    "rows": 0,
    "y_step": 0,
    "out_rows": 0,
    "bias": 0,
    "bias_step": 0,
    "factors": 0,
    "factors_step": 0,
    "column": 0,
}
"""The arguments of `ops.gpu.gemm` for one matrix and rows in their order."""


@dataclass(frozen=True)
class Product:
    """A matrix whose results begin at value `y_first` of each row of the output."""

    linear: Linear
    y_first: int = 0


@dataclass(frozen=True)
class Output:
    """f32 rows of `stride` values at `address`."""

    address: int
    stride: int


def joined(linears: Sequence[Linear], first: int = 0) -> tuple[Product, ...]:
    """The products whose results lie one after another, from value `first` on."""
    products = []
    for matrix in linears:
        products.append(Product(matrix, first))
        first += matrix.n_out
    return tuple(products)


def want_inputs(parts: PlanParts, linears: Sequence[Linear], x: DeviceRows) -> None:
    """Ask for the forms of x that the products need."""
    for matrix in linears:
        x.want(parts.format_of(matrix.weight).activation)


def add_products(
    parts: PlanParts,
    name: str,
    products: Sequence[Product],
    x: DeviceRows,
    y: Output,
    count: int,
    n_rows: int,
    *,
    late: bool = False,
) -> None:
    """y[row] = the products of x[row], for the rows below the u32 at `count`, `n_rows` at most.

    late: the launch before these does not make x, so that they may run beside it.
    """
    by_format: dict[str, list[Product]] = {}
    for product in products:
        by_format.setdefault(parts.format_of(product.linear.weight).name, []).append(product)
    for number, alike in enumerate(by_format.values()):
        if n_rows >= _gemm_rows(parts, alike):
            for neighbours in _neighbours(parts, alike):
                _add_gemm(parts, name, neighbours, x, y, count, n_rows)
        else:
            _add_small(parts, name, alike, x, y, count, n_rows, late=late or number > 0)


def _gemm_rows(parts: PlanParts, alike: Sequence[Product]) -> int:
    """From how many rows on tensor cores multiply matrices of one format."""
    if is_float(parts.format_of(alike[0].linear.weight)):
        return FLOAT_GEMM_ROWS
    n_rows = sum(product.linear.n_out for product in alike)
    if n_rows >= LARGE_MATRIX:
        return LARGE_MATRIX_GEMM_ROWS
    return FEW_ROWS_GEMM_ROWS if n_rows <= FEW_ROWS else GEMM_ROWS


def _add_small(
    parts: PlanParts,
    name: str,
    products: Sequence[Product],
    x: DeviceRows,
    y: Output,
    count: int,
    n_rows: int,
    *,
    late: bool,
) -> None:
    """The products of one format by the kernel that reads the weights anew for every token."""
    fmt = parts.format_of(products[0].linear.weight)
    n_out = sum(product.linear.n_out for product in products)
    launch = best_launch(fmt, x.width, n_rows=n_out, overlapped=parts.overlapped)
    table, n_blocks = segments(launch, [_segment(parts, product) for product in products])
    parts.plan.add(
        name,
        linear(fmt, launch),
        (n_blocks, n_rows),
        {
            "records": x.want(fmt.activation),
            "segments": parts.constants.place(table),
            "table": parts.grid_table(fmt),
            "y": y.address,
            "count": count,
            "n": x.width,
            "n_segments": len(products),
            "y_stride": y.stride,
            "late": late,
            **record_fields(fmt.activation, x.width),
        },
        shared_bytes=launch.shared_bytes(fmt, x.width),
        overlapped=parts.overlapped,
    )


def _add_gemm(
    parts: PlanParts,
    name: str,
    products: Sequence[Product],
    x: DeviceRows,
    y: Output,
    count: int,
    n_rows: int,
) -> None:
    """Neighbours, whose weights are read once for many tokens: to the kernel one matrix."""
    first = products[0]
    matrix = first.linear
    fmt = parts.format_of(matrix.weight)
    add_gemm(
        parts,
        name,
        GemmSize(fmt, x.width, sum(p.linear.n_out for p in products), n_rows),
        {
            "records": x.want(fmt.activation),
            "offsets": count,
            "matrices": parts.weights.matrix(matrix.weight),
            "y": y.address + 4 * first.y_first,
            "y_stride": y.stride,
            "bias": parts.weights.vector(matrix.bias),
            "factors": parts.weights.vector(matrix.scale),
        },
    )


def _neighbours(parts: PlanParts, products: Sequence[Product]) -> list[list[Product]]:
    """The products in runs whose weights, biases and results lie one after another."""
    runs: list[list[Product]] = []
    for product in products:
        if runs and _follows(parts, runs[-1][-1], product):
            runs[-1].append(product)
        else:
            runs.append([product])
    return runs


def _follows(parts: PlanParts, before: Product, product: Product) -> bool:
    """Whether a product is to a kernel the further rows of the one before."""
    a, b, weights = before.linear, product.linear, parts.weights
    if a.scale is not None or b.scale is not None or (a.bias is None) != (b.bias is None):
        return False
    n_bytes = a.n_out * parts.model.weights[a.weight].row_bytes
    return (
        product.y_first == before.y_first + a.n_out
        and weights.matrix(b.weight) == weights.matrix(a.weight) + n_bytes
        and (b.bias is None or weights.vector(b.bias) == weights.vector(a.bias) + 4 * a.n_out)
    )


@dataclass(frozen=True)
class GemmSize:
    """n, n_rows   values a row, rows of a matrix
    n_slots     vectors that are multiplied, at most
    n_groups    matrices that share them; 0: one matrix
    n_columns   products beside each other
    of_groups   matrices that share all the slots, where n_groups are some of these; 0: all
    """

    fmt: BlockFormat
    n: int
    n_rows: int
    n_slots: int
    n_groups: int = 0
    n_columns: int = 1
    of_groups: int = 0


def add_gemm(parts: PlanParts, name: str, size: GemmSize, arguments: Mapping[str, int]) -> None:
    """A launch of `ops.gpu.gemm`; arguments that are missing are those of `PLAIN_GEMM`."""
    fmt = size.fmt
    sizes = (size.n_rows, size.n_slots, size.n_groups, size.n_columns)
    if is_float(fmt):
        kernel = gemm_float(fmt, overlapped=parts.overlapped)
        grid, shared_bytes = gemm_float_grid(*sizes), GEMM_FLOAT_SHARED
    else:
        shared = parts.weights.block_shared_bytes
        groups = size.of_groups or size.n_groups
        tile = best_tile(fmt, size.n_rows, size.n_slots, groups, shared_bytes=shared)
        kernel = gemm(tile, overlapped=parts.overlapped)
        grid, shared_bytes = tile.grid(*sizes), tile.shared_bytes
    parts.plan.add(
        name,
        kernel,
        grid,
        {
            **PLAIN_GEMM,
            "table": parts.grid_table(fmt),
            "n_groups": size.n_groups,
            "n": size.n,
            "n_rows": size.n_rows,
            **record_fields(fmt.activation, size.n),
            **arguments,
        },
        shared_bytes=shared_bytes,
        overlapped=parts.overlapped,
    )


def _segment(parts: PlanParts, product: Product) -> Segment:
    matrix = product.linear
    scale = 1.0
    if matrix.scale is not None:
        scale = float(parts.model.weights[matrix.scale].to_f32().reshape(-1)[0])
    return Segment(
        weights=parts.weights.matrix(matrix.weight),
        n_rows=matrix.n_out,
        y_first=product.y_first,
        bias=parts.weights.vector(matrix.bias),
        scale=scale,
    )
