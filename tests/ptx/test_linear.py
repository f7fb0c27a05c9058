"""How `linear` is launched: only by kernels that have cases, in pairs of units where that fits."""

from __future__ import annotations

import pytest

from ops.gpu.linear import launches
from ops.gpu.row_launch import GPU_FORMATS, PAIRED, best_launch
from ops.quants import FORMATS

ROWS = (4, 96, 320, 2560, 8191, 8192, 16384, 34816, 248320)


@pytest.mark.parametrize("name", GPU_FORMATS)
def test_every_launch_is_one_that_ships(name: str) -> None:
    fmt = FORMATS[name]
    shipped = {launch for launch, of in launches() if of.name == name}
    step = max(fmt.block_elems, 32)
    for n in (step, 10 * step, 37 * step, 320 * step):
        for n_rows in ROWS:
            assert best_launch(fmt, n, n_rows=n_rows, overlapped=True) in shipped


@pytest.mark.parametrize("name", sorted(PAIRED))
def test_pairs_of_units_where_rows_begin_at_words(name: str) -> None:
    """A row of an odd number of blocks begins between two words, or ends with half a pair."""
    fmt = FORMATS[name]
    assert best_launch(fmt, 5120).paired
    assert not best_launch(fmt, 5120 + 32).paired
    assert (2 * fmt.block_bytes) % 4 == 0
