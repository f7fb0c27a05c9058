"""Planning: what would be allocated and chosen, without opening; and that opening follows it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.commands import main
from runtime.config import EngineConfig
from runtime.cuda.driver import initialized
from runtime.cuda.module import CubinCache
from runtime.engine import proposals as proposals_file
from runtime.engine.gpu.expert_plan import (
    Holding,
    MoeLayer,
    expected_hits,
    moe_layers_of,
    predicted_us,
    some_experts,
    whole_layer_slots,
)
from runtime.engine.gpu.gpu_plan import GPUPlan, plan_gpus
from runtime.engine.gpu.opening import open_gpu_executor
from runtime.engine.gpu.settings import MARGIN_BYTES, GPUSettings
from runtime.engine.machine import GPUFacts, MachineFacts, described_gpus, gibibytes, numbered
from runtime.engine.memory_plan import MemoryPlan
from runtime.engine.open_engine import open_engine
from runtime.engine.planning import plan_engine
from runtime.engine.proposals import gpu_proposals
from runtime.errors import ConfigError, DeviceUnavailable
from runtime.experts.known_use import KnownUse
from runtime.models import Model, open_model
from runtime.models.spec import MoeSpec
from runtime.progress import Progress
from tests.support.block_models import BLOCK_MODELS
from tests.support.fake_driver import FakeDriver
from tests.support.tiny_models import TINY_MODELS

SETTINGS = GPUSettings(n_ctx=256, max_sequences=2, max_step_tokens=4, exchange_rounds=0)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("plan")
    return BLOCK_MODELS["qwen3moe"]("Q8_0", 2).write(directory / "model.gguf")


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Model]:
    with open_model(path) as model:
        yield model


def gpus(*free: int) -> tuple[GPUFacts, ...]:
    [gpu] = described_gpus("RTX 3090")
    return numbered([replace(gpu, free_bytes=n) for n in free])


def plan(model: Model, *free: int, **settings: Any) -> GPUPlan:
    return plan_gpus(model, [replace(SETTINGS, **settings)], gpus(*free))


def needed(model: Model) -> int:
    """Bytes that a GPU needs for the whole model."""
    share = plan(model, 1 << 30).shares[0]
    return share.dense_bytes + share.expert_bytes + MARGIN_BYTES


def test_one_gpu_that_holds_the_model_computes_it_alone(model: Model) -> None:
    enough = needed(model)
    alone = plan(model, enough, enough + 1)
    assert [share.gpu.info.index for share in alone.shares] == [0]
    assert plan(model, enough - 1, enough).shares[0].gpu.info.index == 1
    both = plan(model, enough - 1, enough - 1)
    assert len(both.shares) == 2
    assert "no single one" in both.reason
    for settings in ({"split": True}, {"tensor_split": (1.0, 3.0)}):
        asked = plan(model, enough, enough, **settings)
        assert len(asked.shares) == 2 and asked.reason == "asked for"


def test_experts_the_user_limits_are_no_whole_model(model: Model) -> None:
    assert len(plan(model, 1 << 30, 1 << 30, moe_expert_cache=2).shares) == 2
    assert plan(model, 1 << 30, moe_expert_cache=2).experts[0].slots == (2, 2)


def test_the_first_settings_that_suit_are_chosen(model: Model) -> None:
    proposed = [replace(SETTINGS, n_ctx=n) for n in (1 << 20, 4096, 256)]
    exact = plan(model, 1 << 30, n_ctx=4096).shares[0]
    free = exact.dense_bytes + MARGIN_BYTES + exact.expert_bytes
    assert plan_gpus(model, proposed, gpus(free)).settings is proposed[1]
    with pytest.raises(DeviceUnavailable, match="do not fit"):
        plan_gpus(model, proposed, gpus(MARGIN_BYTES))


def test_long_contexts_are_only_chosen_where_they_are_cheap(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    page_bytes = plan(model, 1 << 30).shares[0].pages.sizes.page_bytes
    kv_bytes = page_bytes * 32768 // 32
    monkeypatch.setattr(proposals_file, "LONG_SHARE", kv_bytes / 2**30)
    for free, n_ctx in ((1 << 30, 32768), (3 << 28, 16384), ((1 << 29) - 1, 8192)):
        proposals = gpu_proposals(EngineConfig(), 1 << 18)
        chosen = plan_gpus(model, [p.settings for p in proposals], gpus(free))
        assert chosen.settings.n_ctx == n_ctx
    given = gpu_proposals(EngineConfig(n_ctx=100, n_batch=7), 1 << 18)
    assert [(p.settings.n_ctx, p.settings.max_step_tokens) for p in given] == [(128, 7)]


def open_facts(model: Model, tmp_path: Path, fake: FakeDriver, settings: GPUSettings) -> Any:
    """What was planned when it was really opened, what is there, and bytes that it held."""

    async def run() -> Any:
        executor = await asyncio.to_thread(
            open_gpu_executor,
            model,
            settings,
            Progress(),
            driver=initialized(fake, "13.4.4"),
            cache=CubinCache(tmp_path),
        )
        held = sum(fake._get("memory", handle).nbytes for handle in fake._owners)
        facts = executor.describe()
        await executor.close()
        return executor.planned, facts, held

    return asyncio.run(run())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("part", [0.3, 0.9, 1.0])
def test_the_real_opening_follows_the_plan(model: Model, tmp_path: Path, part: float) -> None:
    exact = plan(model, 1 << 30).shares[0]
    limit = exact.dense_bytes + MARGIN_BYTES + int(exact.expert_bytes * part)
    settings = replace(SETTINGS, vram_limit=limit, n_threads=1)
    fake = FakeDriver(memory_bytes=1 << 30)
    planned, facts, held = open_facts(model, tmp_path, fake, settings)
    [share] = planned.shares
    assert facts["weights_bytes"] == share.weights.n_bytes
    assert facts["kv_bytes"] == share.pages.n_bytes
    assert facts["expert_bytes"] == planned.experts[0].n_bytes
    assert facts["activation_bytes"] >= share.activation_bytes
    alone = plan_gpus(model, [settings], [GPUFacts(share.gpu.info, 1 << 30)])
    assert alone.experts == planned.experts
    assert alone.shares[0].dense_bytes == share.dense_bytes
    assert held <= limit


def layers(model: Model, n: int = 8) -> list[MoeLayer]:
    """Of a model with n like the first one."""
    block = model.spec.layers[0].feed_forward
    assert isinstance(block, MoeSpec)
    return moe_layers_of(model.weights, [block] * n)


def test_whole_layers_fill_the_room_one_after_the_other(model: Model) -> None:
    parts = layers(model, 3)
    slot, n_expert = parts[0].experts.slot_bytes, parts[0].experts.n_expert
    assert whole_layer_slots(parts, 0) == (0, 0, 0)
    assert whole_layer_slots(parts, slot * (n_expert + 2)) == (n_expert, 2, 0)
    assert whole_layer_slots(parts, slot * n_expert * 9) == (n_expert,) * 3


def test_what_is_predicted_quicker_is_planned(model: Model) -> None:
    """At every residency: no plan is slower than whole layers, by prediction."""
    parts = layers(model, 24)
    whole_bytes = sum(p.experts.slot_bytes * p.experts.n_expert for p in parts)
    held: set[Holding] = set()
    for percent in range(2, 100):
        room = whole_bytes * percent // 100
        [chosen] = some_experts([parts], [room], SETTINGS)
        held.add(chosen.holding)
        assert 0 < chosen.n_bytes <= room
        is_whole = chosen.holding is Holding.LAYERS
        shares = [n / p.experts.n_expert for n, p in zip(chosen.slots, parts, strict=True)]
        hits = shares if is_whole else expected_hits(parts, chosen.slots, None)
        time = predicted_us(parts, hits, swaps=not is_whole, whole=is_whole)
        whole = whole_layer_slots(parts, room)
        shares = [n / p.experts.n_expert for n, p in zip(whole, parts, strict=True)]
        assert time <= predicted_us(parts, shares, whole=True) * 1.0001
    assert held == {Holding.CACHE, Holding.LAYERS}


def test_known_uses_make_even_few_slots_pay(model: Model) -> None:
    parts = layers(model, 4)
    n_expert = parts[0].experts.n_expert
    room = sum(p.experts.slot_bytes for p in parts)
    uses = np.zeros((4, n_expert), np.int64)
    uses[:, 3] = 100
    uses[:, 5] = 1
    [unknown] = some_experts([parts], [room], SETTINGS)
    [known] = some_experts([parts], [room], SETTINGS, known=[KnownUse(uses)])
    assert unknown.holding is Holding.LAYERS
    assert known.holding is Holding.CACHE


def test_what_a_cache_served_corrects_what_is_expected(model: Model) -> None:
    parts = layers(model, 3)
    n_expert = parts[0].experts.n_expert
    half, most = [n_expert // 2] * 3, [n_expert * 3 // 4] * 3
    uses = np.ones((3, n_expert), np.int64)
    ruled = expected_hits(parts, half, KnownUse(uses))
    assert ruled == expected_hits(parts, half, None)
    for rate in (0.95, ruled[0], 0.5):
        known = KnownUse(uses, (0.5, rate))
        assert expected_hits(parts, half, known) == pytest.approx([rate] * 3)
        (more, *_) = expected_hits(parts, most, known)
        assert rate < more < 1.0 and (more > expected_hits(parts, most, None)[0]) == (
            rate > ruled[0]
        )
    for served in ((0.0, 0.5), (1.0, 0.5)):  # no cache, or one that cannot miss
        assert expected_hits(parts, half, KnownUse(uses, served)) == ruled
    assert min(expected_hits(parts, half, KnownUse(uses, (0.5, 0.0)))) > 0.0
    assert KnownUse(uses, (0.5, 0.25)).part(slice(1, 3)).served == (0.5, 0.25)


def test_whole_layers_or_a_cache_may_be_asked_for(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = layers(model, 4)
    room = sum(p.experts.slot_bytes for p in parts) * 5
    for mode, holding in (("layers", Holding.LAYERS), ("cache", Holding.CACHE)):
        asked = replace(SETTINGS, moe_cache=(("mode", mode),))
        [chosen] = some_experts([parts], [room], asked)
        assert (chosen.holding, chosen.reason) == (holding, "asked for")
    monkeypatch.setenv("LLAMA_MOE_AUTO_MODE", "stock")
    assert some_experts([parts], [room], SETTINGS)[0].holding is Holding.LAYERS
    monkeypatch.setenv("LLAMA_MOE_AUTO_MODE", "best")
    with pytest.raises(ConfigError, match="best"):
        some_experts([parts], [room], SETTINGS)


def memory_plan(path: Path, machine: MachineFacts, **config: Any) -> MemoryPlan:
    with open_model(path) as model:
        return plan_engine(model, EngineConfig(model=path, **config), machine)


def test_machines_without_a_gpu_that_can_get_the_reason(tmp_path: Path) -> None:
    path = TINY_MODELS["llama_dense"]().write(tmp_path / "model.gguf")
    machine = MachineFacts((), 1 << 30, 4)
    found = memory_plan(path, machine)
    assert (found.device, found.gpus) == ("cpu", ())
    assert found.choices[0].reason == "there is no GPU"
    with pytest.raises(DeviceUnavailable):
        memory_plan(path, machine, device="cuda")
    small = replace(machine, gpus=gpus(MARGIN_BYTES))
    assert "do not fit" in memory_plan(path, small).choices[0].reason
    model, *others = found.host
    held = sum(part.n_bytes for part in others)
    some = list(replace(found, ram_bytes=held + model.n_bytes // 2).lines())
    assert any("do not fit: read from" in line for line in some)
    few = "\n".join(replace(found, ram_bytes=held - 9).lines())
    assert "will not start" in few and "read from" not in few


def test_a_plan_is_one_screen_and_json(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(path), "--gpu", "RTX 3090:1.1GiB x2", "--ram", "64GiB", "--cores", "12"]
    assert main(["plan", *words, "-sm", "layer"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 40
    text = "\n".join(lines)
    assert "GPU 0: RTX 3090, layers 0 to 0" in text and "GPU 1: RTX 3090, layers 1 to 1" in text
    assert "CPU workers     none" in text and "64.00 GiB to use" in text
    assert main(["plan", *words, "--moe-expert-cache", "3", "--moe", "policy=lru"]) == 0
    text = capsys.readouterr().out
    assert "CPU workers     10" in text and "cache: 3 a layer" in text
    assert "policy          lru                        asked for" in text
    assert main(["plan", *words, "-c", "512", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["device"] == "cuda" and len(found["gpus"]) == 1
    [gpu] = found["gpus"]
    assert gpu["spare_bytes"] == gpu["usable_bytes"] - sum(p["n_bytes"] for p in gpu["parts"])
    context = next(choice for choice in found["choices"] if choice["name"] == "context")
    assert (context["value"], context["reason"]) == ("512 tokens", "asked for")


@pytest.mark.parametrize("text", ["", "RTX 1", "x2", "24GiB:RTX", "RTX 3090:x"])
def test_gpus_nobody_understands_are_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match="--gpu"):
        described_gpus(text)


def test_described_gpus() -> None:
    pair = described_gpus("NVIDIA GeForce RTX 4090 x2")
    assert [gpu.info.memory_bytes for gpu in pair] == [24 << 30] * 2
    assert pair[0].info.capability == (8, 9)
    [other] = described_gpus("My card: 7.5 GiB")
    assert (other.info.name, other.info.memory_bytes) == ("My card", int(7.5 * 2**30))
    assert described_gpus("16GiB x3")[2].info.memory_bytes == 16 << 30
    assert gibibytes("64") == 64 << 30
    with pytest.raises(ConfigError):
        gibibytes("many")


async def test_an_open_engine_shows_the_plan_that_it_followed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    config = EngineConfig(device="cpu", n_ctx=64, n_threads=1)
    async with open_engine(config) as engine:
        facts: Any = engine.describe()
        assert engine.plan is not None
        parts = {part.name: part.n_bytes for part in engine.plan.host}
        assert parts["keys and values"] == facts["kv_bytes"]
        assert parts["activations"] == facts["activation_bytes"]
        assert facts["plan"]["context"] == "64 tokens (asked for)"
        assert "keys and values" in facts["plan"]["memory"]["RAM"]
    assert all(line in caplog.text for line in engine.plan.lines())
