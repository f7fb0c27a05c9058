"""Whatever is not as its user would expect is told: by the GPU's opening, and by its self-check."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from runtime.engine.gpu import step_watch, transfer
from runtime.engine.gpu.expected_hits import expected_hit_rate
from runtime.engine.gpu.expert_opening import _tell_still
from runtime.engine.gpu.expert_plan import ExpertPlan, Holding
from runtime.engine.gpu.settings import GPUSettings
from runtime.engine.open_engine import open_engine
from runtime.engine.params import SamplingParams
from runtime.models import open_model
from runtime.notices import Notices, Reason
from tests.engine.test_gpu_executor import executor_of
from tests.support.bad_gpu import bad_machine, config_of
from tests.support.block_models import BLOCK_MODELS
from tests.support.cuda_constants import CUresult
from tests.support.fake_driver import Failure
from tests.support.stub_kernels import StubKernels

ALL, SOME = 8, 3


def small_model(tmp_path: Path) -> Path:
    return BLOCK_MODELS["qwen3moe"]("Q8_0", 1).write(tmp_path / "model.gguf")


@pytest.mark.parametrize(("expected", "told"), [(0.9, True), (0.02, False)])
async def test_an_engine_says_once_that_fewer_experts_hit_than_expected(
    expected: float, told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is on the GPU, so nothing hits."""
    monkeypatch.setattr(step_watch, "expected_hit_rate", lambda plan: expected)
    fake = bad_machine(monkeypatch, tmp_path / "cubins")
    fake.kernels = StubKernels()
    params = SamplingParams(temperature=0.0, max_tokens=140, ignore_eos=True)
    async with open_engine(config_of(small_model(tmp_path), moe_expert_cache=0)) as engine:
        assert not engine.notices.totals[Reason.FEWER_HITS]
        async for token in engine.generate([5, 7], params):
            last = token
        reasons = [notice for notice in engine.notices.all if notice.reason is Reason.FEWER_HITS]
        assert [notice.count for notice in reasons] == [1] * told
        assert all("90.0 % were expected" in notice.text for notice in reasons)
        assert engine.describe()["notices"] == engine.notices.describe()
    assert last.timings is not None
    assert last.timings.expert_hit_rate == 0
    assert last.timings.expert_miss_bytes is not None and last.timings.expert_miss_bytes > 0


async def test_weights_that_go_by_way_of_buffers_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver registers its own buffers, and would not the file's pages."""
    fake = bad_machine(monkeypatch, tmp_path / "cubins")
    monkeypatch.setattr(transfer, "LEAST_MAPPED_BYTES", 1 << 12)
    register = fake._cuMemHostRegister

    def refuse(address: int, n_bytes: int, flags: int) -> None:
        if flags & fake.CU_MEMHOSTREGISTER_READ_ONLY:
            raise Failure("HOST_MEMORY_ALREADY_REGISTERED")
        register(address, n_bytes, flags)

    for refuses in (True, False):
        if refuses:
            monkeypatch.setattr(fake, "_cuMemHostRegister", refuse)
        else:
            monkeypatch.setattr(fake, "_cuMemHostRegister", register)
        async with open_engine(config_of(small_model(tmp_path))) as engine:
            told = [n.text for n in engine.notices.all if n.reason is Reason.UNPINNED]
        assert len(told) == refuses and all("by way of buffers" in text for text in told)


@pytest.mark.parametrize(("held", "count"), [(ALL, 2), (SOME, 2)])
async def test_a_driver_that_takes_no_batch_of_copies_is_told(
    held: int, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By those who load what is not an expert, then by those who load all experts, or some."""
    fake = bad_machine(monkeypatch, tmp_path / "cubins")
    fake.kernels = StubKernels()
    fake.fail["cuMemcpyBatchAsync"] = CUresult["CUDA_ERROR_INVALID_VALUE"]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    async with open_engine(config_of(small_model(tmp_path), moe_expert_cache=held)) as engine:
        async for _ in engine.generate([5, 7], params):
            pass
        told = [n for n in engine.notices.all if n.reason is Reason.SLOW_UPLOADS]
    assert [notice.count for notice in told] == [count]
    assert "INVALID_VALUE" in told[0].text


@pytest.mark.parametrize("held", [ALL, SOME])
async def test_the_plan_says_what_is_to_be_expected(held: int, tmp_path: Path) -> None:
    with open_model(small_model(tmp_path)) as model:
        settings: dict[str, Any] = {"n_threads": 1, "exchange_rounds": 0, "moe_expert_cache": held}
        async with executor_of(model, tmp_path, **settings) as executor:
            rate = expected_hit_rate(executor.planned)
            totals = executor.expert_totals()
    assert (rate is None) == (held == ALL) == (totals is None)
    assert rate is None or SOME / ALL <= rate < 1


@pytest.mark.parametrize(
    ("holding", "slots", "asked", "told"),
    [
        (Holding.LAYERS, (8, 8, 0), -1, True),
        (Holding.NONE, (0, 0, 0), -1, True),
        (Holding.NONE, (0, 0, 0), 0, False),
        (Holding.CACHE, (4, 4, 4), -1, False),
    ],
)
def test_a_cache_that_is_off_says_why(
    holding: Holding, slots: tuple[int, ...], asked: int, told: bool
) -> None:
    notices = Notices()
    settings = GPUSettings(
        n_ctx=1, max_sequences=1, max_step_tokens=1, moe_expert_cache=asked, notices=notices
    )
    share = SimpleNamespace(
        expert_plan=ExpertPlan(holding, slots, 0, 0, "no room is left"),
        planned=SimpleNamespace(settings=settings),
        device=SimpleNamespace(info=SimpleNamespace(name="GPU X")),
    )
    _tell_still(cast(Any, share))
    assert [(n.reason, n.text) for n in notices.all] == (
        [(Reason.CACHE_OFF, "GPU X: no room is left")] if told else []
    )


async def test_a_profile_that_is_refused_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "usage"
    broken.write_bytes(b"not a profile at all")
    monkeypatch.setenv("LLAMA_MOE_CACHE_PROFILE", str(broken))
    notices = Notices()
    with open_model(small_model(tmp_path)) as model:
        settings = {"n_threads": 1, "exchange_rounds": 0, "notices": notices}
        async with executor_of(model, tmp_path, **settings):
            pass
    (notice,) = [n for n in notices.all if n.reason is Reason.PROFILE_REFUSED]
    assert str(broken) in notice.text
