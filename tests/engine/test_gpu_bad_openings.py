"""Opening on a bad day: the CPU, a smaller cache or a typed error, and nothing left open.

No kernel computes anything here: `StubKernels`.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from runtime.config import EngineConfig
from runtime.engine import placement
from runtime.engine.gpu import opening as opening_file
from runtime.engine.gpu.expert_opening import hold_experts
from runtime.engine.gpu.settings import MARGIN_BYTES
from runtime.errors import DeviceUnavailable, OutOfDeviceMemory
from runtime.progress import Progress
from tests.support.bad_gpu import BadDriver, bad_machine, config_of
from tests.support.block_models import BLOCK_MODELS
from tests.support.cuda_constants import CUresult


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bad")
    return BLOCK_MODELS["qwen3moe"]("Q8_0", 1).write(directory / "model.gguf")


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bad on two")
    return BLOCK_MODELS["qwen3moe"]("Q8_0", 2).write(directory / "model.gguf")


@pytest.fixture(scope="module")
def cubins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cubins")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, cubins: Path) -> BadDriver:
    return bad_machine(monkeypatch, cubins)


def open_and_close(config: EngineConfig) -> tuple[dict[str, object], str]:
    """What was opened, and why."""

    async def main() -> tuple[dict[str, object], str]:
        opened = await asyncio.to_thread(placement.open_placed, config, Progress())
        facts = {**opened.executor.describe(), "notices": opened.notices.describe()}
        await opened.close()
        return facts, opened.reason

    return asyncio.run(main())


def held(facts: dict[str, object]) -> tuple[object, object]:
    """Which experts are on the GPU, and whether they change."""
    return facts["experts"], facts.get("expert_swaps")


@pytest.mark.parametrize(
    ("cache", "n_gpus"),
    [(-1, 1), (2, 1), (2, 2)],
    ids=["resident", "hybrid", "hybrid on two"],
)
def test_every_allocation_that_fails_leads_to_the_cpu_or_a_smaller_cache(
    cache: int, n_gpus: int, path: Path, two_layers: Path, gpu: BadDriver
) -> None:
    gpu.n_devices = n_gpus
    path = path if n_gpus == 1 else two_layers
    config = config_of(path, "auto", moe_expert_cache=cache, split_mode="layer")
    open_and_close(config)  # which assembles
    gpu.sites.clear()
    facts, _ = open_and_close(config)
    assert facts["device"] == "cuda"
    assert len(facts.get("gpus", "1")) == n_gpus  # type: ignore[arg-type]
    whole = held(facts)
    sites = dict(gpu.sites)
    assert len(sites) > 20
    for site, n_calls in sites.items():
        for call in {0, n_calls // 2, max(n_calls - 3, 0)} if n_gpus == 1 else {n_calls - 1}:
            gpu.sites.clear()
            gpu.n_allocating, gpu.out_of_memory_at, gpu.failing = 0, None, (site, call)
            facts, reason = open_and_close(config)
            assert gpu.live == {}, site
            ends_capture = str(site[0]) == "cuStreamEndCapture"
            assert ends_capture or gpu.out_of_memory_at is not None, site  # it was reached
            if facts["device"] == "cuda":
                fewer = n_gpus > 1 and "gpus" not in facts
                early = site == ("cuDevicePrimaryCtxRetain",)  # asked for again when it is needed
                assert held(facts) != whole or facts["notices"] or fewer or early, site
                continue
            assert reason.startswith("cpu, because of cuda: "), site
            if site[0] != "cuDevicePrimaryCtxRetain":  # before that nothing is known
                assert re.search(r"\d+ bytes", reason), (site, reason)
            assert re.search(r"n_ctx|ulimit", reason), (site, reason)


def test_a_gpu_that_was_asked_for_fails_with_the_numbers(path: Path, gpu: BadDriver) -> None:
    gpu.fail["cuMemAlloc"] = CUresult["CUDA_ERROR_OUT_OF_MEMORY"]
    with pytest.raises(OutOfDeviceMemory, match=r"[1-9]\d+ bytes asked for, \d+ bytes free") as e:
        open_and_close(config_of(path))
    assert "n_ctx" in str(e.value) and "moe_expert_cache" in str(e.value)
    assert gpu.live == {}


@pytest.mark.parametrize("cache", [-1, 6], ids=["resident", "hybrid"])
def test_memory_that_others_take_meanwhile_makes_the_cache_smaller(
    cache: int,
    path: Path,
    gpu: BadDriver,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = config_of(path, moe_expert_cache=cache)
    facts, _ = open_and_close(config)
    whole = int(str(facts["expert_bytes"]))

    def taken(*args: Any) -> Any:
        share = args[2][0]
        gpu.memory_bytes -= share.device.free_bytes() - share.planned.activation_bytes
        gpu.memory_bytes += MARGIN_BYTES + whole // 2
        return hold_experts(*args)

    monkeypatch.setattr(opening_file, "hold_experts", taken)
    facts, _ = open_and_close(config)
    assert 0 < int(str(facts["expert_bytes"])) <= whole // 2
    assert "another process took memory of Fake GPU 0 meanwhile" in caplog.text
    assert gpu.live == {}


def test_a_gpu_without_a_driver_leaves_the_cpu(path: Path, gpu: BadDriver) -> None:
    gpu.n_devices = 0
    _, reason = open_and_close(config_of(path, "auto"))
    assert reason == (
        "cpu, because of cuda: no NVIDIA GPU is visible to this process; see CUDA_VISIBLE_DEVICES "
        "(CUDA_ERROR_NO_DEVICE)"
    )
    gpu.version = 11080
    _, reason = open_and_close(config_of(path, "auto"))
    assert "the NVIDIA driver is too old: it supports CUDA 11.8" in reason
    assert "\n" not in reason
    with pytest.raises(DeviceUnavailable, match="too old"):
        open_and_close(config_of(path))


def test_a_gpu_that_is_full_already_leaves_the_other(path: Path, gpu: BadDriver) -> None:
    gpu.n_devices = 2
    open_and_close(config_of(path))
    site = next(s for s in gpu.sites if s[0] == "cuDevicePrimaryCtxRetain")
    gpu.failing = (site, gpu.sites[site])
    facts, _ = open_and_close(config_of(path))
    assert facts["device"] == "cuda" and "gpus" not in facts
    assert gpu.live == {}
