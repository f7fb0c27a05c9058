"""The GPU kernel `choose_experts`: norm, router and choice of few tokens in one launch.

x += delta, the RMS norm, the routers' products and `route`, with the bits of `norm`, `linear` and
`route`.  Grid (`ChoiceLaunch.grid`): every block of rows norms its token's row again,
one more stores it and its forms, and the last one chooses as soon as the logits have arrived, each
in a word of its own that it reads until it is there.

x               f32[tokens, n]
x_to            f32[tokens, n], written if there is a delta; must not be x
n               values a row: a multiple of 64 (of 256 for such records), up to `MAX_N`
count           address of the u32 number of tokens
delta           f32[tokens, n], added to x; 0: none
weight          f32[n] of the norm
out_f32, q8_256, q8_32   addresses of the normed rows' forms, or 0; eps: see `ops.gpu.norm`
router, router_bias      addresses of n_expert rows of one format and of f32[n_expert] or 0
router_blocks   `ChoiceLaunch.blocks` of n_expert
gate            address of the shared expert's gate, one row more; gate_column 0: there is none
ahead, ahead_bias, n_ahead   another router of the same input, behind them; 0 rows: there is none
pairs           pairs of rows of a block
y, y_stride     f32[tokens, y_stride]: products from column n_polled on, written
words           u32[tokens, y_stride], zeros before and after: the products before that column
n_polled        columns that the choice needs: the router's logits and the shared expert's gate
gate_column     of that gate in the products
rehearse        0 or 1: run through the choice's code before the predecessor has ended
others          as `ops.gpu.router`'s `route`
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ops.gpu.kernel import WARP, Kernel, float_defines, launch_defines
from ops.gpu.norm import VALUES
from ops.gpu.router import CHOICE_PARAMS, ROUTE_BLOCKS, ROW_BYTES, route_reference
from ops.gpu.row_launch import FLOAT_FORMATS
from ops.quants import FORMATS, BlockFormat

UNIT = 64
"""Values of which a row is a multiple."""

BLOCKS = (256, 512)
"""Threads of a block."""

THREADS = 1024
"""Of a multiprocessor, in whose registers the kernel fits."""

MAX_N = VALUES * BLOCKS[-1]

PAIRS = 1
"""Pairs of rows of a block."""

FIXED_SHARED_BYTES = 18 << 10
"""Of shared memory that the text itself declares, rounded up."""

MAX_TOKENS = 8
"""Every token's blocks read the matrices anew, so there should be few."""

PARAMS = (
    ("x", "u64"),
    ("x_to", "u64"),
    ("n", "u32"),
    ("count", "u64"),
    ("delta", "u64"),
    ("weight", "u64"),
    ("out_f32", "u64"),
    ("q8_256", "u64"),
    ("q8_32", "u64"),
    ("eps", "f32"),
    ("router", "u64"),
    ("router_bias", "u64"),
    ("router_blocks", "u32"),
    ("gate", "u64"),
    ("ahead", "u64"),
    ("ahead_bias", "u64"),
    ("n_ahead", "u32"),
    ("pairs", "u32"),
    ("y", "u64"),
    ("y_stride", "u32"),
    ("words", "u64"),
    ("n_polled", "u32"),
    ("gate_column", "u32"),
    *CHOICE_PARAMS,
    ("rehearse", "u32"),
    ("choices", "u64"),
    ("weights", "u64"),
    ("experts", "u64"),
    ("shared_weights", "u64"),
)


@dataclass(frozen=True)
class ChoiceLaunch:
    """How the kernel is built and launched.

    block  threads of a block
    pairs  of rows of a block, at most block // 32
    """

    block: int
    pairs: int = PAIRS
    overlapped: bool = False

    @property
    def min_blocks(self) -> int:
        """Blocks that a multiprocessor has registers for: those of the next kernel wait beside."""
        return (THREADS if self.overlapped else THREADS * 3 // 4) // self.block

    def blocks(self, n_rows: int) -> int:
        """Blocks for a matrix's rows."""
        return -(-n_rows // (2 * self.pairs))

    def grid(self, rows: Iterable[int], n_tokens: int) -> tuple[int, int]:
        """Blocks for matrices of so many rows, and one each that stores and that chooses."""
        return sum(map(self.blocks, rows)) + 2, n_tokens

    def shared_bytes(self, fmt: BlockFormat, n: int, n_expert: int) -> int:
        """Dynamic shared memory: the normed row and the block's rows of a matrix; or the table."""
        return max(4 * n + 2 * self.pairs * fmt.row_bytes(n), ROW_BYTES * n_expert)


def choice_launch(n: int, n_expert: int, *, overlapped: bool = False) -> ChoiceLaunch:
    """For rows of n values: a thread has eight, and an expert where there are up to 512.

    Raises:
        ValueError: no block takes rows of n values.
    """
    if n % UNIT or not 0 < n <= MAX_N:
        raise ValueError(f"a choice by {n} values: not a multiple of {UNIT} up to {MAX_N}")
    n_threads = max(n // VALUES, min(n_expert, ROUTE_BLOCKS[-1]))
    return ChoiceLaunch(next(b for b in BLOCKS if b >= n_threads), overlapped=overlapped)


def choose_experts(fmt: BlockFormat, launch: ChoiceLaunch) -> Kernel:
    """Routers of one format; grid `ChoiceLaunch.grid`.

    Raises:
        LookupError: the format is not one of numbers.
    """
    if fmt.name not in FLOAT_FORMATS:
        raise LookupError(f"routers of {fmt.name}; there are {', '.join(FLOAT_FORMATS)}")
    return Kernel(
        entry=f"choose_experts_{fmt.name.lower()}",
        source="choose_experts.ptx",
        defines={
            "THREADS": launch.block,
            "WARPS": launch.block // WARP,
            **float_defines(fmt),
            **launch_defines(launch.block, launch.min_blocks, launch.overlapped),
        },
        params=PARAMS,
        block=launch.block,
        reference=route_reference,
    )


def variants() -> Iterator[tuple[str, Kernel]]:
    """Every format and block, overlapped; one also alone."""
    for launch, fmt in launches():
        kernel = choose_experts(fmt, launch)
        how = f"{launch.block} threads{', overlapped' if launch.overlapped else ''}"
        yield f"{kernel.entry} ({how})", kernel


def launches() -> Iterator[tuple[ChoiceLaunch, BlockFormat]]:
    """Those of the kernels that ship."""
    yield ChoiceLaunch(BLOCKS[0]), FORMATS["F32"]
    for name in FLOAT_FORMATS:
        for block in BLOCKS:
            yield ChoiceLaunch(block, overlapped=True), FORMATS[name]
