"""Engines that answer a workload: ours inside this process, or any server with `/completion`."""

from __future__ import annotations

import asyncio
import hashlib
import json
import urllib.request
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

import runtime
from bench.moe.share import serial_share, usage_of
from bench.moe.workloads import Workload
from runtime.errors import ConfigError, EngineBug

TIMEOUT_SECONDS = 3600.0


@dataclass(frozen=True)
class Answer:
    """What one workload took.

    md5       of the text: equal ones were made of the same tokens
    hit_rate  of the routed experts of all its tokens, where the engine tells it
    counts    of a generated token, experts of each layer by who served them; None: not known
    """

    n_prompt: int
    n_tokens: int
    prompt_seconds: float
    token_seconds: float
    md5: str
    hit_rate: float | None = None
    counts: list[list[float]] | None = None

    @property
    def prompt_rate(self) -> float:
        return self.n_prompt / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def token_rate(self) -> float:
        return 1 / self.token_seconds if self.token_seconds else 0.0


class Contender(Protocol):
    """One of the engines that are compared."""

    async def answer(self, workload: Workload) -> Answer:
        """Answer it, greedily, from an empty cache of prompts."""
        ...

    async def bound(self, answer: Answer) -> Mapping[str, object] | None:
        """What bounds a token of this answer, as far as it is known."""
        ...

    async def describe(self) -> Mapping[str, object]:
        """What it is and how it is set, for the record."""
        ...


class Embedded:
    """Ours, opened in this process."""

    def __init__(self, engine: runtime.Engine) -> None:
        self.engine = engine

    async def answer(self, workload: Workload) -> Answer:
        params = runtime.SamplingParams.greedy(max_tokens=workload.n_tokens, ignore_eos=True)
        text, timings, before = "", None, None
        async for token in self.engine.generate(workload.text, params, reuse_prefix=False):
            before = usage_of(self.engine) if before is None else before
            text += token.text
            timings = token.timings
        if timings is None:
            raise EngineBug("an answer ended without its timings")
        n_decoded, after = max(timings.predicted_n - 1, 1), usage_of(self.engine)
        counts = None
        if before is not None and after is not None:
            counts = ((after - before) / n_decoded).tolist()
        return Answer(
            timings.prompt_n,
            timings.predicted_n,
            timings.prompt_ms / 1e3,
            timings.predicted_ms / 1e3 / n_decoded,
            hashlib.md5(text.encode()).hexdigest(),
            timings.expert_hit_rate,
            counts,
        )

    async def bound(self, answer: Answer) -> Mapping[str, object] | None:
        """See `bench.moe.share`; None where all experts are in one place."""
        if answer.counts is None:
            return None
        counts, n_keys = np.array(answer.counts), answer.n_prompt + answer.n_tokens
        return await serial_share(self.engine, counts, n_keys, answer.token_seconds)

    async def describe(self) -> Mapping[str, object]:
        return {"engine": "embedded", **self.engine.executor.describe()}


class Server:
    """A server that is running: llama-server or ours, by its own form of completion."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    async def answer(self, workload: Workload) -> Answer:
        """Raises: OSError, ValueError where the server does not answer as llama-server does."""
        asked = {
            "prompt": workload.text,
            "n_predict": workload.n_tokens,
            "temperature": 0,
            "top_k": 1,
            "ignore_eos": True,
            "cache_prompt": False,
            "stream": False,
        }
        body = await asyncio.to_thread(self._ask, "/completion", asked)
        try:
            timings = body["timings"]
            return Answer(
                int(timings["prompt_n"]),
                int(timings["predicted_n"]),
                float(timings["prompt_ms"]) / 1e3,
                float(timings["predicted_per_token_ms"]) / 1e3,
                hashlib.md5(body["content"].encode()).hexdigest(),
            )
        except KeyError as error:
            raise ValueError(f"{self.url}/completion does not say {error}") from error

    async def bound(self, answer: Answer) -> Mapping[str, object] | None:
        """Not known: it is another process."""
        return None

    async def describe(self) -> Mapping[str, object]:
        props = await asyncio.to_thread(self._ask, "/props", None)
        names = ("build_info", "model_path", "total_slots", "hotexpert")
        return {"engine": self.url, **{name: props[name] for name in names if name in props}}

    def _ask(self, path: str, body: Mapping[str, object] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as reply:
            return json.load(reply)


async def open_contender(text: str, model: str | None, stack: AsyncExitStack) -> Contender:
    """`http://...`: a server; else ours with settings of EngineConfig as `name=value,...`.

    Raises: ConfigError, ModelError, DeviceError.
    """
    if text.startswith(("http://", "https://")):
        return Server(text)
    config = runtime.EngineConfig(model=model, **settings_in(text))
    return Embedded(await stack.enter_async_context(runtime.open_engine(config)))


def settings_in(text: str) -> dict[str, Any]:
    """`moe_expert_cache=16,vram_limit=22`.  Raises: ConfigError."""
    found: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if not equals or name not in runtime.EngineConfig.__dataclass_fields__ or name == "model":
            raise ConfigError(f"{part!r}: use a setting of EngineConfig and its value")
        for kind in (int, float, str):
            try:
                found[name] = kind(value)
                break
            except ValueError:
                continue
    return found
