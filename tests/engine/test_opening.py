"""Opening an engine: context sizes, progress, and models that lack a tokenizer."""

from __future__ import annotations

import asyncio
import gc
import io
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError
from contextlib import ExitStack, redirect_stderr
from dataclasses import replace
from typing import Any

import pytest

import runtime
from runtime.config import ContextShape, EngineConfig, context_shape
from runtime.engine import fake_model, opening, placement
from runtime.engine.placement import Opened, open_placed
from runtime.errors import CorruptModel
from tests.support.fake_engine import GREEDY, read

SHAPES = [
    (EngineConfig(), 4096, ContextShape(4096, 4, 4096)),
    (EngineConfig(), 131072, ContextShape(8192, 4, 8192)),
    (EngineConfig(n_ctx=1000), 4096, ContextShape(1000, 4, 1000)),
    (EngineConfig(n_ctx=1000, n_parallel=3), 4096, ContextShape(999, 3, 333)),
    (EngineConfig(n_parallel=2), 4096, ContextShape(8192, 2, 4096)),
    (EngineConfig(n_parallel=1, n_ctx=100), 4096, ContextShape(100, 1, 100)),
]


@pytest.mark.parametrize(("config", "n_ctx_train", "expected"), SHAPES)
def test_the_context_is_shared_or_split(
    config: EngineConfig, n_ctx_train: int, expected: ContextShape
) -> None:
    shape = context_shape(config, n_ctx_train)
    assert shape == expected
    assert shape.n_pages(32) * 32 >= shape.n_ctx


@pytest.mark.parametrize(
    ("field", "value"),
    [("n_ctx", 0), ("n_batch", True), ("n_threads", 1.5), ("cache_type_k", "q2"), ("device", "x")],
)
def test_impossible_settings_name_themselves(field: str, value: object) -> None:
    with pytest.raises(runtime.ConfigError, match=field):
        EngineConfig(**{field: value})


async def test_progress_ends_ready_and_the_engine_describes_itself() -> None:
    progress = runtime.Progress()
    assert progress.state.phase == "waiting"
    async with runtime.open_engine(EngineConfig(device="fake"), progress) as engine:
        assert progress.state.phase == "ready"
        facts = engine.describe()
    assert (facts["device"], facts["n_ctx"], facts["n_parallel"]) == ("fake", 4096, 4)


def test_progress_counts_and_bars_stay_out_of_files() -> None:
    out = io.StringIO()
    with redirect_stderr(out), runtime.ProgressBar() as progress:
        progress.start("loading", 4, "B")
        progress.advance(3)
        assert progress.state.fraction == 0.75
        progress.start("guessing")
        assert progress.state.fraction is None
    assert out.getvalue() == ""


async def test_without_a_tokenizer_ids_work_and_text_is_a_typed_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fake_model, "fake_metadata", dict)
    async with runtime.open_engine(EngineConfig(device="fake")) as engine:
        assert not engine.model.has_tokenizer
        tokens = await read(engine, [1, 2, 3], GREEDY(max_tokens=4))
        assert [token.text for token in tokens] == [""] * 4
        with pytest.raises(runtime.TokenizerUnavailable):
            await read(engine, "Hello")
        with pytest.raises(runtime.TemplateError):
            _ = engine.chat_template


@pytest.mark.parametrize(
    ("field", "value"), [("stop", ["x"]), ("logit_bias", [("x", 1.0)])], ids=["stop", "logit_bias"]
)
async def test_without_a_tokenizer_wishes_in_text_are_typed_errors(
    monkeypatch: pytest.MonkeyPatch, field: str, value: object
) -> None:
    monkeypatch.setattr(fake_model, "fake_metadata", dict)
    async with runtime.open_engine(EngineConfig(device="fake")) as engine:
        with pytest.raises(runtime.TokenizerUnavailable, match=field):
            await read(engine, [1, 2], GREEDY(max_tokens=4, **{field: value}))
        by_id = GREEDY(max_tokens=4, logit_bias=[(7, 100.0)])
        assert [token.id for token in await read(engine, [1, 2], by_id)] == [7] * 4


async def test_facts_of_a_model_print_in_a_few_lines() -> None:
    async with runtime.open_engine(EngineConfig()) as engine:
        assert len(repr(engine.model)) < 1000
        assert engine.model.name in repr(engine.model)


class SlowLoad:
    """An opening that stands still until it is let go; `ended` is set when its thread is done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, looks_up: bool) -> None:
        """looks_up: whether it reports progress before it ends."""
        self.began = threading.Event()
        self.go_on = threading.Event()
        self.ended = threading.Event()
        self.closed = threading.Event()
        self.error: BaseException | None = None
        self._looks_up = looks_up
        self._config = EngineConfig(device="fake")
        monkeypatch.setattr(opening, "open_placed", self._open)

    def _open(self, _: EngineConfig, progress: runtime.Progress) -> Opened:
        self.began.set()
        assert self.go_on.wait(10)
        with ExitStack() as resources:
            resources.callback(self.ended.set)
            if self._looks_up:
                try:
                    progress.advance()
                except BaseException as error:
                    self.error = error
                    raise
            opened = open_placed(self._config, runtime.Progress())
            opened.resources.callback(self.closed.set)
        return opened


@pytest.mark.parametrize("looks_up", [True, False])
async def test_a_cancelled_load_is_left_at_once_and_cleans_up(
    monkeypatch: pytest.MonkeyPatch, looks_up: bool
) -> None:
    load = SlowLoad(monkeypatch, looks_up=looks_up)

    async def use() -> None:
        async with runtime.open_engine(EngineConfig(device="fake")):
            raise AssertionError("the load cannot have ended")

    task = asyncio.create_task(use())
    assert await asyncio.to_thread(load.began.wait, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task  # while the thread stands still
    assert opening.left_behind()
    load.go_on.set()
    assert await asyncio.to_thread(load.ended.wait, 10)
    if looks_up:
        assert isinstance(load.error, CancelledError)
    else:
        assert await asyncio.to_thread(load.closed.wait, 10)


async def test_openings_that_overlap_leave_threads_their_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual, looks = sys.getswitchinterval(), gc.get_threshold()
    gates = {n: (threading.Event(), threading.Event()) for n in (300, 400)}

    def gated(config: EngineConfig, progress: runtime.Progress) -> Opened:
        began, go_on = gates[config.n_ctx or 0]
        began.set()
        assert go_on.wait(10)
        return open_placed(replace(config, n_ctx=None), progress)

    monkeypatch.setattr(opening, "open_placed", gated)
    openings = []
    for n, (began, _) in gates.items():
        config = EngineConfig(device="fake", n_ctx=n)
        openings.append(asyncio.create_task(opening.open_off_loop(config, runtime.Progress())))
        assert await asyncio.to_thread(began.wait, 10)
    assert sys.getswitchinterval() < usual and gc.get_threshold()[0] > looks[0]
    for task, (_, go_on) in zip(openings, gates.values(), strict=True):
        go_on.set()
        await (await task).close()
    assert sys.getswitchinterval() == usual and gc.get_threshold() == looks


def test_a_bad_vocabulary_ends_the_work_that_is_done_beside_its_reading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(_: object) -> None:
        raise CorruptModel("a.gguf", "tokenizer.ggml.merges: cannot be used")

    def endless(*given: Any) -> None:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            given[3].advance()

    monkeypatch.setattr(placement, "facts_of", refused)
    monkeypatch.setattr(placement, "DEVICES", {"cpu": endless})
    progress = runtime.Progress()
    with pytest.raises(CorruptModel, match="merges"):
        open_placed(EngineConfig(device="cpu"), progress)
    progress.advance()  # whoever shows it may open another model


async def test_settings_of_gpus_are_told_on_the_cpu() -> None:
    given: dict[str, Any] = {"moe_cache": (("policy", "lru"),), "vram_limit": 8.0}
    config = runtime.EngineConfig(device="cpu", n_ctx=64, n_threads=1)
    assert not config.given_for_gpus
    async with runtime.open_engine(replace(config, **given)) as engine:
        [notice] = engine.notices.all
    assert notice.reason == "no_effect"
    assert notice.text == "the CPU computes this model: vram_limit, moe_cache change nothing"


async def test_what_fails_to_open_raises_and_leaves_no_thread() -> None:
    with pytest.raises(runtime.ModelError):
        async with runtime.open_engine(EngineConfig(model="/nowhere.gguf")):
            pass
    for thread in threading.enumerate():
        if thread.name == opening.THREAD_NAME:
            thread.join(10)
    assert not opening.left_behind()


INTERRUPTED_LOAD = """
import os, signal, sys, time
from runtime.commands import main
from runtime.engine import opening

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

def open_placed(config, progress):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1000)

opening.open_placed = open_placed
sys.exit(main(["run", "--raw", "-p", "Hello"]))
"""


def test_ctrl_c_ends_the_program_while_a_thread_loads() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_LOAD], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 130, ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_ctx": 10**30}, "n_ctx = 10+: use a whole number of 2 to"),
        ({"n_ctx": 1}, "n_ctx = 1: use"),
        ({"n_parallel": 10**8}, "n_parallel"),
        ({"n_batch": 10**9}, "n_batch"),
        ({"moe_expert_cache": -2}, "moe_expert_cache = -2: use a whole number of -1 to"),
        ({"vram_limit": 0.0}, "vram_limit = 0.0: use GiB"),
        ({"n_ctx": 3, "n_parallel": 2}, "leaves 1 tokens a sequence: use n_ctx of at least 4"),
    ],
)
def test_absurd_sizes_are_refused_before_anything_is_opened(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(runtime.ConfigError, match=message):
        EngineConfig(**settings)


async def test_a_context_beyond_the_memory_names_what_would_fit() -> None:
    with pytest.raises(runtime.ConfigError, match=r"GiB of memory is available: use at most \d+"):
        async with runtime.open_engine(EngineConfig(n_ctx=1 << 30, n_threads=1)):
            pass
