"""Seconds from a server's process start until it listens, is ready, and has answered.

    python -m bench server_start model.gguf --runs 3 --flags="--moe-expert-cache 64" --out r.json

Every run is a process of its own. The phases are those that /health tells while it loads. The first
request is a short chat; the second one, alike but for a word, shows what of the first one's time
was still part of the start. The kernels are compiled, and the file is in the page cache, if a first
run is left out of account: `--warm 1` does that.
"""

from __future__ import annotations

import argparse
import json
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from bench.machine import machine

LOOK_SECONDS = 0.01
ANSWER_TOKENS = 16
WORDS = ("rivers", "bridges", "mountains")


def main(argv: list[str]) -> int:
    """Measure what the arguments ask for and write the result file if one is named."""
    parser = argparse.ArgumentParser(prog="python -m bench server_start", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--flags", default="", help="of the server")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--warm", type=int, default=1, help="runs before that do not count")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    runs = []
    for index in range(-args.warm, args.runs):
        found = one_start(args.model, shlex.split(args.flags))
        print(json.dumps({"run": index, **found}), flush=True)
        if index >= 0:
            runs.append(found)
    if args.out:
        settings = {k: str(v) for k, v in vars(args).items()}
        size = args.model.stat().st_size
        report = {"machine": machine(), "settings": settings, "file_bytes": size, "runs": runs}
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def one_start(model: Path, flags: list[str]) -> dict[str, Any]:
    """Seconds since the process was started; what the engine says of itself afterwards."""
    port = _free_port()
    command = [sys.executable, "-m", "runtime.server", "-m", str(model), "--port", str(port)]
    with tempfile.TemporaryFile("w+") as log:
        began = time.perf_counter()
        process = subprocess.Popen([*command, *flags], stdout=log, stderr=subprocess.STDOUT)
        try:
            try:
                found = _watched(process, port, began)
            except (OSError, RuntimeError) as error:
                log.seek(0)
                raise RuntimeError(f"{error}\n{log.read()[-3000:]}") from error
        finally:
            process.terminate()
            process.wait(30)
    return found


def _watched(process: subprocess.Popen[bytes], port: int, began: float) -> dict[str, Any]:
    phases: list[tuple[float, str]] = []
    listening = ready = None
    while ready is None:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}")
        time.sleep(LOOK_SECONDS)
        try:
            _get(port, "/health")
        except urllib.error.HTTPError as error:
            state = json.loads(error.read()).get("loading") or {}
            phase = str(state.get("phase"))
            if not phases or phases[-1][1] != phase:
                phases.append((round(time.perf_counter() - began, 3), phase))
        except OSError:
            continue
        else:
            ready = time.perf_counter() - began
        listening = listening or time.perf_counter() - began
    requests = [_ask(port, word) for word in WORDS]
    engine = _get(port, "/props").get("engine", {})
    wanted = ("device", "device_reason", "experts", "expert_pinned", "captured_graphs", "notices")
    return {
        "listening_s": round(listening or ready, 3),
        "ready_s": round(ready, 3),
        "first_token_s": round(ready + requests[0]["first_token_s"], 3),
        "requests": requests,
        "phases": phases,
        "engine": {name: engine.get(name) for name in wanted},
    }


def _ask(port: int, word: str) -> dict[str, Any]:
    """Seconds of a request, and until its first token."""
    body: dict[str, Any] = {"prompt": f"Tell me about {word}.", "n_predict": ANSWER_TOKENS}
    body |= {"ignore_eos": True, "temperature": 0, "return_tokens": True}
    began = time.perf_counter()
    answer = _get(port, "/completion", body)
    seconds = time.perf_counter() - began
    timings = answer["timings"]
    first = seconds - 1e-3 * timings["predicted_ms"]
    return {
        "seconds": round(seconds, 4),
        "first_token_s": round(first, 4),
        "ms_per_token": round(timings["predicted_per_token_ms"], 3),
        "ids": answer.get("tokens") or answer["content"],
    }


def _get(port: int, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=120) as answer:
        return json.loads(answer.read())


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
