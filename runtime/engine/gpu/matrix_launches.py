"""Products of dense matrices: one launch for all matrices of a format that have the same input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ops.gpu.gemm import TILE_TOKENS, gemm, gemm_tile
from ops.gpu.gemm_float import SHARED as GEMM_FLOAT_SHARED
from ops.gpu.gemm_float import gemm_float, gemm_float_grid
from ops.gpu.linear import Segment, linear, segments
from ops.gpu.row_launch import RowLaunch, best_launch, is_float
from ops.quants import BlockFormat
from runtime.engine.gpu.plan_parts import DeviceRows, PlanParts, record_fields
from runtime.models.linear import Linear

GEMM_ROWS = 8
"""From so many rows on each weight is read once for all of them; the bits are the same."""

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


def joined(linears: Sequence[Linear]) -> tuple[Product, ...]:
    """The products whose results lie one after another."""
    products, first = [], 0
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
) -> None:
    """y[row] = the products of x[row], for the rows below the u32 at `count`, `n_rows` at most."""
    by_format: dict[str, list[Product]] = {}
    for product in products:
        by_format.setdefault(parts.format_of(product.linear.weight).name, []).append(product)
    for alike in by_format.values():
        if n_rows >= GEMM_ROWS:
            for product in alike:
                _add_gemm(parts, name, product, x, y, count, n_rows)
        else:
            _add_small(parts, name, alike, x, y, count, n_rows)


def _add_small(
    parts: PlanParts,
    name: str,
    products: Sequence[Product],
    x: DeviceRows,
    y: Output,
    count: int,
    n_rows: int,
) -> None:
    """The products of one format by the kernel that reads the weights anew for every token."""
    fmt = parts.format_of(products[0].linear.weight)
    launch = row_launch(parts, fmt, x.width)
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
            **record_fields(fmt.activation, x.width),
        },
        shared_bytes=launch.shared_bytes(fmt, x.width),
        overlapped=parts.overlapped,
    )


def _add_gemm(
    parts: PlanParts,
    name: str,
    product: Product,
    x: DeviceRows,
    y: Output,
    count: int,
    n_rows: int,
) -> None:
    """One product whose weights are read once for many tokens."""
    matrix = product.linear
    fmt = parts.format_of(matrix.weight)
    add_gemm(
        parts,
        name,
        GemmSize(fmt, x.width, matrix.n_out, n_rows),
        {
            "records": x.want(fmt.activation),
            "offsets": count,
            "matrices": parts.weights.matrix(matrix.weight),
            "y": y.address + 4 * product.y_first,
            "y_stride": y.stride,
            "bias": parts.weights.vector(matrix.bias),
            "factors": parts.weights.vector(matrix.scale),
        },
    )


@dataclass(frozen=True)
class GemmSize:
    """n, n_rows   values a row, rows of a matrix
    n_slots     vectors that are multiplied, at most
    n_groups    matrices that share them; 0: one matrix
    n_columns   products beside each other
    """

    fmt: BlockFormat
    n: int
    n_rows: int
    n_slots: int
    n_groups: int = 0
    n_columns: int = 1


def add_gemm(parts: PlanParts, name: str, size: GemmSize, arguments: Mapping[str, int]) -> None:
    """A launch of `ops.gpu.gemm`; arguments that are missing are those of `PLAIN_GEMM`."""
    fmt = size.fmt
    sizes = (size.n_rows, size.n_slots, size.n_groups, size.n_columns)
    if is_float(fmt):
        kernel = gemm_float(fmt, overlapped=parts.overlapped)
        grid, shared_bytes = gemm_float_grid(*sizes), GEMM_FLOAT_SHARED
    else:
        tile = gemm_tile(fmt, tile_tokens(-(-size.n_slots // max(size.n_groups, 1))))
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


def tile_tokens(n_slots: int) -> int:
    """Slots of a block, for so many slots of one matrix."""
    return next((n for n in TILE_TOKENS if n >= n_slots), TILE_TOKENS[-1])


def row_launch(parts: PlanParts, fmt: BlockFormat, n: int) -> RowLaunch:
    """How kernels that multiply rows of n values of this format are launched."""
    return best_launch(fmt, n, overlapped=parts.overlapped)


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
