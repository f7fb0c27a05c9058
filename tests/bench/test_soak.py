"""The soak: what it calls growth, that it finds wrong tokens and wrong bytes, whom it asks."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

import runtime
from bench import slot_check, soak
from bench.slot_check import GPUMemory, SlotCheck, cache_of, vram_for
from runtime.config import EngineConfig
from tests.support.bad_gpu import BadDriver, bad_machine
from tests.support.block_models import BLOCK_MODELS

SMALL = ["--device", "fake", "--minutes", "0.01", "--streams", "2", "--longest", "6"]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> BadDriver:
    fake = bad_machine(monkeypatch, tmp_path / "cubins")
    from runtime.cuda import driver

    monkeypatch.setattr(slot_check, "open_driver", driver.open_driver)
    return fake


def test_growth_is_of_what_is_there_after_the_warm_up() -> None:
    ram = [0.0, 5.0, *[10.0] * 6, 11.0, 11.0, 11.0]
    slots = [0.0, 0.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0]
    looks = [{"ram_mib": a, "slots_mib": b} for a, b in zip(ram, slots, strict=True)]
    assert soak.growth(looks, "ram_mib") == 1.0
    assert soak.growth(looks, "ram_mib", without_slots=True) == -1.0
    assert soak.growth(looks, "vram_mib") is None and soak.growth(looks[:7], "ram_mib") is None


def test_topics_have_words_of_their_own() -> None:
    work = soak.requests(1000, longest=40, answer=9, a_topic=3, seed=1)
    assert len(work) == 3 * soak.N_TOPICS
    words = [{w for r in work if r.topic == t for w in r.prompt} for t in range(soak.N_TOPICS)]
    assert all(len(w) <= 125 for w in words) and len(set.union(*words)) > 200
    assert all(r.params.max_tokens is not None and r.params.max_tokens < 9 for r in work)


def look_at_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake device has no driver that could be asked."""
    monkeypatch.setattr(GPUMemory, "__init__", lambda self: None)
    monkeypatch.setattr(GPUMemory, "__exit__", lambda *given: None)
    monkeypatch.setattr(GPUMemory, "taken", lambda self: 0)


def test_a_wrong_token_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look_at_no_gpu(monkeypatch)
    out = tmp_path / "soak.json"
    assert soak.main([*SMALL, "--answer", "9", "--out", str(out)]) == 0
    told = json.loads(out.read_text())
    assert told["answers"] > 0 and told["wrong"] == 0 and told["settings"]["streams"] == 2
    answer, n_asked = soak.answer, 0

    async def wrong_later(*given: object) -> list[int]:
        nonlocal n_asked
        n_asked += 1
        ids = await answer(*given)  # type: ignore[arg-type]
        return [-1, *ids[1:]] if n_asked > 8 * soak.N_TOPICS else ids

    monkeypatch.setattr(soak, "answer", wrong_later)
    assert soak.main([*SMALL, "--answer", "9", "--out", str(out)]) == 1
    assert json.loads(out.read_text())["wrong"] > 0


def test_a_run_that_is_stopped_has_told_what_it_saw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_at_no_gpu(monkeypatch)
    monkeypatch.setattr(soak, "LOOK_SECONDS", 0.1)
    out = tmp_path / "soak.json"
    look, n_looks = soak.memory, 0

    def stop(gpu: GPUMemory | None) -> dict[str, float]:
        nonlocal n_looks
        n_looks += 1
        if n_looks > 2:
            raise MemoryError("stopped")
        return look(gpu)

    monkeypatch.setattr(soak, "memory", stop)
    with pytest.raises(ExceptionGroup):
        soak.main([*SMALL, "--answer", "9", "--out", str(out)])
    told = json.loads(out.read_text())
    assert len(told["looks"]) == 2 and told["wrong"] == 0


async def test_a_wrong_byte_in_a_slot_is_found(fake: BadDriver, tmp_path: Path) -> None:
    path = BLOCK_MODELS["qwen3moe"]("Q8_0", 2).write(tmp_path / "model.gguf")
    config = EngineConfig(model=path, device="cuda", n_ctx=64, n_parallel=1, moe_expert_cache=3)
    async with runtime.open_engine(config) as engine:
        cache = cache_of(engine)
        assert cache is not None
        with SlotCheck(engine, cache) as check, GPUMemory() as memory:
            assert memory.taken() == sum(fake._get("memory", a).nbytes for a in fake._owners)
            assert await check.some(engine, 100, random.Random(1)) == (6, 0)
            assert await check.some(engine, 2, random.Random(1)) == (2, 0)
            [layer, expert] = next(zip(*(cache.cache.slot_of >= 0).nonzero(), strict=True))
            fake._span(int(cache.table()[layer, expert, 1]), 1)[0] ^= 4
            assert await check.some(engine, 100, random.Random(1)) == (6, 1)
            for n_experts in (5, 0, 2):
                await engine.resize(vram_for(engine, n_experts))
                assert (cache.cache.slot_of >= 0).sum(axis=1).tolist() == [n_experts] * 2
                assert await check.some(engine, 100, random.Random(1)) == (2 * n_experts, 0)
    assert fake.live == {}


async def test_an_engine_without_a_cache_has_no_slots() -> None:
    async with runtime.open_engine(EngineConfig(device="fake")) as engine:
        assert cache_of(engine) is None
