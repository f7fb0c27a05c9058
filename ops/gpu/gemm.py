"""The GPU kernels `gemm_<format>`: a quantized matrix, or one a group, times the slots of a step.

Tensor cores give the exact integer totals of `ops.arithmetic`, its f32 steps follow in its order:
the bits are those of one slot at a time. Serves batches of a few tokens and whole prompts.

records         activation records of the format's kind, record_bytes apart
rows            i32[n_slots]: the record of each slot; 0: slot s has record s
offsets         i32[n_groups + 1]: where the slots of each group begin (`group` writes it); of a
                dense product, n_groups = 0, the address of the u32 number of slots
n_groups        matrices that there are; 0: one matrix, dense
matrices        u64[n_groups, 4]: a layer's rows of the model's table, an address of 0 says that the
                matrix is not here and leaves y as it is; dense: the address of the matrix
column          0 gate, 1 up, 2 down; blocks of grid z take the next ones
table           the format's grid (`format_table`), 0 where it has none
y               f32[*, y_stride], written; y_step bytes further on for the next column
out_rows        i32[n_slots]: the row of y that a slot writes; 0: slot s writes row s
bias            f32[n_groups, n_rows] (dense f32[n_rows]) added, 0: none; bias_step likewise
factors         f32[n_groups] (dense f32[1]) that multiply before the bias, 0: none; factors_step
n, n_rows       values and number of a matrix' rows
scales_offset, sums_offset, record_bytes   `activation_layout` of n

Steps are bytes from one column's array to the next one's, modulo 2^64, so any two arrays will do.
Grid `GemmTile.grid`, dynamic shared memory `GemmTile.shared_bytes`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from ops.arithmetic import dot_rows
from ops.gpu.gemm_defines import gemm_defines
from ops.gpu.gemm_tile import DIRECT_FORMATS, SUB_ELEMS, GemmTile
from ops.gpu.kernel import Kernel, launch_defines
from ops.quants import FORMATS, BlockFormat

GEMM_FORMATS = tuple(name for name, fmt in FORMATS.items() if fmt.block_elems > 1)
"""Formats that tensor cores can multiply: all but the floating-point ones."""

TILE_TOKENS = (8, 16, 32, 64)
"""Slots of a block that there are tiles for."""

SHARED_OF_8_0 = 164 << 10
"""Bytes of a multiprocessor of compute capability 8.0; a block takes 1024 beside its own."""

MANY_BLOCKS = 264
"""Blocks that fill an H200 twice."""

SHARED_OF_9_0, USUAL_THREADS = 227 << 10, 256
"""Bytes that a block may have there; elsewhere warps of blocks of more threads would spill
registers."""

PARAMS = (
    *((name, "u64") for name in ("records", "rows", "offsets", "matrices", "table")),
    *((name, "u64") for name in ("y", "y_step", "out_rows")),
    *((name, "u64") for name in ("bias", "bias_step", "factors", "factors_step")),
    *((name, "u32") for name in ("n_groups", "column", "n", "n_rows", "y_stride")),
    *((name, "u32") for name in ("scales_offset", "sums_offset", "record_bytes")),
)


def gemm_tile(fmt: BlockFormat, tokens: int, *, many_rows: bool = False) -> GemmTile:
    """The tile for so many slots a block, one of `TILE_TOKENS`.

    many_rows: for products whose blocks would fill the GPU several times. There are such tiles for
    32 slots, where each warp has the units of its rows to itself, and for 64 slots of formats
    whose warps have so many registers that two of the usual blocks do not fit: one of twice the
    rows does.

    Raises:
        LookupError: tensor cores cannot multiply the format, or there is no such tile.
    """
    if fmt.name not in GEMM_FORMATS:
        raise LookupError(f"no gemm for {fmt.name}; there are {', '.join(GEMM_FORMATS)}")
    if tokens not in TILE_TOKENS:
        raise LookupError(f"no tile of {tokens} slots; there are {TILE_TOKENS}")
    if fmt.unit_elems < 256:
        wide = fmt.unit_elems == 32 and (tokens == 64 or (tokens == 32 and many_rows))
        rows = 32 if wide else 16
        return GemmTile(fmt, tokens, rows, 8, columns=tokens, min_blocks=1, stages=3)
    direct = fmt.name in DIRECT_FORMATS
    if tokens < 32 or (tokens == 32 and not many_rows):
        min_blocks = {8: 4, 16: 3, 32: 2}[tokens] if direct else 2
        return GemmTile(fmt, tokens, rows=32, split=4, columns=tokens, min_blocks=min_blocks)
    if tokens == 32 and direct:  # with eight warps some architectures spill registers
        return GemmTile(fmt, tokens, rows=64, split=1, columns=32, min_blocks=3)
    crowded = fmt.name == "Q5_K" or (fmt.name in SUB_ELEMS and not direct)
    min_blocks = 1 if crowded else 2  # two would spill registers
    rows = 16 * 8 * 32 // tokens * (2 if crowded and many_rows and tokens == 64 else 1)
    return GemmTile(fmt, tokens, rows, split=1, columns=32, min_blocks=min_blocks)


@cache
def best_tile(
    fmt: BlockFormat, n_rows: int, n_slots: int, n_groups: int = 0, *, shared_bytes: int
) -> GemmTile:
    """The tile of a product of up to `n_slots` slots, see `ops.gpu.gemm` for the sizes.

    shared_bytes: dynamic shared memory that a block may have; where the tile needs more, a
    smaller one does. On an H200 64 slots of a block were better than 128 for every prompt, 32 slots
    were quicker with many rows once these blocks filled the GPU twice. With 128 rows 64 slots of
    Q2_K, Q3_K and Q5_K took 0.82 to 0.87 of the time that they take with 64.
    """
    share = -(-n_slots // max(n_groups, 1))
    most = next((n for n in TILE_TOKENS if n >= share), TILE_TOKENS[-1])
    tall = gemm_tile(fmt, most, many_rows=True)
    x, y, _ = tall.grid(n_rows, n_slots, n_groups)
    usual = (gemm_tile(fmt, n) for n in reversed(TILE_TOKENS) if n <= most)
    tiles = [tile for largest in usual for tile in largest.by_memory()]
    if tall.threads <= USUAL_THREADS or shared_bytes >= SHARED_OF_9_0:
        tiles.insert(0 if x * y >= MANY_BLOCKS else 1, tall)
    return next((tile for tile in tiles if tile.shared_bytes <= shared_bytes), tiles[-1])


def shipped_tiles() -> Iterator[GemmTile]:
    """Every tile of every format."""
    for name in GEMM_FORMATS:
        for tokens in TILE_TOKENS:
            usual = gemm_tile(FORMATS[name], tokens)
            yield from usual.by_memory()
            tall = gemm_tile(FORMATS[name], tokens, many_rows=True)
            if tall != usual:
                yield tall


@cache
def gemm(tile: GemmTile, *, overlapped: bool = False) -> Kernel:
    """The kernel of a tile, made once; `launch_defines` says what `overlapped` means.

    Without, it is for GPUs of whose blocks shared memory may hold fewer than on newer ones.
    """
    min_blocks = tile.min_blocks
    if not overlapped:
        min_blocks = max(1, min(min_blocks, SHARED_OF_8_0 // (tile.shared_bytes + 1024)))
    return Kernel(
        entry=f"gemm_{tile.fmt.name.lower()}",
        source="gemm.ptx",
        defines=gemm_defines(tile) | launch_defines(tile.threads, min_blocks, overlapped),
        params=PARAMS,
        block=tile.threads,
        reference=dot_rows,
    )


def variants() -> Iterator[tuple[str, Kernel]]:
    """Every tile, overlapped."""
    for tile in shipped_tiles():
        kernel = gemm(tile, overlapped=True)
        yield f"{kernel.entry} ({tile.label})", kernel
