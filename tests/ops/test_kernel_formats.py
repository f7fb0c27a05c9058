"""What the CPU kernels assume about their weight formats, and the largest sums these allow."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from ops.arithmetic import dot_rows, quantize_rows
from ops.cpu.formats import KERNEL_FORMATS
from ops.cpu.formats.kernel_format import FloatFormat, SmallBlock, UnitFormat
from ops.cpu.isa import runnable_isas
from ops.cpu.matmul import SCRATCH_BYTES, matmul_address
from ops.quants import FORMATS, IntegerFormat
from ops.quants.block import F32, U8
from tests.support.blocks import BLOCK_FORMATS, random_blocks, random_rows

C_MATMUL = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 9)
UNIT_FORMATS = [name for name, fmt in KERNEL_FORMATS.items() if isinstance(fmt, UnitFormat)]
N_ELEMS = 512


def test_every_block_format_has_a_kernel() -> None:
    assert sorted(UNIT_FORMATS) == sorted(BLOCK_FORMATS)
    assert all(name == fmt.name for name, fmt in KERNEL_FORMATS.items())


@pytest.mark.parametrize("name", UNIT_FORMATS)
def test_a_kernel_and_its_format_agree(name: str) -> None:
    kernel, fmt = KERNEL_FORMATS[name], FORMATS[name]
    assert isinstance(kernel, UnitFormat) and isinstance(fmt, IntegerFormat)
    assert kernel.block_bytes == fmt.block_bytes
    assert kernel.has_mins == fmt.has_mins
    if isinstance(kernel, SmallBlock):
        assert (kernel.unit_elems, kernel.units_per_block) == (fmt.unit_elems, fmt.units_per_block)


@pytest.mark.parametrize("name", UNIT_FORMATS)
def test_raised_weights_stay_below_the_declared_byte(name: str) -> None:
    kernel, fmt = KERNEL_FORMATS[name], FORMATS[name]
    assert isinstance(kernel, UnitFormat) and isinstance(fmt, IntegerFormat)
    blocks = random_blocks(fmt, 256, seed=1).view(fmt.layout)[:, 0]
    codes = fmt.unpack(blocks).codes
    if kernel.signed:
        assert codes.min() >= -128 and codes.max() <= 127
        return
    raised = codes + kernel.offset
    assert raised.min() >= 0
    assert raised.max() <= kernel.max_byte <= 129


@pytest.mark.parametrize("isa", runnable_isas())
@pytest.mark.parametrize("name", UNIT_FORMATS)
def test_extreme_activations_do_not_overflow(name: str, isa: str) -> None:
    fmt = FORMATS[name]
    weights = random_rows(fmt, 4, N_ELEMS, seed=2)
    negative = fmt.dequantize_rows(weights) < 0
    x = np.concatenate([np.where(negative, -1, 1), [[1] * N_ELEMS], [[-1] * N_ELEMS]])
    records = quantize_rows(fmt.activation, x.astype(np.float32))

    expected = dot_rows(fmt, weights, records)
    for few in (slice(0, 2), slice(2, 6), slice(0, 6)):
        y = matmul(name, isa, weights, records[few])
        np.testing.assert_array_equal(y.view(np.uint32), expected[few].view(np.uint32))


def matmul(name: str, isa: str, weights: U8, records: U8) -> F32:
    y = np.zeros((len(records), len(weights)), np.float32)
    scratch = np.zeros(SCRATCH_BYTES + 64, np.uint8)
    x_ptrs, y_ptrs = (rows.ctypes.data + rows.strides[0] * index(rows) for rows in (records, y))
    C_MATMUL(matmul_address(name, isa))(
        weights.ctypes.data,
        weights.shape[1],
        0,
        len(weights),
        N_ELEMS,
        x_ptrs.ctypes.data,
        y_ptrs.ctypes.data,
        len(records),
        scratch.ctypes.data + -scratch.ctypes.data % 64,
    )
    return y


def index(rows: Any) -> Any:
    return np.arange(len(rows), dtype=np.int64)


def test_float_kernels_are_the_float_formats() -> None:
    floats = {name for name, fmt in KERNEL_FORMATS.items() if isinstance(fmt, FloatFormat)}
    assert floats == {"F32", "F16", "BF16"}
