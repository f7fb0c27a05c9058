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
    assert two["host_us"] >= 0 and len(two["token_us"]) == 2


def test_steps_count_from_the_last_streams_first_token_on() -> None:
    """The first one decodes alone for a while, then two tokens a second with the other."""
    early = streams.Stream(1.0, 0.6, [], [1.0, 1.1, 1.2, 2.0, 2.5, 3.0])
    late = streams.Stream(2.0, 0.5, [], [2.0, 2.5, 3.0, 3.1])
    assert streams.step_seconds([early, late]) == pytest.approx(0.5)
    assert streams.step_seconds([early]) == pytest.approx(0.4)
