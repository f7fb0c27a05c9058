"""The macros that make `gemm.ptx` the kernel of one tile."""

from __future__ import annotations

from ops.arithmetic import n_partials
from ops.gpu.gemm_tile import DIRECT_FORMATS, SUB_ELEMS, GemmTile, Layout
from ops.gpu.kernel import format_table
from ops.quants.block import ACTIVATION_GROUP


def gemm_defines(tile: GemmTile) -> dict[str, str | int]:
    """The sizes and fragments of a tile's text."""
    defines = _sizes(tile) | _copy_defines(tile) | _fragments(tile)
    if tile.split > 1:
        defines["PART_BYTES"] = tile.tokens * Layout(tile).sum_bytes
    if tile.fmt.has_mins:
        defines |= _sum_defines(tile)
    if tile.fmt.name in DIRECT_FORMATS:
        if tile.fmt.unit_elems == 256:
            defines["ROW_PITCH_8"] = 8 * Layout(tile).row_pitch
    else:
        defines |= _unpack_defines(tile)
    if table_bytes := format_table(tile.fmt).nbytes:
        defines |= {
            "TABLE": Layout(tile).table,
            "TABLE_BYTES": table_bytes,
            "THREADS_16": 16 * tile.threads,
        }
    return defines


def _sizes(tile: GemmTile) -> dict[str, str | int]:
    """The numbers of a tile, a format and a layout."""
    fmt, at = tile.fmt, Layout(tile)
    group, direct = ACTIVATION_GROUP[fmt.activation], fmt.name in DIRECT_FORMATS
    sizes: dict[str, str | int] = {
        "BLOCK_SHIFT": _log2(fmt.block_elems),
        "BLOCK_BYTES": fmt.block_bytes,
        "UNIT": fmt.unit_elems,
        "UNITS_SHIFT": _log2(group // fmt.unit_elems),
        "TOKENS": tile.tokens,
        "TOKENS_SHIFT": _log2(tile.tokens),
        "ROWS": tile.rows,
        "ROWS_SHIFT": _log2(tile.rows),
        "ROW_TEAMS": tile.rows // 16,
        "ROW_TEAMS_SHIFT": _log2(tile.rows // 16),
        "SPLIT": tile.split,
        "SPLIT_SHIFT": _log2(tile.split),
        "COLUMNS": tile.columns,
        "STEP": tile.step,
        "STEP_BYTES": at.step_bytes,
        "ROW_PITCH": at.row_pitch,
        "STAGE_BYTES": at.stage_bytes,
        "X": at.x,
        "X_SCALES": at.x_scales,
        "X_PITCH": at.x_pitch,
        "TURNED": 0 if fmt.unit_elems == 256 else min(8, tile.threads // tile.tokens) - 1,
        "GROUP_PITCH": at.group_pitch,
        "SLOTS": at.slots,
        "OUT_ROWS": at.out_rows,
        "SUM_BYTES": at.sum_bytes,
    }
    if tile.columns >= 32:
        sizes["TILE_PAIR"] = 16 * at.x_pitch
    if fmt.unit_elems == 256 or not direct:
        sizes["THREADS"] = tile.threads
    if fmt.unit_elems < 256:
        return sizes | {
            "HALF_STEP": tile.step // 2,
            "HALF_A": tile.step // 2 if not direct else tile.split * fmt.block_bytes,
            "HALF_W": 4 * tile.split * tile.rows if not direct else tile.split * fmt.block_bytes,
            "HALF_X_SCALES": at.group_pitch * tile.split * fmt.unit_elems // group,
            **({"ROWS_2": 2 * tile.rows} if fmt.unit_elems == 16 else {}),
        }
    if tile.n_residues > 1:
        sizes |= {
            "CYCLE": n_partials(fmt) * fmt.unit_elems,
            "RESIDUES": tile.n_residues,
            "RESIDUE_SHIFT": 32 - _log2(tile.n_residues),
        }
    if tile.n_residues == 8:
        sizes |= {"TOP": at.top, "TOP_PITCH": at.top_pitch}
    return sizes


def _copy_defines(tile: GemmTile) -> dict[str, str | int]:
    """The numbers of what each thread copies, and of the results it writes."""
    row_lanes, record_lanes = tile.threads // tile.rows, tile.threads // tile.tokens
    n_scales = tile.tokens * tile.step // ACTIVATION_GROUP[tile.fmt.activation]
    if tile.fmt.unit_elems == 256:
        scales: dict[str, str | int] = {
            "SCALE_ELEMS": 256,
            "SCALE_SHIFT": 8,
            "ALL_SCALES": n_scales,
            "SCALE_ROUNDS": _repeat(n_scales, tile.threads),
        }
    else:
        lanes = min(8, record_lanes)
        scales = {
            "GROUP_LANES": lanes,
            "GROUP_LANES_SHIFT": _log2(lanes),
            "GROUP_ROUNDS": _repeat(n_scales // tile.tokens, lanes),
        }
    return scales | {
        "ROW_LANES": row_lanes,
        "ROW_LANES_SHIFT": _log2(row_lanes),
        "ROW_STRIDE": 16 * row_lanes,
        "ROW_ROUNDS": _rounds(Layout(tile).pieces, row_lanes),
        "RECORD_LANES": record_lanes,
        "RECORD_LANES_SHIFT": _log2(record_lanes),
        "RECORD_STRIDE": 16 * record_lanes,
        "RECORD_ROUNDS": _rounds(tile.step // 16, record_lanes),
        "SLOTS_AT_ONCE": row_lanes,
    }


def _unpack_defines(tile: GemmTile) -> dict[str, str | int]:
    """The numbers of what is unpacked in shared memory."""
    fmt, at = tile.fmt, Layout(tile)
    defines: dict[str, str | int] = {
        "BLOCK_GROUPS": fmt.block_elems // 32,
        "BLOCK_GROUPS_SHIFT": _log2(fmt.block_elems // 32),
        "STEP_GROUPS": tile.rows * tile.step // 32,
        "TILE": at.tile,
        "TILE_PITCH": at.pitch,
        "TILE_16": at.tile + 16,
        "UNIT_SCALES": at.unit_scales,
    }
    if fmt.unit_elems == 256:
        defines |= {
            "SUBS": at.subs,
            "SUBS_8": 8 * at.subs_pitch,
            "SUBS_PITCH": at.subs_pitch,
            "UNIT_SUBS": at.unit_subs,
        }
    if fmt.has_mins:
        on = at.min_scales - at.unit_scales
        defines |= {
            "MIN_SCALES": at.min_scales,
            "MIN_SCALES_ON": on,
            "MIN_SCALES_ON_8": on + 32,
        }
        if fmt.unit_elems == 256:
            defines |= {"MINS": at.mins, "MINS_PITCH": at.mins_pitch, "MINS_8": 8 * at.mins_pitch}
    return defines


def _sum_defines(tile: GemmTile) -> dict[str, str | int]:
    """The numbers of the sums of activations, for formats with mins."""
    at = Layout(tile)
    defines: dict[str, str | int] = {"X_SUMS": at.x_sums}
    if tile.fmt.unit_elems < 256:
        return defines | {"X_SUMS_ON": at.x_sums - at.x_scales}
    return defines | {
        "SUMS_PITCH": at.sums_pitch,
        "SUMS_8": 8 * at.sums_pitch,
        "SUM_PIECES": tile.tokens * tile.step // 128,
        "SUM_ROUNDS": _repeat(tile.tokens * tile.step // 128, tile.threads),
        "STEP_SUM_PIECES": tile.step // 128,
        "STEP_SUM_PIECES_SHIFT": _log2(tile.step // 128),
    }


def _fragments(tile: GemmTile) -> dict[str, str | int]:
    """The fragments of a tile and a format."""
    fmt, columns = tile.fmt, tile.columns
    table = "" if format_table(fmt).nbytes else "_none"
    names = {
        "LOAD_TABLE": f"gemm_table{table}",
        "PUT": f"gemm_put_{columns}",
        "JOIN": f"gemm_join_{tile.split}",
        "LOOP": f"gemm_loop_{tile.stages}",
    }
    names |= _fragments_256(tile) if fmt.unit_elems == 256 else _fragments_32(tile)
    if fmt.name in DIRECT_FORMATS:
        names["EXPAND"] = "gemm_expand_none"
    else:
        whole = tile.step == fmt.unit_elems
        names |= {
            "EXPAND": "gemm_expand_tile",
            "UNPACK": f"unpack_{fmt.name.lower()}",
            "SKIP_GROUP": f"gemm_skip_{'none' if whole else 'group'}",
        }
    return {macro: f'"inc/{name}.inc.ptx"' for macro, name in names.items()}


def _fragments_256(tile: GemmTile) -> dict[str, str]:
    """Those of units of 256."""
    fmt, columns = tile.fmt, tile.columns
    mins = "_mins" if fmt.has_mins else ""
    direct = fmt.name in DIRECT_FORMATS
    sub = SUB_ELEMS.get(fmt.name, 32)
    residues = tile.n_residues
    names = {
        "COPY_SCALES": "gemm_scales_256",
        "COPY_SUMS": "gemm_sums_256" if mins else "gemm_sums_none",
        "SKIP_UNIT": f"gemm_skip_{'none' if tile.step == fmt.unit_elems else 'unit'}",
        "COLUMN": f"gemm_column_sub{sub}",
        "ADD_MINS": f"gemm_mins_256_{columns}" if mins else "gemm_mins_none",
        "NEXT": "gemm_next_tree" if residues > 1 else "gemm_next_step",
        "CARRY": f"gemm_carry_{residues}_{columns}" if residues > 1 else "gemm_carry_none",
        "MERGE": "gemm_merge_none",
        "PREPARE": f"gemm_prepare_{'direct' if direct else '256'}{mins}_{columns}",
        "PRODUCTS": f"gemm_{'direct' if direct else 'products'}_256_{columns}",
    }
    if mins:
        names["LOAD_MINS"] = f"gemm_mins_of_{'head' if direct else 'tile'}"
    if direct:
        lower = fmt.name.lower()
        return names | {"HEAD": f"gemm_head_{lower}", "HALF": f"gemm_half_{lower}"}
    return names | {"KEEP": f"gemm_keep_sub{sub}{mins}", "LOAD_SUBS": f"gemm_subs_{sub}"}


def _fragments_32(tile: GemmTile) -> dict[str, str]:
    """Those of units of 32 or 16."""
    fmt, columns = tile.fmt, tile.columns
    mins = "_mins" if fmt.has_mins else ""
    names = {
        "COPY_SCALES": "gemm_scales_32",
        "COPY_SUMS": "gemm_sums_32" if mins else "gemm_sums_none",
        "PREPARE": f"gemm_prepare_32_{columns}",
        "PRODUCTS": f"gemm_products_32_{columns}",
        "COLUMN": f"gemm_column_unit{mins}",
        "MERGE": f"gemm_merge_{columns}",
    }
    if tile.stages == 2:
        names |= {"NEXT": "gemm_next_step", "CARRY": "gemm_carry_none"}
    if fmt.name in DIRECT_FORMATS:
        return names | {
            "PLACE_A": "gemm_prepare_raw",
            "OPEN_UNITS": "gemm_open_raw",
            "LOAD_A": f"gemm_a_raw{mins}",
            "ROW_A": f"gemm_row_{fmt.name.lower()}",
        }
    return names | {
        "KEEP": f"gemm_keep_unit{fmt.unit_elems}",
        "PLACE_A": "gemm_prepare_tile",
        "OPEN_UNITS": "gemm_open_tile",
        "LOAD_A": f"gemm_a_{fmt.unit_elems}",
    }


def _log2(power: int) -> int:
    return power.bit_length() - 1


def _rounds(total: int, at_once: int) -> int:
    """How often a loop runs that copies so many things; never just once, so that it is a loop."""
    return max(2, -(-total // at_once))


def _repeat(total: int, at_once: int) -> str:
    """The fragment that does something as often as it takes."""
    return f'"inc/gemm_repeat_{-(-total // at_once)}.inc.ptx"'
