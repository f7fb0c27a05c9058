"""The recorded rows say what they are rows of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ops.gpu.catalog import every_kernel
from tests.results import __main__ as results

FIELDS = {"kernel", "case", "passed", "compared", "max_error"}
FIELDS |= {"proof_hash", "device", "driver", "date"}


def test_rows_are_complete() -> None:
    for row in results.rows():
        assert set(row) == FIELDS, row
        assert len(row["proof_hash"]) == 64


def test_a_changed_or_failing_kernel_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = list(every_kernel())
    (first, kernel), (second, other) = kernels[:2]
    rows = [
        {"proof_hash": kernel.proof_hash, "passed": True},
        {"proof_hash": other.proof_hash, "passed": False},
    ]
    (tmp_path / "gpu.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    missing = results.missing()
    assert first not in missing and second in missing
    assert len(missing) == len(kernels) - 1
