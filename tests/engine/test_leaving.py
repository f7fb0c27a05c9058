"""Callers that leave before their answer ends, and what is left of it."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import replace

import pytest

import runtime
from runtime.engine.sequence import Sequence
from tests.support.fake_engine import GREEDY, fake, read

pytestmark = pytest.mark.usefixtures("no_task_is_left")

CONFIG = runtime.EngineConfig(device="fake", n_ctx=256, n_batch=32)


async def test_closing_the_iterator_frees_the_sequence_within_a_step() -> None:
    async with runtime.open_engine(CONFIG) as engine:
        with fake(engine).hold() as gate:
            tokens = engine.generate("Hello", GREEDY(ignore_eos=True))
            reading = asyncio.ensure_future(anext(tokens))
            await gate.reached()
            gate.release()
            await reading
            await gate.reached()  # the next step is in flight
            await tokens.aclose()
            gate.release()
            other = asyncio.ensure_future(read(engine, "Bye", GREEDY(max_tokens=1)))
            await gate.reached()
            assert engine.statistics().n_running == 1
            gate.release()
            await other
        assert fake(engine).n_steps == 3
        assert engine.statistics().n_running == 0


async def test_cancelling_the_reader_frees_the_sequence() -> None:
    async with runtime.open_engine(CONFIG) as engine:
        with fake(engine).hold() as gate:
            task = asyncio.create_task(read(engine, "Hello", GREEDY(ignore_eos=True)))
            await gate.reached()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await read(engine, "Bye", GREEDY(max_tokens=1))
        assert engine.statistics().n_running == 0


async def test_breaking_out_of_the_loop_frees_the_sequence() -> None:
    """asyncio closes the generator in a task of its own, a turn of the loop or two later: the other
    answer has more steps than that."""
    async with runtime.open_engine(CONFIG) as engine:
        fake(engine).keep_steps = True
        async for _ in engine.generate("Hello", GREEDY(ignore_eos=True)):
            break
        await read(engine, "Bye", GREEDY(max_tokens=8, ignore_eos=True))
        assert [len(step.page_tables) for step in fake(engine).steps[-4:]] == [1] * 4
        assert engine.statistics().n_running == 0


async def test_ended_requests_leave_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    """Finished, failed, cancelled and abandoned ones: only each slot's last answer stays."""
    caplog.set_level("ERROR", "runtime.engine.step_loop")  # pytest's records hold what failed
    params = GREEDY(max_tokens=3, ignore_eos=True)
    forbidden = dict.fromkeys(range(259), -float("inf"))

    async def leave_early(number: int) -> None:
        async for _ in engine.generate([number, 2, 3], params):
            break

    async def fail(number: int) -> None:
        with pytest.raises(runtime.RequestError):
            await read(engine, [number, 4], replace(params, logit_bias=forbidden))

    async def cancel(number: int) -> None:
        task = asyncio.create_task(read(engine, [number, 5], params))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    async with runtime.open_engine(CONFIG) as engine:
        for number in range(20):
            await asyncio.gather(
                read(engine, [number, 1], params, n=2),
                leave_early(number),
                fail(number),
                cancel(number),
            )
        await read(engine, "Bye", params)  # whatever was cancelled last has left by now
        gc.collect()
        # Not isinstance: it looks through weak references, whose objects may be gone.
        sequences = [thing for thing in gc.get_objects() if type(thing) is Sequence]
        counts = engine.statistics()
    assert len(sequences) <= 4
    assert counts.counters.requests_failed == 20
    assert counts.n_pages_free + counts.n_pages_cached == counts.n_pages
