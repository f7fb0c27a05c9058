"""The CPU matrix kernels give the bits of the arithmetic contract, on every instruction set."""

from __future__ import annotations

import ctypes
import functools

import numpy as np
import pytest

from ops.arithmetic import activation_layout, dot_rows, quantize_rows
from ops.cpu import isa as isa_module
from ops.cpu.formats import KERNEL_FORMATS
from ops.cpu.gemm import MAX_ELEMS
from ops.cpu.isa import UnsupportedIsa, choose_isa, runnable_isas
from ops.cpu.matmul import SCRATCH_BYTES, matmul_address
from ops.quants import FORMATS
from ops.quants.block import F32, U8
from tests.support.blocks import random_rows
from tests.support.guarded import GuardedBuffer

N_ROWS, N_TOKENS = 20, 40
LENGTHS = (256, 768, 2048)
SMALL_LENGTHS = (32, 96, 1408)
TOKEN_COUNTS = (1, 2, 3, 4, 5, 8, 16, 31, 40)
C_MATMUL = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 9)


@pytest.mark.parametrize("isa", runnable_isas())
@pytest.mark.parametrize("name", KERNEL_FORMATS)
def test_bits_are_those_of_the_contract(name: str, isa: str) -> None:
    for n in lengths_of(name):
        weights, records, expected = case(name, n)
        kernel = Kernel(name, isa, weights, records)
        for n_tokens in TOKEN_COUNTS if n > 256 else (1, 8):
            y = kernel.run(n, (1, N_ROWS), n_tokens)
            assert_same_bits(y[:, 1:], expected[:n_tokens, 1:], f"n={n} tokens={n_tokens}")
            assert np.isnan(y[:, :1]).all(), "a row outside the range was written"


@pytest.mark.parametrize("isa", runnable_isas())
@pytest.mark.parametrize("n_tokens", [1, 8])
def test_a_row_does_not_depend_on_its_range(isa: str, n_tokens: int) -> None:
    weights, records, expected = case("Q4_K", 768)
    kernel = Kernel("Q4_K", isa, weights, records)
    for row in range(N_ROWS):
        y = kernel.run(768, (row, row + 1), n_tokens)
        assert_same_bits(y[:, row], expected[:n_tokens, row], f"row {row}")


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K"])
@pytest.mark.parametrize("n", [512, 1024, 1280, 2304, 4352])
def test_eight_blocks_at_a_time_may_be_fewer(name: str, n: int) -> None:
    weights, records, expected = case(name, n)
    kernel = Kernel(name, runnable_isas()[0], weights, records)
    for n_tokens in (1, 2, 4):
        for begin, end in ((0, 1), (3, 10), (12, N_ROWS)):
            y = kernel.run(n, (begin, end), n_tokens)
            assert_same_bits(y[:, begin:end], expected[:n_tokens, begin:end], f"rows {begin}")
            assert np.isnan(np.delete(y, slice(begin, end), axis=1)).all(), "another was written"


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0", "F32"])
@pytest.mark.parametrize("n_tokens", [1, 8])
def test_nan_and_infinity_reach_the_result(name: str, n_tokens: int) -> None:
    fmt = FORMATS[name]
    x = np.random.default_rng(5).normal(size=(n_tokens, 768)).astype(np.float32)
    x[0, 300], x[-1, 301] = np.nan, np.inf
    weights = random_rows(fmt, 3, 768, seed=9)
    records = quantize_rows(fmt.activation, x)
    y = Kernel(name, runnable_isas()[0], weights, records).run(768, (0, 3), n_tokens)
    with np.errstate(invalid="ignore"):
        expected = dot_rows(fmt, weights, records)
    np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
    assert not np.isfinite(y[[0, -1]]).any()


@pytest.mark.parametrize("name", ["Q4_K", "Q8_0"])
def test_the_longest_panel_fits_the_scratch_and_longer_rows_need_none(name: str) -> None:
    for n in (MAX_ELEMS, MAX_ELEMS + 256):
        fmt = FORMATS[name]
        weights = random_rows(fmt, 1, n, seed=3)
        x = np.random.default_rng(4).normal(size=(8, n)).astype(np.float32)
        records = quantize_rows(fmt.activation, x)
        y = Kernel(name, runnable_isas()[0], weights, records).run(n, (0, 1), 8)
        assert_same_bits(y, dot_rows(fmt, weights, records), f"n={n}")


@pytest.mark.parametrize("name", ["IQ3_XXS", "Q4_K", "Q6_K"])
def test_rows_too_long_to_put_in_order_are_multiplied_as_they_are(name: str) -> None:
    unit_bytes = {"IQ3_XXS": 256, "Q4_K": 256 + 16, "Q6_K": 32}[name]
    n = (SCRATCH_BYTES // 4 // unit_bytes + 1) * 256
    fmt = FORMATS[name]
    weights = random_rows(fmt, 1, n, seed=5)
    x = np.random.default_rng(6).normal(size=(2, n)).astype(np.float32)
    records = quantize_rows(fmt.activation, x)
    y = Kernel(name, runnable_isas()[0], weights, records).run(n, (0, 1), 2)
    assert_same_bits(y, dot_rows(fmt, weights, records), f"n={n}")


def test_an_unknown_format_lists_the_known_ones() -> None:
    with pytest.raises(LookupError, match=r"'Q9_K'.*Q4_K"):
        matmul_address("Q9_K")


def test_an_instruction_set_that_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedIsa, match="unknown instruction set 'neon'"):
        choose_isa("neon")
    monkeypatch.setattr(isa_module, "target_features", lambda: isa_module.AVX2)
    assert choose_isa() == "avx2"
    with pytest.raises(UnsupportedIsa, match="'avx512' cannot run here; these can: avx2, portable"):
        choose_isa("avx512")


class Kernel:
    """One kernel with its operands in guarded memory."""

    def __init__(self, name: str, isa: str, weights: U8, records: U8) -> None:
        self._call = C_MATMUL(matmul_address(name, isa))
        self._n_rows, self._row_bytes = weights.shape
        self._weights = GuardedBuffer(weights)
        self._records = [GuardedBuffer(record) for record in records]
        self._scratch = GuardedBuffer(np.full(SCRATCH_BYTES, 0xFF, np.uint8))

    def run(self, n: int, rows: tuple[int, int], n_tokens: int) -> F32:
        """f32[n_tokens, n_rows]; NaN where the kernel stored nothing."""
        y = np.full((n_tokens, self._n_rows), np.nan, np.float32)
        x_ptrs = np.array([record.address for record in self._records[:n_tokens]], np.int64)
        y_ptrs = y.ctypes.data + y.strides[0] * np.arange(n_tokens, dtype=np.int64)
        self._call(
            self._weights.address,
            self._row_bytes,
            *rows,
            n,
            x_ptrs.ctypes.data,
            y_ptrs.ctypes.data,
            n_tokens,
            self._scratch.address,
        )
        return y


@functools.cache
def case(name: str, n: int) -> tuple[U8, U8, F32]:
    """Weights, activation records and the expected products of all tokens and rows."""
    fmt = FORMATS[name]
    rng = np.random.default_rng(n)
    x = (rng.normal(size=(N_TOKENS, n)) * rng.choice([0.01, 1, 30], (N_TOKENS, 1))).astype(
        np.float32
    )
    x[1] = 0
    x[2] = np.where(rng.random(n) < 0.5, -7, 7)
    weights = random_rows(fmt, N_ROWS, n, seed=n + 1)
    records = quantize_rows(fmt.activation, x)
    assert records.shape[1] == activation_layout(fmt.activation, n)[2]
    return weights, records, dot_rows(fmt, weights, records)


def lengths_of(name: str) -> list[int]:
    """Row lengths that are whole blocks of the format; floats also take odd ones."""
    fmt = FORMATS[name]
    lengths = [n for n in (*LENGTHS, *SMALL_LENGTHS) if n % fmt.block_elems == 0]
    return [*lengths, 77] if fmt.activation == "f32" else lengths


def assert_same_bits(y: F32, expected: F32, where: str) -> None:
    np.testing.assert_array_equal(y.view(np.uint32), expected.view(np.uint32), err_msg=where)
