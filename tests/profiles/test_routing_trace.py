"""Routing traces: kept exactly, in few bytes; contradictions are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from profiles import Phase, ProfileError, RoutingTrace, container, join, load_trace, save_trace


def a_trace(n_expert: tuple[int, ...] = (8, 5), seed: int = 0) -> RoutingTrace:
    random, n_tokens = np.random.default_rng(seed), 10
    layers = [random.integers(-1, n, (n_tokens, 3)) for n in n_expert]
    return RoutingTrace(
        "tiny",
        n_expert,
        (100,) * len(n_expert),
        np.stack(layers, axis=1).astype(np.int32),
        np.array([6, 1, 1, 2], np.int32),
        np.array([Phase.PROMPT, Phase.GENERATED, Phase.GENERATED, Phase.GENERATED], np.uint8),
        np.array([0] * 6 + [0, 0, 0, 1], np.int32),
    )


@pytest.mark.parametrize("n_expert", [(8, 5), (254,), (255, 3), (256,), (4464,)])
def test_a_trace_comes_back(tmp_path: Path, n_expert: tuple[int, ...]) -> None:
    trace = a_trace(n_expert)
    save_trace(tmp_path / "t", trace)
    loaded = load_trace(tmp_path / "t")
    assert (loaded.model, loaded.n_expert, loaded.expert_bytes) == (
        "tiny",
        n_expert,
        trace.expert_bytes,
    )
    for name in ("choices", "steps", "phases", "sequences"):
        assert np.array_equal(getattr(loaded, name), getattr(trace, name)), name


def test_a_choice_takes_a_byte(tmp_path: Path) -> None:
    trace = a_trace()
    save_trace(tmp_path / "t", trace, packed=False)
    contents = container.read(tmp_path / "t", "routing trace", 1 << 20)
    assert contents.arrays["choices"].nbytes == trace.choices.size


@pytest.mark.parametrize(
    "changes",
    [
        {"n_expert": (8,)},
        {"n_expert": (8, 0)},
        {"expert_bytes": (100,)},
        {"expert_bytes": (100, -1)},
        {"choices": np.full((10, 2, 3), 5, np.int32)},
        {"choices": np.full((10, 2, 3), -2, np.int32)},
        {"choices": np.zeros((9, 2, 3), np.int32)},
        {"steps": np.array([6, 1, 1, 1], np.int32)},
        {"steps": np.array([10, 0, 0, 0], np.int32)},
        {"phases": np.array([0, 1, 1, 2], np.uint8)},
        {"phases": np.array([0, 1, 1], np.uint8)},
        {"sequences": np.zeros(3, np.int32)},
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ProfileError):
        replace(a_trace(), **changes)


def test_a_contradiction_in_a_file_names_the_file(tmp_path: Path) -> None:
    trace = a_trace()
    facts = {"model": "tiny", "n_expert": [8, 5], "expert_bytes": [1, 1]}
    arrays = {
        "choices": np.full((10, 2, 3), 7, np.uint8),  # the second layer has 5 experts
        "steps": trace.steps,
        "phases": trace.phases,
        "sequences": trace.sequences,
    }
    container.write(tmp_path / "t", "routing trace", facts, arrays)
    with pytest.raises(ProfileError, match=str(tmp_path / "t")):
        load_trace(tmp_path / "t")


def test_joined_traces_keep_their_sequences_apart() -> None:
    joined = join([a_trace(), a_trace(seed=1)])
    assert joined.n_tokens == 20
    assert joined.sequences.tolist() == [0] * 9 + [1] + [2] * 9 + [3]
    with pytest.raises(ProfileError):
        join([a_trace(), a_trace((8, 6))])


def test_token_by_token() -> None:
    part = a_trace().token_by_token(2, 5)
    assert part.steps.tolist() == [1, 1, 1] and set(part.phases.tolist()) == {Phase.GENERATED}
    assert np.array_equal(part.choices, a_trace().choices[2:5])
