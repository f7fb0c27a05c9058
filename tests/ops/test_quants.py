"""Block formats: sizes and values against the gguf package, integers against the values."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from ops.quants import FORMATS, IntegerFormat, format_of_type
from ops.quants.codebooks import GRIDS, SIGN_MASKS, grid, signs
from tests.support.blocks import BLOCK_FORMATS, FLOAT_FORMATS, random_blocks

UNKNOWN_TO_GGUF = ("Q1_0", "Q2_0")
KNOWN = [name for name in BLOCK_FORMATS if name not in UNKNOWN_TO_GGUF]


@pytest.mark.parametrize("name", [*KNOWN, *FLOAT_FORMATS])
def test_sizes_and_values_equal_gguf_bit_for_bit(name: str) -> None:
    fmt = FORMATS[name]
    qtype = gguf.GGMLQuantizationType[name]
    blocks = random_blocks(fmt, 96, seed=1)

    values = fmt.dequantize(blocks)

    assert (fmt.block_elems, fmt.block_bytes) == gguf.GGML_QUANT_SIZES[qtype]
    assert fmt.ggml_type == qtype.value
    expected = gguf.quants.dequantize(blocks, qtype)
    assert np.isfinite(values).all()
    np.testing.assert_array_equal(values.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_units_are_the_values_as_exact_integers(name: str) -> None:
    fmt = FORMATS[name]
    blocks = random_blocks(fmt, 64, seed=2)

    units = fmt.units(blocks)

    shape = (64, fmt.units_per_block, fmt.unit_elems)
    assert units.weights.shape == shape and units.weights.dtype == np.int32
    assert units.scale.shape == shape[:2] and units.scale.dtype == np.float32
    exact = units.scale[..., None].astype(np.float64) * units.weights
    assert (units.mins is not None) == (units.min_scale is not None) == fmt.has_mins
    if units.mins is not None and units.min_scale is not None:
        assert units.mins.shape == (64, fmt.units_per_block, fmt.unit_elems // 16)
        exact += np.repeat(units.min_scale[..., None].astype(np.float64) * units.mins, 16, axis=-1)
    np.testing.assert_array_equal(exact.reshape(64, -1).astype(np.float32), fmt.dequantize(blocks))


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_a_unit_total_fits_int32(name: str) -> None:
    fmt = FORMATS[name]
    weights = fmt.units(random_blocks(fmt, 64, seed=3)).weights
    assert np.abs(weights.astype(np.int64)).sum(-1).max() * 127 < 2**31


def test_q1_0_by_hand() -> None:
    block = np.zeros((1, 18), np.uint8)
    block[0, :2] = np.frombuffer(np.float16(0.5).tobytes(), np.uint8)
    block[0, 2] = 0b0000_0101
    block[0, 17] = 0b1000_0000

    values = FORMATS["Q1_0"].dequantize(block)[0]

    assert np.flatnonzero(values == 0.5).tolist() == [0, 2, 127]
    assert np.count_nonzero(values == -0.5) == 125
    assert FORMATS["Q1_0"].units(block).scale.tolist() == [[0.5] * 4]


def test_q2_0_by_hand() -> None:
    block = np.full((1, 18), 0b01_01_01_01, np.uint8)
    block[0, :2] = np.frombuffer(np.float16(-2).tobytes(), np.uint8)
    block[0, 2] = 0b11_10_01_00
    block[0, 17] = 0b00_01_01_01

    values = FORMATS["Q2_0"].dequantize(block)[0]

    assert values[:4].tolist() == [2.0, 0.0, -2.0, -4.0]
    assert values[63] == 2.0
    assert not values[4:63].any()


def test_f64_is_accepted_by_conversion() -> None:
    numbers = np.array([1 / 3, -1e-3, 2.0**100])
    blocks = numbers.view(np.uint8).reshape(3, 8)
    assert FORMATS["F64"].dequantize(blocks)[:, 0].tolist() == numbers.astype(np.float32).tolist()


def test_float_formats_have_no_units() -> None:
    with pytest.raises(TypeError, match="BF16 stores floating-point"):
        FORMATS["BF16"].units(np.zeros((1, 2), np.uint8))


def test_format_of_type_finds_every_format() -> None:
    assert [format_of_type(fmt.ggml_type) for fmt in FORMATS.values()] == list(FORMATS.values())
    assert all(name == fmt.name for name, fmt in FORMATS.items())


def test_unknown_type_lists_the_known_ones() -> None:
    with pytest.raises(LookupError, match=r"unknown tensor type 24; .*12 Q4_K.*42 Q2_0"):
        format_of_type(24)


def test_row_bytes_wants_whole_blocks() -> None:
    assert FORMATS["Q4_K"].row_bytes(512) == 288
    with pytest.raises(ValueError, match="300 values is not a whole number of 256"):
        FORMATS["Q4_K"].row_bytes(300)


def test_dequantize_rows_reads_strided_rows() -> None:
    fmt = FORMATS["Q8_0"]
    blocks = random_blocks(fmt, 24, seed=4)
    rows = np.concatenate([blocks.reshape(6, -1), np.zeros((6, 3), np.uint8)], axis=1)

    values = fmt.dequantize_rows(rows[:, :-3].reshape(2, 3, -1))

    np.testing.assert_array_equal(values.reshape(-1, 32), fmt.dequantize(blocks))


def test_every_block_format_is_integer() -> None:
    assert len(BLOCK_FORMATS) == 23
    assert all(isinstance(FORMATS[name], IntegerFormat) for name in BLOCK_FORMATS)


@pytest.mark.parametrize("name", GRIDS)
def test_grids_are_read_only(name: str) -> None:
    assert grid(name) is grid(name)
    with pytest.raises(ValueError, match="read-only"):
        grid(name)[0, 0] = 1


def test_magnitudes_of_iq3_s_are_odd_and_small() -> None:
    """The GPU's row product keeps k of 2 k + 1, in three bits."""
    assert np.unique(grid("IQ3_S")).tolist() == [1, 3, 5, 7, 9, 11, 13, 15]
    assert grid("IQ3_S").shape == (512, 4)


def test_signs_come_in_even_numbers() -> None:
    assert SIGN_MASKS[:4].tolist() == [0x00, 0x81, 0x82, 0x03]
    negative = (signs(SIGN_MASKS) < 0).sum(-1)
    assert not (negative % 2).any()
    assert signs(np.array([0x81], np.uint8)).tolist() == [[-1, 1, 1, 1, 1, 1, 1, -1]]
