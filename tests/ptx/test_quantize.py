"""quantize_q8: the real text, interpreted, writes the records of ops.arithmetic.quantize_rows."""

from __future__ import annotations

import numpy as np
import pytest

import ptx
from ops.arithmetic import activation_layout, quantize_rows
from ops.quantize import BLOCK, BLOCK_VALUES, quantize
from ops.quants.block import F32, U8, ActivationKind
from tests.support import ptx as interpreter
from tests.support.ptx import PtxError, mutations

KINDS: list[tuple[ActivationKind, int]] = [("q8_256", 1280), ("q8_32", 1056)]
"""A kind and a row of it that ends within a block, for 32-value groups also within a warp."""


SURVIVORS = 3
"""Of 24 seeded faults, how many may change nothing: zeros of lanes beyond the row, say."""


def rows(n: int) -> F32:
    """Plain values, and groups that are zero, denormal, huge, tied, infinite or not a number."""
    x = np.random.default_rng(4).normal(size=(6, n)).astype(np.float32)
    x[0, :256] = 0
    x[0, 256:512] = -0.0
    x[1, :256] *= np.float32(1e-31)
    x[1, 256:512] = np.float32(1e-45)
    x[2, :256] *= np.float32(3e38) / np.abs(x[2, :256]).max()
    x[2, 256:512] = np.float32(1e-30)
    x[2, 512:768] = np.nextafter(np.float32(1e-30), np.float32(0))
    x[3] = np.resize(np.arange(-127, 128, dtype=np.float32) / 2, n)
    x[3, ::32] = 127
    x[4, 5], x[4, 300], x[4, 301] = np.inf, -np.inf, 2
    x[5, 40], x[5, 513] = np.nan, -np.nan
    return x


def run(kernel: interpreter.Kernel, kind: ActivationKind, x: F32) -> U8:
    n_tokens, n = x.shape
    scales_offset, sums_offset, record_bytes = activation_layout(kind, n)
    memory = interpreter.Memory()
    records = memory.place(np.zeros((n_tokens, record_bytes), np.uint8))
    args = [memory.place(x, writable=False), records, n, scales_offset, sums_offset, record_bytes]
    kernel.launch(memory, (-(-n // BLOCK_VALUES), n_tokens), (BLOCK,), args)
    return memory.read(records, np.uint8, (n_tokens, record_bytes))


def same_records(kind: ActivationKind, n: int, records: U8, expected: U8) -> bool:
    """Equal bytes; among the scales any NaN equals any other."""
    scales_offset, sums_offset, _ = activation_layout(kind, n)
    scales = slice(scales_offset, sums_offset)
    got, want = (np.ascontiguousarray(r[:, scales]).view(np.float32) for r in (records, expected))
    equal = (got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want))
    rest = np.delete(records, np.r_[scales], axis=1) == np.delete(expected, np.r_[scales], axis=1)
    return bool(equal.all() and rest.all())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("kind", "n"), KINDS)
def test_records_and_every_instruction(kind: ActivationKind, n: int) -> None:
    kernel = quantize(kind)
    loaded = interpreter.load(kernel.text)[kernel.entry]
    x = rows(n)
    assert same_records(kind, n, run(loaded, kind, x), quantize_rows(kind, x))
    assert loaded.never_executed() == []


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("kind", "n"), KINDS)
def test_faults_are_noticed(kind: ActivationKind, n: int) -> None:
    kernel = quantize(kind)
    x = rows(n)
    expected = quantize_rows(kind, x)
    survivors = []
    for mutation in mutations(kernel.text, 1, 24):
        try:
            changed = interpreter.load(mutation.text)[kernel.entry]
            records = run(changed, kind, x)
        except (PtxError, IndexError):
            continue
        if same_records(kind, n, records, expected):
            survivors.append(str(mutation))
    assert len(survivors) <= SURVIVORS, survivors


@pytest.mark.parametrize(("kind", "n"), KINDS)
def test_parameters_are_those_of_the_text(kind: ActivationKind, n: int) -> None:
    kernel = quantize(kind)
    (entry,) = ptx.entries(kernel.text)
    assert entry.name == kernel.entry
    assert [(param.name, param.type) for param in entry.params] == list(kernel.params)
