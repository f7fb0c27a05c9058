"""The recorded rows say what they are rows of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.results import __main__ as results

ALWAYS = {"kernel", "format", "shape", "launch", "bits_equal", "compared"}
ALWAYS |= {"text_hash", "device", "driver", "date"}
TIMED = {"experts", "us", "us_p5", "us_p95", "gbs", "read_us"}


def test_rows_are_complete() -> None:
    for row in results.rows():
        assert set(row) in (ALWAYS, ALWAYS | TIMED), row
        assert len(row["text_hash"]) == 64


def test_a_changed_or_unequal_text_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [name for name, _ in results.kernels()]
    (first, kernel), (second, other) = list(results.kernels())[:2]
    rows = [
        {"text_hash": kernel.text_hash, "bits_equal": True},
        {"text_hash": other.text_hash, "bits_equal": False},
    ]
    (tmp_path / "gpu.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    missing = results.missing()
    assert first not in missing and second in missing
    assert len(missing) == len(names) - 1
