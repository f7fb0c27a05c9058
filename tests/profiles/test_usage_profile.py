"""Usage profiles: kept exactly, merged, faded; counts never grow without end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from profiles import (
    ModelIdentity,
    ProfileError,
    RecentUse,
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


FIT = (0.5, 0.25, 0.5, 0.25, 0.125)


def recent(n_layers: int = 1, n_expert: int = 2, rate: float = 0.25) -> RecentUse:
    rates = np.full((2, n_layers, n_expert), rate, np.float32)
    rates[1, 0, 0] = 1.0
    return RecentUse(rates, FIT)


def test_recent_use_comes_back(tmp_path: Path) -> None:
    save_profile(tmp_path / "p", replace(profile([1, 2], [3, 4]), recent=recent(2)))
    loaded = load_profile(tmp_path / "p").recent
    assert loaded is not None and loaded.fit == FIT
    assert loaded.rates.tolist() == recent(2).rates.tolist()
    assert loaded.served is None
    served = replace(recent(2), served=(0.5, 0.75))
    save_profile(tmp_path / "p", replace(profile([1, 2], [3, 4]), recent=served))
    again = load_profile(tmp_path / "p").recent
    assert again is not None and again.part(slice(0, 1)).served == (0.5, 0.75)
    part = loaded.part(slice(0, 1), 1)
    assert part.rates.tolist() == [[[0.25]], [[1.0]]] and part.fit == FIT


def test_a_file_without_recent_use_or_of_other_half_lives_is_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "p"
    save_profile(path, profile([1, 2]))
    assert load_profile(path).recent is None
    facts = {"architecture": "olmoe", "file_bytes": 9, "tensor_hash": "0" * 32, "n_tokens": 1}
    arrays: dict[str, np.ndarray] = {
        "counts": np.ones((1, 2), np.uint64),
        "rates": recent().rates,
    }
    container.write(path, "expert usage", {**facts, **recent().facts()}, arrays)
    assert load_profile(path).recent is not None
    others = {"half_lives": [4.0, 256.0], "fit": list(FIT)}
    container.write(path, "expert usage", {**facts, **others}, arrays)
    assert load_profile(path).recent is None and load_profile(path).n_tokens == 1


def test_recent_use_is_that_of_the_later_profile() -> None:
    first, later = (replace(profile([1, 2]), recent=recent(rate=rate)) for rate in (0.5, 0.25))
    assert first.merged(later).recent is later.recent
    assert profile([1, 2]).merged(later).recent is later.recent
    assert first.merged(profile([1, 2])).recent is None  # nobody knows by now
    assert first.decayed(0.1).recent is first.recent and first.decayed(0.0).recent is None


@pytest.mark.parametrize(
    ("rates", "fit"),
    [(np.zeros((2, 2), np.float32), FIT), (np.zeros((3, 1, 2), np.float32), FIT),
     (np.zeros((2, 1, 2)), FIT), (np.full((2, 1, 2), 1.5, np.float32), FIT),
     (np.full((2, 1, 2), -0.1, np.float32), FIT), (np.full((2, 1, 2), np.nan, np.float32), FIT),
     (recent().rates, FIT[:4]), (recent().rates, (*FIT[:4], float("nan"))),
     (recent().rates, (*FIT[:4], 1e10)), (recent().rates, (-1.0, *FIT[1:])),
     (recent().rates, (0.1, 0.2, 0.1, 0.0, 0.0))],
)  # fmt: skip
def test_impossible_recent_use_is_refused(
    rates: np.ndarray, fit: tuple[float, float, float, float, float]
) -> None:
    with pytest.raises(ProfileError):
        RecentUse(rates, fit)


@pytest.mark.parametrize(
    "wrong",
    [{"fit": None}, {"fit": [1.0]}, {"fit": "12345"}, {"fit": [True] * 5}, {"half_lives": 8},
     {"served": [0.5]}, {"served": [0.5, 1.5]}, {"served": None}, {"served": [0.5, "x"]}],
)  # fmt: skip
def test_wrong_recent_use_in_a_file_is_refused(tmp_path: Path, wrong: dict[str, object]) -> None:
    facts = {"architecture": "olmoe", "file_bytes": 9, "tensor_hash": "0" * 32, "n_tokens": 1}
    arrays: dict[str, np.ndarray] = {
        "counts": np.ones((1, 2), np.uint64),
        "rates": recent().rates,
    }
    container.write(tmp_path / "p", "expert usage", {**facts, **recent().facts(), **wrong}, arrays)
    with pytest.raises(ProfileError):
        load_profile(tmp_path / "p")
    other_shape = {**arrays, "rates": recent(n_expert=3).rates}
    container.write(tmp_path / "p", "expert usage", {**facts, **recent().facts()}, other_shape)
    with pytest.raises(ProfileError, match="rates of shape"):
        load_profile(tmp_path / "p")


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
