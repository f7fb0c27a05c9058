"""`python -m bench streams` measures the engine it opens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import streams


def test_a_result_names_what_was_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LLAMA_MOE_CACHE_PROFILE", "0")
    out = tmp_path / "result.json"
    arguments = ["--device", "fake", "--streams", "1,2", "--prompt", "20", "--tokens", "5"]
    assert streams.main([*arguments, "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    one, two = result["rows"]
    assert (one["streams"], two["streams"]) == (1, 2)
    assert one["tokens"] == 5 and one["tokens_per_second"] > 0
    assert result["config"]["device"] == "fake"
    assert "  2 streams: prompt" in capsys.readouterr().out
