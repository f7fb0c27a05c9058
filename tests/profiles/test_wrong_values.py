"""Values of the wrong kind are refused by the package's one error, in files and from programs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from profiles import (
    ModelIdentity,
    ProfileError,
    RecentUse,
    RoutingTrace,
    UsageProfile,
    join,
    load_profile,
    load_trace,
    save_profile,
    save_trace,
)

MODEL = ModelIdentity("olmoe", 1000, "0123456789abcdef" * 2)
COUNTS = np.ones((1, 2), np.uint64)
PROFILE = UsageProfile(MODEL, COUNTS, 1)
TRACE = RoutingTrace(
    "tiny",
    (2,),
    (100,),
    np.zeros((1, 1, 1), np.int32),
    np.ones(1, np.int32),
    np.zeros(1, np.uint8),
    np.zeros(1, np.int32),
)
ARRAY = np.zeros(1, np.int32)
WRONG: list[Any] = [None, True, -1, 1.5, float("nan"), "", "a\0b", b"x", [], {}, object(), [[1]]]
GIVE: dict[str, Callable[[Any], object]] = {
    "architecture": lambda v: ModelIdentity(v, 1000, MODEL.tensor_hash),
    "file_bytes": lambda v: ModelIdentity("olmoe", v, MODEL.tensor_hash),
    "tensor_hash": lambda v: ModelIdentity("olmoe", 1000, v),
    "model": lambda v: UsageProfile(v, COUNTS, 1),
    "counts": lambda v: UsageProfile(MODEL, v, 1),
    "n_tokens": lambda v: UsageProfile(MODEL, COUNTS, v),
    "rates": lambda v: RecentUse(v, (0.0,) * 5),
    "merged": PROFILE.merged,
    "decayed": PROFILE.decayed,
    "choices": lambda v: RoutingTrace("t", (2,), (1,), v, ARRAY, ARRAY, ARRAY),
    "steps": lambda v: RoutingTrace("t", (2,), (1,), TRACE.choices, v, ARRAY, ARRAY),
    "load_profile": load_profile,
    "load_trace": load_trace,
    "save_profile": lambda v: save_profile(v, PROFILE),
    "save_trace": lambda v: save_trace(v, TRACE),
}


@pytest.mark.parametrize("name", GIVE)
def test_a_value_of_the_wrong_kind_is_refused(name: str) -> None:
    for value in WRONG:
        with pytest.raises(ProfileError):
            GIVE[name](value)
            pytest.fail(f"{name} took {value!r}")


def test_no_traces_cannot_be_joined() -> None:
    with pytest.raises(ProfileError, match="no traces"):
        join([])


def test_a_path_may_be_a_text(tmp_path: Path) -> None:
    save_profile(str(tmp_path / "p"), PROFILE)
    assert load_profile(str(tmp_path / "p")).counts.tolist() == [[1, 1]]
