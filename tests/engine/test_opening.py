"""Opening an engine: context sizes, progress, and models that lack a tokenizer."""

from __future__ import annotations

import io
from contextlib import redirect_stderr

import pytest

import runtime
from runtime.config import ContextShape, EngineConfig, context_shape
from runtime.engine import fake_model
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
