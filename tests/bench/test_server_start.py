"""How long servers take to start, of one that computes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import server_start
from runtime.config import BUNDLED_MODEL


def test_a_start_is_told_from_the_process_to_the_answer(tmp_path: Path) -> None:
    out = tmp_path / "start.json"
    args = [str(BUNDLED_MODEL), "--flags=--device fake", "--runs", "1", "--warm", "0"]
    assert server_start.main([*args, "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    (run,) = report["runs"]
    assert 0 < run["listening_s"] <= run["ready_s"] <= run["first_token_s"]
    assert run["engine"]["device"] == "fake"
    assert len(run["requests"]) == len(server_start.WORDS)
    assert all(len(request["ids"]) == server_start.ANSWER_TOKENS for request in run["requests"])
    assert report["file_bytes"] == BUNDLED_MODEL.stat().st_size


def test_a_server_that_ends_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="cannot be opened"):
        server_start.one_start(tmp_path / "none.gguf", ["--device", "fake"])
