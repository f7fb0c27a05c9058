"""The counter-based random numbers of samplers."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.engine.philox import philox4x32, uniform


# Known-answer vectors published with Random123 for philox4x32, 10 rounds.
@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox(counter: tuple, key: tuple, words: tuple) -> None:
    assert philox4x32(counter, key) == words


def test_uniform() -> None:
    numbers = np.array([uniform(7, position, draw) for position in range(2000) for draw in (0, 1)])
    assert numbers.min() >= 0 and numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.02
    assert len(set(numbers.tolist())) > 3990
    assert uniform(7, 0) == philox4x32((0, 0, 0, 0), (7, 0))[0] / 2**32
