"""Chunks of delta nets: what their bits depend on."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from ops.gpu.delta_net import CHUNK, CHUNK_SHARED_BYTES, delta_chunk, delta_chunk_grid
from tests.support.machines import InterpretedMachine

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize(("width", "strongest"), [(1, 1), (32, 1), (32, 30)])
def test_cuts_between_chunks_change_no_bit(width: int, strongest: int) -> None:
    """Nor do other sequences, or tokens behind; a cut within a chunk changes little.

    Nor where decays are so strong that a chunk's product of them is nothing.
    """
    rng, dim, n = np.random.default_rng(4), 32, 2 * CHUNK + 5
    qkv = rng.normal(size=(n, 3 * dim)).astype(np.float32) / np.float32(dim**0.5)
    decay = rng.uniform(0.3, 1, (n, width)).astype(np.float32)
    decay[:, -1] **= np.float32(strongest)
    beta = rng.uniform(0, 1, n).astype(np.float32)

    def outputs(*ends: int) -> NDArray[np.float32]:
        m = InterpretedMachine()
        states, out = (m.place(np.zeros(size, np.float32)) for size in (dim * dim, (n, dim)))
        start = 0
        for end in ends:
            spans = np.array([(start, end - start, start, 0)], np.int32)
            m.launch(
                delta_chunk(),
                delta_chunk_grid(1, dim, 1),
                {
                    "counts": m.place(np.array([end - start, 0, 1, 0], np.uint32)),
                    "spans": m.place(spans),
                    "states": states,
                    "qkv": m.place(qkv),
                    "decay": m.place(decay),
                    "beta": m.place(beta),
                    "out": out,
                    "slot_bytes": 4 * dim * dim,
                    "n_key_head": 1,
                    "n_value_head": 1,
                    "dim": dim,
                    "decay_width": width,
                },
                shared_bytes=CHUNK_SHARED_BYTES,
            )
            start = end
        return m.read(out, np.float32, (n, dim))

    whole = outputs(n)
    assert np.array_equal(outputs(CHUNK, n), whole)
    assert np.array_equal(outputs(CHUNK, 2 * CHUNK, n), whole)
    assert np.array_equal(outputs(n - 2)[: n - 2], whole[: n - 2])
    cut = outputs(CHUNK + 3, n)
    assert np.array_equal(cut[: CHUNK + 3], whole[: CHUNK + 3])
    assert np.allclose(cut, whole, atol=1e-5) and not np.array_equal(cut, whole)
