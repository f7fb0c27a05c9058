"""`python -m bench cache_calls`: the cache does its work, and its calls are timed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import cache_calls


@pytest.mark.parametrize("cold", [False, True])
def test_calls_are_timed(cold: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_calls, "WARM_TOKENS", 10)
    monkeypatch.setattr(cache_calls, "TRASH_BYTES", 1 << 12)
    out = tmp_path / "result.json"
    arguments = ["--layers", "3", "--uploads", "2", "--tokens", "60", "--repeats", "2"]
    given = [*arguments, *(["--cold"] if cold else []), "--out", str(out)]
    assert cache_calls.main(given) == 0
    report = json.loads(out.read_text())
    assert len(report["rows"]) == 2 and report["settings"]["layers"] == "3"
    for row in report["rows"]:
        assert 0 < row["uploads_a_token"] <= 2 and 0.3 < row["hit_rate"] < 1
        assert row["least"] <= row["together"] and min(row[name] for name in cache_calls.CALLS) > 0
