"""A chunk of missed experts that no worker computes: its step is lost, and no other one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ops.exchange import HEARTBEAT
from runtime.engine.gpu import step_ends
from runtime.engine.gpu.executor import GPUExecutor
from runtime.engine.gpu.step_ends import has_reached, patiently
from runtime.engine.open_engine import open_engine
from runtime.engine.params import SamplingParams
from runtime.errors import DeviceStalled, ExchangeStalled
from runtime.experts import exchange
from runtime.models import Model, open_model
from tests.engine.test_gpu_executor import executor_of
from tests.engine.test_gpu_hybrid_ahead import chosen_ahead, steps_of
from tests.engine.test_gpu_two import gpus
from tests.support.bad_gpu import bad_machine, config_of
from tests.support.block_models import BLOCK_MODELS
from tests.support.fake_driver import FakeDriver
from tests.support.serve_chunks import DOWN, GATE_UP, trouble, undone

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

N_STEPS = 3
PATIENCE_TICKS = 20_000
LIMIT = 100


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = tmp_path_factory.mktemp("lost") / "model.gguf"
    with open_model(BLOCK_MODELS["qwen3moe"]("Q4_K", 2).write(path)) as model:
        yield model


class SlowMachine:
    """A machine whose workers get all the time that they want, until a chunk is `lost`."""

    def __init__(self, fake: FakeDriver) -> None:
        self.lost, self._beats = False, 0
        self.words: Any = None
        fake.host = self._host

    def _host(self) -> None:
        if self.words is not None and not self.lost:
            self._beats += 1
            self.words[HEARTBEAT:][:8].view(np.uint64)[0] = self._beats
        time.sleep(0)


async def both_ended(executor: GPUExecutor, epoch: int) -> None:
    """Wait until the GPU and the workers have ended a step, before the host looks."""
    made: Any = executor._parts.exchange
    done = executor._parts.results.done
    async with asyncio.timeout(LIMIT):
        while not (has_reached(int(done[0]), epoch) and made.idle):  # noqa: ASYNC110
            await asyncio.sleep(0)


@pytest.mark.parametrize("n_gpus", [1, 2])
async def test_the_step_before_counts_and_the_one_after_works(
    n_gpus: int, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two steps that run ahead the second one's, before the host has looked at the first."""
    sizes = partial(exchange.ExchangeSizes, patience_ns=PATIENCE_TICKS)
    monkeypatch.setattr(exchange, "ExchangeSizes", sizes)
    fake = gpus(n_gpus)
    slow = SlowMachine(fake)
    settings = {"moe_expert_cache": 0, "n_threads": 2, "exchange_rounds": 0, "split": n_gpus > 1}
    async with executor_of(model, tmp_path, fake, **settings) as executor:
        made: Any = executor._parts.exchange
        slow.words = made.memory
        expected = await chosen_ahead(executor, N_STEPS)
        for layer, kind in ((n_gpus - 1, GATE_UP), (0, DOWN)):
            epoch, steps = executor._epoch, steps_of(executor, 2)
            with trouble(made._serves, layer, kind, undone, nth=2) as met:
                met.then = partial(setattr, slow, "lost", kind == GATE_UP)  # else they go on
                flights = [await executor.begin(step) for step in steps]
                await both_ended(executor, epoch + 1)
            assert met.n_met == 1
            slow.lost = False
            await executor._until_idle()  # whoever waits for a lost step is not to blame
            result = await flights[0].result()
            assert result.chosen is not None and result.chosen.tokens == expected[:1]
            with pytest.raises(ExchangeStalled, match=f"MoE layer {layer}"):
                await flights[1].result()
            assert await chosen_ahead(executor, N_STEPS) == expected


async def test_workers_that_take_long_but_show_life_are_waited_for(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where experts come from a slow disk: several times longer than a step may take."""
    for name in ("STALLED_SECONDS", "UNKNOWN_SECONDS"):
        monkeypatch.setattr(step_ends, name, 0.001)
    gpu = bad_machine(monkeypatch, tmp_path)
    n_looks = 0

    def at_work(_: object) -> int:
        nonlocal n_looks
        n_looks += 1
        if n_looks == 3:
            gpu.release(stream)
        return n_looks

    monkeypatch.setattr(exchange.Exchange, "at_work", property(at_work))
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    async with open_engine(config_of(model.path, moe_expert_cache=2)) as engine:
        executor: Any = engine.executor
        stream = executor._parts.stream.handle
        gpu._get("stream", stream).held = True
        async with asyncio.timeout(LIMIT):
            assert [token.id async for token in engine.generate([5, 70], params)] == [0]
    assert n_looks == 3


@pytest.mark.parametrize(
    ("work", "n_waits"), [([0], 1), ([7, 7], 2), ([7, 8, 9, 9], 4), ([7, 8, 0], 3)]
)
async def test_nobody_is_waited_for_who_is_not_at_work(work: list[int], n_waits: int) -> None:
    """Seen after each of the waits that gave nothing."""
    seen, waits = iter(work), 0

    class Team:
        @property
        def at_work(self) -> int:
            return next(seen)

    async def wait() -> None:
        nonlocal waits
        waits += 1
        raise DeviceStalled(0.0)

    exchange: Any = Team()
    with pytest.raises(DeviceStalled):
        await patiently(wait, lambda: False, exchange)
    assert waits == n_waits
    assert not await patiently(wait, lambda: True, exchange)
    with pytest.raises(DeviceStalled):
        await patiently(wait, lambda: False, None)
