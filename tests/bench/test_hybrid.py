"""`python -m bench hybrid` and `agree`: what they reckon, and whole runs on the CPU."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import agree, hybrid
from bench.bounds import Rates, TokenWork, overlapped_seconds, serial_seconds
from bench.residency import experts_of, limit_of
from bench.runs import Run, config_of, recorded_ids, run_of
from bench.synthetic import MODELS, sketch_of, write_model
from bench.whole_model import held
from runtime.engine.step import StepKind
from runtime.models import open_model
from runtime.models.sizes import model_sizes
from tests.bench.test_shapes import small

RATES = Rates(gpu=4e12, host=1e11, link=5e10)


def test_bounds_are_those_of_the_slower_side() -> None:
    work = TokenWork(4e9, 1e9, 2e9, n_layers=40, missed_layers=30)
    overhead = 30 * 4.4e-6 + 40 * 5.5e-6
    assert serial_seconds(work, RATES) == pytest.approx(0.5e-3 + 10e-3 + overhead)
    assert overlapped_seconds(work, RATES) == pytest.approx(10e-3)
    hits = TokenWork(4e9, 0, 2e9, n_layers=40, missed_layers=0)
    assert serial_seconds(hits, RATES) == pytest.approx(1.5e-3 + 40 * 5.5e-6)
    dense = TokenWork(0, 0, 2e9, n_layers=40, missed_layers=0)
    unmeasured = replace(RATES, host=0.0)
    assert serial_seconds(dense, unmeasured) == pytest.approx(0.5e-3 + 40 * 5.5e-6)
    assert overlapped_seconds(dense, unmeasured) == pytest.approx(0.5e-3 + 40 * 5.5e-6)


@pytest.mark.parametrize("name", ["glm-5.3-flash", "qwen3.8-flash-next"])
def test_slots_fill_the_memory_that_is_left(name: str) -> None:
    shape: Any = MODELS[name]
    sketch = sketch_of(shape, shape.n_layers)
    experts = sketch.bytes_of("_exps.weight")
    rest = sketch.n_bytes - sketch.bytes_of("per_layer_token_embd.weight") - experts
    for limit in (22.0, 44.0):
        found = held(shape, limit, 4416)
        taken = rest + found.slots / shape.n_expert * experts + found.fetch_bytes
        assert 0.7 * limit < taken / 2**30 < limit - 0.5, found


def test_a_token_reads_what_it_hits_and_misses(tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", small("qwen3-30b-a3b"), 2, 0.5)
    with open_model(tmp_path / "model.gguf") as model:
        sizes = model_sizes(model.spec, model.file.tensors)
    each = sizes.layers[0].expert_bytes, sizes.layers[1].expert_bytes
    counts = np.array([[2.0, 6.0, 0, 0, 0], [0.0, 8.0, 0, 0, 0]])
    work = hybrid.token_work(sizes, counts, 1.0, n_keys=0)
    assert work.missed_bytes == 2 * each[0] and work.hit_bytes == 6 * each[0] + 8 * each[1]
    assert work.rest_bytes == sizes.dense_bytes
    everything = hybrid.token_work(sizes, counts[:0], 0.0, n_keys=10)
    assert everything.hit_bytes == 8 * sum(each) and everything.missed_bytes == 0
    assert everything.rest_bytes > sizes.dense_bytes


def test_forced_tokens_repeat_as_the_text_does() -> None:
    ids = recorded_ids(4000, 1000)
    assert ids.max() < 1000 and 200 < len(set(ids.tolist())) < 800
    assert np.array_equal(ids[:50], recorded_ids(50, 1000))


async def test_steps_know_what_lies_before_them(tmp_path: Path) -> None:
    """Sequences keep to their pages and slots; models with a table see the tokens before."""
    write_model(tmp_path / "model.gguf", small("qwen3.8-flash-next"), 2, 0.5)
    async with run_of(tmp_path / "model.gguf", "fake", 2, 40) as run:
        text = recorded_ids(40, run.limits.n_vocab)
        step = run.step(StepKind.DECODE, [(0, text, 7, 8), (1, text, 0, 1)])
        assert step.previous_tokens is not None and step.state_slots is not None
        assert step.previous_tokens.tolist() == [[text[6], text[5]], [-1, -1]]
        assert step.state_slots.tolist() == [0, 1]
        assert not set(step.page_tables[0]) & set(step.page_tables[1])
        assert len(await run.prompt(0, text, 0, 40)) == 1


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of a GPU is computed by the CPU."""

    @asynccontextmanager
    async def run_there(
        model: Path, device: str, *sizes: int, **settings: Any
    ) -> AsyncIterator[Run]:
        settings["n_threads"] = 2
        async with run_of(model, "cpu", *sizes, **settings) as run:
            yield run

    monkeypatch.setattr(agree, "run_of", run_there)


@pytest.mark.usefixtures("on_the_cpu")
def test_a_comparison_says_what_agrees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(agree, "MODELS", {"tiny": small("qwen3-30b-a3b")})
    out = tmp_path / "out.json"
    arguments = ["tiny:2:F32:8", "nothing.gguf", "--prompt", "12", "--tokens", "3"]
    assert agree.main([*arguments, "--folder", str(tmp_path), "--out", str(out)]) == 1
    tiny, nothing = json.loads(out.read_text())["rows"]
    assert tiny["same_bits"] and tiny["largest_error"] == 0
    assert 0 < tiny["median_of_cpu_with_f32_cache"] < 1e-2
    assert tiny["tokens_within_tolerance"] == "4 of 4"
    assert tiny["routing"] is None, "nothing is missed"
    routing = tiny["routing_of_cpu_with_f32_cache"]
    assert routing["choices"] == 2 * (12 + 3) - 11, "the last layer has outputs alone"
    assert "nothing.gguf" in nothing["error"]
    assert (tmp_path / "tiny-2-F32-8.gguf").exists()
    assert "tiny:2:F32:8" in capsys.readouterr().out


@pytest.mark.usefixtures("on_the_cpu")
async def test_other_bits_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "model.gguf", small("olmoe"), 1, 0.5)
    real = agree._logits

    async def changed(*args: Any, **kw: Any) -> Any:
        logits = await real(*args, **kw)
        return logits if not kw.get("pair") else np.nextafter(logits, np.float32(9))

    monkeypatch.setattr(agree, "_logits", changed)
    row = await agree.compare(tmp_path / "model.gguf", 6, 1, [], 2)
    assert not row["same_bits"] and row["bits"] == {"whole": True, "cut": True, "pair": False}


def test_a_part_of_a_model_stands_for_the_whole(tmp_path: Path) -> None:
    """3 of 48 layers, and an output matrix that is read once either way."""
    write_model(tmp_path / "model.gguf", small("qwen3-30b-a3b"), 3, 0.5)
    with open_model(tmp_path / "model.gguf") as model:
        sizes = model_sizes(model.spec, model.file.tensors)
    rates = Rates(gpu=sizes.output_bytes / 100e-6, host=1e9, link=1e9)
    counts = np.tile([1.0, 7.0, 0, 0, 0], (3, 1))
    found = hybrid.Measured(
        1.0, [2.0, 1.0], [400.0, 390.0, 410.0], counts, 3.0, {}, sizes, rates, {}, [500.0]
    )
    row = hybrid.speeds(found, "qwen3-30b-a3b", 480)
    assert row["tokens_per_second"] == 2500 and row["layers"] == "3 of 48"
    assert row["whole_model_tokens_per_second"] == round(1e6 / (100 + 300 * 16), 2)
    assert row["prompt_tokens_per_second"] == [240, 480]
    assert row["whole_model_prompt_tokens_per_second"] == 30
    share = hybrid.shares(replace(found, rates=Rates(gpu=1e15, host=1e9, link=1e9)), 10)
    assert share["hit_rate"] == 0.875
    missed = sum(layer.expert_bytes for layer in sizes.layers)
    assert share["share_of_overlapped_bound"] == round(missed / 1e9 / 400e-6, 3)


def test_a_residency_is_room_for_so_many_experts(tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", small("qwen3-30b-a3b"), 4, 0.5)
    with open_model(tmp_path / "model.gguf") as model:
        sizes = model_sizes(model.spec, model.file.tensors)
        n_expert = model.spec.n_expert_max
    layers = (("mode", "layers"),)
    config = config_of(tmp_path / "model.gguf", "cuda", 1, 64, n_batch=8, moe_cache=layers)
    limits = [limit_of(config, percent) for percent in (0, 25, 75)]
    experts = n_expert * sum(layer.expert_bytes for layer in sizes.layers) / 2**30
    assert limits[2] - limits[1] == pytest.approx(experts / 2, rel=0.05)
    assert limits[1] - limits[0] == pytest.approx(experts / 4, rel=0.05)
    found = experts_of(replace(config, vram_limit=limits[1]))
    assert str(found.holding) in ("layers", "all") and found.slots[0] == n_expert
