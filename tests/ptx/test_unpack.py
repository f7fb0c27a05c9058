"""The unpack fragments: the codes, sub-scales, mins and scales of ops.quants, on the bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ops.gpu.kernel import format_table
from ops.quants import FORMATS, BlockFormat, IntegerFormat
from ptx import expand
from tests.support.blocks import BLOCK_FORMATS, random_blocks
from tests.support.ptx import Memory, load
from tests.support.ptx.assemble import assemble, can_assemble
from tests.support.ptx.snippet import same

N_BLOCKS = 32

KERNEL = """.version 8.0
.target sm_80
.address_size 64
// unpack   u32[n_groups, 15]: what the fragment writes for each group of the blocks
.extern .shared .align 16 .b8 arena[];
.visible .entry unpack(
    .param .u64 blocks, .param .u64 table, .param .u64 out, .param .u32 n_bytes,
    .param .u32 table_bytes, .param .u32 n_groups)
{
    .reg .u32   %thread, %threads, %n, %at, %to, %table, %block, %group;
    .reg .u64   %from, %all, %offset;
    .reg .b32   %w<8>, %sub_low, %sub_high, %min_low, %min_high;
    .reg .f32   %scale, %scale_high, %min_scale;
    .reg .b16   %byte;
    .reg .pred  %done;

    mov.u32             %thread, %tid.x;
    mov.u32             %threads, %ntid.x;
    ld.param.u64        %all, [blocks];
    ld.param.u32        %n, [n_bytes];
    mov.u32             %to, arena;
    add.u32             %table, %to, TABLE_AT;
    mov.u32             %at, %thread;
copy_block:
    setp.ge.u32         %done, %at, %n;
@%done bra              copied;
    cvt.u64.u32         %offset, %at;
    add.u64             %from, %all, %offset;
    ld.global.nc.b8     %byte, [%from];
    add.u32             %block, %to, %at;
    st.shared.b8        [%block], %byte;
    add.u32             %at, %at, %threads;
    bra                 copy_block;
copied:
    ld.param.u64        %all, [table];
    ld.param.u32        %n, [table_bytes];
    mov.u32             %at, %thread;
copy_table:
    setp.ge.u32         %done, %at, %n;
@%done bra              ready;
    cvt.u64.u32         %offset, %at;
    add.u64             %from, %all, %offset;
    ld.global.nc.b8     %byte, [%from];
    add.u32             %block, %table, %at;
    st.shared.b8        [%block], %byte;
    add.u32             %at, %at, %threads;
    bra                 copy_table;
ready:
    bar.sync            0;
    ld.param.u32        %n, [n_groups];
    setp.ge.u32         %done, %thread, %n;
@%done ret;
    div.u32             %block, %thread, GROUPS;
    rem.u32             %group, %thread, GROUPS;
    mad.lo.u32          %block, %block, BLOCK_BYTES, %to;
#define BLOCK %block
#define GROUP %group
#define W0 %w0
#define W1 %w1
#define W2 %w2
#define W3 %w3
#define W4 %w4
#define W5 %w5
#define W6 %w6
#define W7 %w7
#define SUB_LOW %sub_low
#define SUB_HIGH %sub_high
#define MIN_LOW %min_low
#define MIN_HIGH %min_high
#define SCALE %scale
#define SCALE_HIGH %scale_high
#define MIN_SCALE %min_scale
#include UNPACK
    ld.param.u64        %all, [out];
    mad.wide.u32        %all, %thread, 60, %all;
    st.global.b32       [%all], W0;
    st.global.b32       [%all+4], W1;
    st.global.b32       [%all+8], W2;
    st.global.b32       [%all+12], W3;
    st.global.b32       [%all+16], W4;
    st.global.b32       [%all+20], W5;
    st.global.b32       [%all+24], W6;
    st.global.b32       [%all+28], W7;
    st.global.b32       [%all+32], SUB_LOW;
    st.global.b32       [%all+36], SUB_HIGH;
    st.global.b32       [%all+40], MIN_LOW;
    st.global.b32       [%all+44], MIN_HIGH;
    st.global.f32       [%all+48], SCALE;
    st.global.f32       [%all+52], SCALE_HIGH;
    st.global.f32       [%all+56], MIN_SCALE;
    ret;
#undef BLOCK
#undef GROUP
#undef W0
#undef W1
#undef W2
#undef W3
#undef W4
#undef W5
#undef W6
#undef W7
#undef SUB_LOW
#undef SUB_HIGH
#undef MIN_LOW
#undef MIN_HIGH
#undef SCALE
#undef SCALE_HIGH
#undef MIN_SCALE
}
"""


def kernel_text(fmt: BlockFormat, folder: Path) -> str:
    (folder / "unpack.ptx").write_text(KERNEL)
    return expand(
        "unpack.ptx",
        root=folder,
        UNPACK=f'"inc/unpack_{fmt.name.lower()}.inc.ptx"',
        BLOCK_BYTES=fmt.block_bytes,
        GROUPS=fmt.block_elems // 32,
        TABLE_AT=table_at(fmt),
    )


def table_at(fmt: BlockFormat) -> int:
    return -(-N_BLOCKS * fmt.block_bytes // 16) * 16


def expected(fmt: IntegerFormat, blocks: Any) -> tuple[Any, Any, Any, Any, Any]:
    """Codes [n, 32], sub-scales and mins [n, 2], scales [n, 2] and min scales [n] of n groups."""
    codes = fmt.unpack(blocks.view(fmt.layout)[:, 0])
    n = len(blocks) * fmt.block_elems // 32

    def halves(values: Any) -> Any:
        spread = np.repeat(values, fmt.block_elems // 16 // values.shape[1], axis=1)
        return spread.reshape(n, 2)

    zeros = np.zeros((len(blocks), 1), np.int32)
    subs = zeros + 1 if codes.sub_scales is None else codes.sub_scales
    mins = zeros if codes.mins is None else codes.mins
    min_scale = zeros.astype(np.float32) if codes.min_scale is None else codes.min_scale[:, None]
    scale = codes.scale.reshape(len(blocks), -1)
    return (
        codes.codes.reshape(n, 32),
        halves(subs),
        halves(mins),
        halves(scale),
        halves(min_scale)[:, 0],
    )


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_codes_and_scales_are_those_of_the_format(name: str, tmp_path: Path) -> None:
    fmt = FORMATS[name]
    assert isinstance(fmt, IntegerFormat)
    blocks = random_blocks(fmt, N_BLOCKS, seed=7)
    codes, subs, mins, scales, min_scales = expected(fmt, blocks)
    table = format_table(fmt)
    text = kernel_text(fmt, tmp_path)
    if can_assemble():
        assert not assemble(text, "sm_90")["unpack"].spill_bytes

    memory = Memory(1 << 20)
    out = memory.reserve(len(codes) * 60)
    kernel = load(text, "unpack.ptx")["unpack"]
    kernel.launch(
        memory,
        (1,),
        (-(-len(codes) // 32) * 32,),
        [
            memory.place(blocks, writable=False),
            memory.place(table, writable=False) if table.nbytes else 0,
            out,
            blocks.nbytes,
            table.nbytes,
            len(codes),
        ],
        dynamic_shared=table_at(fmt) + table.nbytes,
        strict=True,
    )
    result = memory.read(out, np.int32, (len(codes), 15))
    np.testing.assert_array_equal(result[:, :8].copy().view(np.int8), codes)
    np.testing.assert_array_equal(result[:, 8:10], subs)
    np.testing.assert_array_equal(result[:, 10:12], mins)
    same(result[:, 12:14].copy().view(np.float32), scales)
    same(result[:, 14].copy().view(np.float32), min_scales)
    assert not [line for line in kernel.never_executed() if line.startswith("inc/")]
