"""What a text repeats, beside a search that tries everything."""

from __future__ import annotations

import numpy as np

from runtime.engine.sampling_history import longest_repeats


def test_longest_repeats_by_brute_force() -> None:
    rng = np.random.default_rng(5)
    for _ in range(200):
        tokens = rng.integers(0, 3, rng.integers(1, 25)).tolist()
        wanted = {}
        for end in range(1, len(tokens)):
            length = 0
            while length < end and tokens[end - 1 - length] == tokens[-1 - length]:
                length += 1
            if length:
                wanted[tokens[end]] = max(wanted.get(tokens[end], 0), min(length, 6))
        assert longest_repeats(tokens, 6) == wanted
