"""Usage profiles: kept exactly, merged, faded; counts never grow without end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from profiles import (
    ModelIdentity,
    ProfileError,
    UsageProfile,
    container,
    load_profile,
    save_profile,
    scaled_down,
    tensor_hash,
)

MODEL = ModelIdentity("olmoe", 1000, "0123456789abcdef" * 2)


def profile(*counts: list[int], n_tokens: int = 10) -> UsageProfile:
    return UsageProfile(MODEL, np.array(counts, np.uint64), n_tokens)


def test_a_profile_comes_back(tmp_path: Path) -> None:
    kept = profile([1, 2, 3], [4, 5, 1 << 31])
    save_profile(tmp_path / "p", kept)
    loaded = load_profile(tmp_path / "p")
    assert (loaded.model, loaded.n_tokens) == (MODEL, 10)
    assert loaded.counts.tolist() == kept.counts.tolist()


def test_merged_and_decayed() -> None:
    merged = profile([1, 2]).merged(profile([10, 0], n_tokens=5))
    assert merged.counts.tolist() == [[11, 2]] and merged.n_tokens == 15
    faded = merged.decayed(0.5)
    assert faded.counts.tolist() == [[6, 1]] and faded.n_tokens == 8
    with pytest.raises(ProfileError):
        merged.decayed(1.5)
    with pytest.raises(ProfileError):
        merged.merged(profile([1, 2, 3]))


def test_a_layer_that_counts_too_high_keeps_its_ratios() -> None:
    most = 1 << 31
    merged = profile([most, most // 4], [3, 1]).merged(profile([most, most // 4], [1, 0]))
    assert merged.counts.tolist() == [[most // 2, most // 8], [4, 1]]
    assert scaled_down(np.array([[1 << 62, 1]], np.uint64)).max() <= most


@pytest.mark.parametrize(
    ("counts", "n_tokens"),
    [(np.zeros((0, 3), np.uint64), 1), (np.zeros(3, np.uint64), 1), (np.zeros((1, 3)), 1),
     (np.full((1, 3), 1 << 40, np.uint64), 1), (np.zeros((1, 3), np.uint64), -1)],
)  # fmt: skip
def test_impossible_counts_are_refused(counts: np.ndarray, n_tokens: int) -> None:
    with pytest.raises(ProfileError):
        UsageProfile(MODEL, counts, n_tokens)


@pytest.mark.parametrize(
    ("name", "value"),
    [("architecture", "../x"), ("architecture", 3), ("file_bytes", 0), ("file_bytes", "7"),
     ("tensor_hash", "xyz"), ("n_tokens", 1.5), ("n_tokens", True)],
)  # fmt: skip
def test_wrong_facts_in_a_file_are_refused(tmp_path: Path, name: str, value: object) -> None:
    facts = {"architecture": "olmoe", "file_bytes": 9, "tensor_hash": "0" * 32, "n_tokens": 1}
    counts = {"counts": np.ones((2, 2), np.uint64)}
    container.write(tmp_path / "p", "expert usage", facts, counts)
    load_profile(tmp_path / "p")
    container.write(tmp_path / "p", "expert usage", {**facts, name: value}, counts)
    with pytest.raises(ProfileError):
        load_profile(tmp_path / "p")


def test_the_hash_sees_names_formats_and_shapes_but_no_order() -> None:
    rows = [("a", "Q4_K", (2, 3)), ("b", "F32", (2,))]
    assert tensor_hash(rows) == tensor_hash(reversed(rows))
    others = [
        [("a", "Q4_K", (3, 2)), rows[1]],
        [("a", "Q5_K", (2, 3)), rows[1]],
        [("c", "Q4_K", (2, 3)), rows[1]],
        rows[:1],
    ]
    hashes = {tensor_hash(other) for other in others}
    assert len(hashes) == 4 and tensor_hash(rows) not in hashes
