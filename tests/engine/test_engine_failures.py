"""What goes wrong ends in one typed error, and nowhere else."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import runtime
from runtime.engine.step import Step
from tests.support.fake_engine import GREEDY, fake, ids, read

pytestmark = pytest.mark.usefixtures("no_task_is_left")

CONFIG = runtime.EngineConfig(device="fake", n_ctx=256, n_batch=32)
ENDLESS = GREEDY(max_tokens=200, ignore_eos=True)


async def test_a_compute_error_ends_its_request_only() -> None:
    """Token 200 makes a step fail; the sequences beside it must not notice."""

    def holds_200(step: Step) -> bool:
        return 200 in step.token_ids

    good = [1, 2, 3]
    async with runtime.open_engine(CONFIG) as engine:
        expected = ids(await read(engine, good))
        fake(engine).fail_when(holds_200)
        answers = await asyncio.gather(
            read(engine, good, reuse_prefix=False),
            read(engine, [1, 2, 200]),
            read(engine, [*good, 4]),
            return_exceptions=True,
        )
        assert isinstance(answers[1], runtime.ComputeError)
        assert not isinstance(answers[0], BaseException)
        assert ids(answers[0]) == expected
        assert not isinstance(answers[2], BaseException)
        fake(engine).fail_when(None)
        statistics = engine.statistics()
        assert statistics.counters.requests_failed == 1
        assert statistics.n_running == 0


async def test_a_callback_that_raises_ends_its_request_only() -> None:
    def broken(_: object) -> None:
        raise ValueError("broken callback")

    async with runtime.open_engine(CONFIG) as engine:
        expected = ids(await read(engine, list(range(100))))
        answers = await asyncio.gather(
            read(engine, list(range(100)), reuse_prefix=False),
            read(engine, list(range(50, 150)), on_progress=broken),
            return_exceptions=True,
        )
        assert str(answers[1]) == "broken callback"
        assert not isinstance(answers[0], BaseException)
        assert ids(answers[0]) == expected
        await read(engine, [1, 2])  # which begins after whatever was left has been cancelled
        assert engine.statistics().n_running == 0


async def test_what_a_failed_sequence_computed_is_never_reused() -> None:
    prompt = list(range(150, 250))
    async with runtime.open_engine(CONFIG) as engine:
        fake(engine).fail_when(lambda step: 249 in step.token_ids)  # the last of several chunks
        with pytest.raises(runtime.ComputeError):
            await read(engine, prompt)
        fake(engine).fail_when(None)
        assert (await read(engine, prompt))[0].n_cached == 0


async def test_a_decode_step_that_fails_ends_the_answer_with_an_error() -> None:
    async with runtime.open_engine(CONFIG) as engine:
        fake(engine).fail_when(lambda step: step.positions[-1] == 10)
        received = []
        with pytest.raises(runtime.ComputeError):
            async for token in engine.generate([1, 2, 3], ENDLESS):
                received.append(token)
        assert len(received) == 8
        fake(engine).fail_when(None)
        assert len(await read(engine, [1, 2, 3])) == 12


async def test_a_broken_executor_ends_the_engine_with_the_cause() -> None:
    cause = RuntimeError("the device is gone")
    reading: asyncio.Task[list[runtime.Token]] | None = None
    with pytest.raises(runtime.EngineBug, match="the device is gone") as error:
        async with runtime.open_engine(CONFIG) as engine:
            fake(engine).break_down(cause)
            reading = asyncio.create_task(read(engine, [1, 2, 3]))
            await asyncio.Event().wait()
    assert error.value.__cause__ is cause
    assert reading is not None
    with pytest.raises(runtime.EngineClosed, match="the device is gone"):
        await reading
    assert fake(engine).is_closed
    with pytest.raises(runtime.EngineClosed):
        await read(engine, [1])


async def test_an_exception_of_the_block_comes_out_as_it_is() -> None:
    with pytest.raises(KeyError, match="mine"):
        async with runtime.open_engine(CONFIG):
            raise KeyError("mine")


async def test_an_error_beside_the_first_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(runtime.EngineBug, match="the device is gone"):
        async with runtime.open_engine(CONFIG) as engine:
            fake(engine).break_down(RuntimeError("the device is gone"))
            reading = asyncio.create_task(read(engine, [1, 2, 3]))
            try:
                await asyncio.Event().wait()
            finally:
                with pytest.raises(runtime.EngineClosed):
                    await reading
                raise KeyError("while cleaning up")
    logged = [record.exc_info[1] for record in caplog.records if record.exc_info]
    assert any(isinstance(error, KeyError) for error in logged)


async def test_cancelling_the_block_closes_the_executor() -> None:
    engines: list[runtime.Engine] = []
    is_open = asyncio.Event()

    async def serve() -> None:
        async with runtime.open_engine(CONFIG) as engine:
            engines.append(engine)
            is_open.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(serve())
    await is_open.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert fake(engines[0]).is_closed


async def test_a_closed_engine_says_so() -> None:
    async with runtime.open_engine(CONFIG) as engine:
        with fake(engine).hold() as gate:
            running = asyncio.create_task(read(engine, "Hello", ENDLESS))
            waiting = [asyncio.create_task(read(engine, "Bye", ENDLESS)) for _ in range(5)]
            await gate.reached()
            engine.close()
            engine.close()
            for task in (running, *waiting):
                with pytest.raises(runtime.EngineClosed):
                    await task
        with pytest.raises(runtime.EngineClosed):
            await read(engine, "Hello")
    engine.close()
    with pytest.raises(runtime.EngineClosed):
        await engine.tokenize("Hello")


async def test_leaving_the_block_ends_running_requests() -> None:
    async with runtime.open_engine(CONFIG) as engine:
        with fake(engine).hold() as gate:
            task = asyncio.create_task(read(engine, "Hello", ENDLESS))
            await gate.reached()
    with pytest.raises(runtime.EngineClosed):
        await task


async def test_slot_work_that_waits_ends_with_the_engine() -> None:
    async with runtime.open_engine(CONFIG) as engine:
        await read(engine, "Hello")
        with fake(engine).hold() as gate:
            running = asyncio.create_task(read(engine, "Bye", ENDLESS))
            await gate.reached()
            saving = asyncio.create_task(engine.save_slot(0))
            await asyncio.sleep(0)
            engine.close()
            for task in (running, saving):
                with pytest.raises(runtime.EngineClosed):
                    await task


async def test_another_loop_is_refused() -> None:
    async with runtime.open_engine(CONFIG) as engine:

        def elsewhere() -> None:
            asyncio.run(read(engine, "Hello"))

        with pytest.raises(runtime.EngineError, match="event loop that opened it"):
            await asyncio.to_thread(elsewhere)


@pytest.mark.parametrize("prompt", [[], [-1], [259], [True], ["x"], [2**40]], ids=str)
async def test_bad_prompts_are_request_errors(prompt: list[int]) -> None:
    async with runtime.open_engine(CONFIG) as engine:
        with pytest.raises(runtime.RequestError) as error:
            await read(engine, prompt)
        assert error.value.field == "prompt"
        with pytest.raises(runtime.RequestError):
            await read(engine, "")


async def test_a_missing_model_is_a_typed_error(tmp_path: Path) -> None:
    config = runtime.EngineConfig(model=tmp_path / "none.gguf")
    progress = runtime.Progress()
    with pytest.raises(runtime.EngineError):
        async with runtime.open_engine(config, progress):
            pass
    assert progress.state.phase != "ready"


def test_a_context_that_is_split_too_often_is_a_config_error() -> None:
    with pytest.raises(runtime.ConfigError, match="n_parallel = 4"):
        runtime.EngineConfig(device="fake", n_ctx=4, n_parallel=4)
