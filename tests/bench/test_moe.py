"""`python -m bench moe`: engines side by side, ours and servers, and the texts compared."""

from __future__ import annotations

import hashlib
import json
import statistics
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest

from bench import moe
from bench.moe.engines import Answer, Server, open_contender, settings_in
from bench.moe.share import missed_layers
from bench.moe.workloads import Workload, workloads
from runtime.errors import ConfigError


class Completion(BaseHTTPRequestHandler):
    """Answers as llama-server does: every token takes 2 ms, every prompt token 1 ms."""

    asked: list[dict[str, object]] = []  # noqa: RUF012

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        n_prompt, n = len(body["prompt"].split()), body["n_predict"]
        timings = {"prompt_n": n_prompt, "predicted_n": n, "prompt_ms": n_prompt}
        self._send({"content": "x" * n, "timings": {**timings, "predicted_per_token_ms": 2.0}})

    def do_GET(self) -> None:
        self._send({"model_path": "m.gguf", "secret": "not for the record"})

    def _send(self, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def url() -> Iterator[str]:
    Completion.asked = []
    server = HTTPServer(("127.0.0.1", 0), Completion)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_engines_answer_in_turn_and_are_compared(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "result.json"
    engines = ["--engine", "ours=device=fake", "--engine", f"theirs={url}"]
    arguments = ["--workloads", "chat", "--rounds", "2", "--share", "0.02", "--out", str(out)]
    assert moe.main([*engines, *arguments]) == 0
    result = json.loads(out.read_text())
    ours, theirs = result["rows"]
    assert (ours["engine"], theirs["engine"], ours["tokens"]) == ("ours", "theirs", 30)
    assert ours["token_ratio"] == 1 and theirs["tokens_per_second"] == pytest.approx(500)
    pairs = zip(ours["answers"], theirs["answers"], strict=True)
    ratios = [a["token_seconds"] / b["token_seconds"] for a, b in pairs]
    assert theirs["token_ratio"] == pytest.approx(statistics.median(ratios))
    assert len(ours["answers"]) == len(theirs["answers"]) == 2
    assert result["engines"]["theirs"] == {"engine": url, "model_path": "m.gguf"}
    assert [asked["n_predict"] for asked in Completion.asked] == [3, 30, 30]
    assert all(asked["cache_prompt"] is False for asked in Completion.asked)
    assert "chat  theirs" in capsys.readouterr().out


async def test_a_server_s_answer_is_what_it_says(url: str) -> None:
    (chat, _) = workloads()
    answer = await Server(url).answer(chat.shortened(0.002))
    assert (answer.n_tokens, answer.token_rate, answer.prompt_rate) == (3, 500, 1000)
    assert answer.md5 == hashlib.md5(b"xxx").hexdigest()


def test_other_texts_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = iter("ab" * 20)

    async def answer(*_: object) -> Answer:
        return Answer(1, 1, 1.0, 1.0, next(texts))

    monkeypatch.setattr("bench.moe.engines.Embedded.answer", answer)
    arguments = ["--engine", "ours=device=fake", "--workloads", "code", "--rounds", "2"]
    assert moe.main(arguments) == 1


def test_the_workloads_are_what_they_are_called() -> None:
    chat, code = workloads()
    assert (chat.n_tokens, code.n_tokens) == (1500, 32)
    assert 40_000 < len(code.text) < 56_000, "about 12,000 tokens"
    assert code.shortened(0.5).n_tokens == 16


def test_settings_have_types_and_known_names() -> None:
    found = settings_in("moe_expert_cache=16,vram_limit=22.5,device=cuda")
    assert found == {"moe_expert_cache": 16, "vram_limit": 22.5, "device": "cuda"}
    for text in ("nothing=1", "n_ctx", "model=x"):
        with pytest.raises(ConfigError, match="use a setting"):
            settings_in(text)


async def test_the_bound_is_of_the_tokens_that_were_generated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two layers, two experts a token; the second layer misses one of them."""
    total = np.zeros((2, 5), np.int64)

    def used(*_: object) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        total[:] += [[0, 2, 0, 0, 0], [1, 1, 0, 0, 0]]
        return total.copy()

    asked = []

    async def share(_: object, counts: object, n_keys: int, seconds: float) -> dict[str, object]:
        asked.append((np.array(counts).tolist(), n_keys, seconds))
        return {"share_of_serial_bound": 0.5}

    monkeypatch.setattr("bench.moe.engines.usage_of", used)
    monkeypatch.setattr("bench.moe.engines.serial_share", share)
    async with AsyncExitStack() as stack:
        ours = await open_contender("device=fake", None, stack)
        answer = await ours.answer(Workload("short", "some words", 2))
        assert await ours.bound(answer) == {"share_of_serial_bound": 0.5}
    ((counts, n_keys, seconds),) = asked
    assert counts == [[0, 2, 0, 0, 0], [1, 1, 0, 0, 0]]
    assert (n_keys, seconds) == (answer.n_prompt + 2, answer.token_seconds)
    assert missed_layers(np.array(counts, np.float64)) == pytest.approx(0.75)
    assert await Server("http://localhost:1").bound(answer) is None
