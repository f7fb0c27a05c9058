"""The engine over the fake device, whose tokens depend on every page it reads."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing
from itertools import pairwise

import pytest

import runtime
from runtime.engine import step_loop
from runtime.engine.step import StepKind
from tests.support.fake_engine import GREEDY, fake, ids, read, text

pytestmark = pytest.mark.usefixtures("no_task_is_left")

CONFIG = runtime.EngineConfig(device="fake", n_ctx=256, n_batch=32)
LONG = list(range(100))


async def alone(prompt: str | list[int], params: runtime.SamplingParams) -> list[int | None]:
    """What a fresh engine answers."""
    async with runtime.open_engine(CONFIG) as engine:
        return ids(await read(engine, prompt, params))


async def test_an_answer_comes_token_by_token_and_ends() -> None:
    async with runtime.open_engine(CONFIG) as engine:
        tokens = await read(engine, "Hello", GREEDY(max_tokens=5, ignore_eos=True))

    assert [token.n_generated for token in tokens] == [1, 2, 3, 4, 5]
    assert [token.finish_reason for token in tokens] == [None] * 4 + ["length"]
    assert text(tokens) == b"".join(token.bytes for token in tokens).decode()
    timings = tokens[-1].timings
    assert timings is not None
    assert (timings.cache_n, timings.prompt_n, timings.predicted_n) == (0, 5, 5)
    assert timings.as_dict()["predicted_per_second"] > 0


async def test_text_and_its_ids_give_the_same_answer() -> None:
    async with runtime.open_engine(CONFIG) as engine:
        from_text = await read(engine, "Hello")
        from_ids = await read(engine, list(b"Hello"))
    assert ids(from_text) == ids(from_ids)


async def test_parallel_requests_answer_as_if_alone() -> None:
    params = GREEDY(max_tokens=20, ignore_eos=True)
    prompts = [list(range(start, start + n)) for start, n in ((0, 3), (50, 40), (90, 70), (7, 1))]
    async with runtime.open_engine(CONFIG) as engine:
        together = await asyncio.gather(*(read(engine, prompt, params) for prompt in prompts))
        assert engine.statistics().n_running == 0
    for prompt, tokens in zip(prompts, together, strict=True):
        assert ids(tokens) == await alone(prompt, params)


async def test_a_seed_decides_the_answer_whatever_runs_beside_it() -> None:
    params = runtime.SamplingParams(seed=11, max_tokens=20, ignore_eos=True)
    async with runtime.open_engine(CONFIG) as engine:
        first, again, _ = await asyncio.gather(
            read(engine, "Hello", params), read(engine, "Hello", params), read(engine, "Bye")
        )
    assert ids(first) == ids(again) == await alone("Hello", params)


async def test_preempted_sequences_come_back_with_their_kv() -> None:
    """Four sequences share a pool with room for one and a half."""
    config = runtime.EngineConfig(device="fake", n_ctx=128, n_batch=16)
    params = GREEDY(max_tokens=60, ignore_eos=True)
    prompts = [list(range(20 * n, 20 * n + 25)) for n in range(4)]
    async with runtime.open_engine(config) as engine:
        answers = await asyncio.gather(*(read(engine, prompt, params) for prompt in prompts))
        counters = engine.statistics().counters
        pages = engine.statistics()

    assert counters.preemptions > 0
    # Nothing was computed twice: each prompt token was read once, each generated one decoded once.
    assert counters.prompt_tokens == 4 * 25
    assert counters.predicted_tokens == 4 * 60
    assert pages.n_pages_free + pages.n_pages_cached == pages.n_pages
    for prompt, tokens in zip(prompts, answers, strict=True):
        assert ids(tokens) == await alone(prompt, params)


async def test_a_prefix_is_reused_and_changes_nothing() -> None:
    params = GREEDY(max_tokens=8, ignore_eos=True)
    async with runtime.open_engine(CONFIG) as engine:
        first = await read(engine, LONG, params)
        again = await read(engine, LONG, params)
        follow_up = [*LONG, *(i for i in ids(first) if i is not None), 5, 6, 7]
        second = await read(engine, follow_up, params)
        fresh = await read(engine, LONG, params, reuse_prefix=False)

    assert [t[0].n_cached for t in (first, again, fresh)] == [0, 99, 0]
    # All but the last generated token, whose KV was never needed, and the three new ones.
    assert second[0].n_cached == len(follow_up) - 3 - 1
    assert ids(first) == ids(again) == ids(fresh)
    assert ids(second) == await alone(follow_up, params)


async def test_without_prefix_cache_nothing_is_reused() -> None:
    config = runtime.EngineConfig(device="fake", n_ctx=256, prefix_cache=False)
    async with runtime.open_engine(config) as engine:
        await read(engine, LONG)
        assert (await read(engine, LONG))[0].n_cached == 0
        statistics = engine.statistics()
    assert statistics.n_pages_free == statistics.n_pages


async def test_a_lost_page_changes_the_answer() -> None:
    """The tests above can only notice mix-ups if the fake device does."""
    async with runtime.open_engine(CONFIG) as engine:
        first = await read(engine, LONG)
        for page in range(engine.executor.limits.n_pages):
            fake(engine).corrupt_page(page)
        assert ids(await read(engine, LONG)) != ids(first)


async def test_several_completions_share_the_prompt() -> None:
    params = runtime.SamplingParams(seed=3, max_tokens=10, ignore_eos=True)
    async with runtime.open_engine(CONFIG) as engine:
        tokens = await read(engine, LONG, params, n=6)
        prompt_tokens = engine.statistics().counters.prompt_tokens

    assert prompt_tokens == len(LONG) + 5  # the siblings compute only the last prompt token
    for index in range(6):
        seed = runtime.SamplingParams(seed=3 + index, max_tokens=10, ignore_eos=True)
        assert ids(tokens, index) == await alone(LONG, seed)
    assert sum(token.finish_reason is not None for token in tokens) == 6


async def test_a_token_is_read_while_the_next_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_loop, "TURN_SECONDS", 60)  # a slow machine gives turns before
    async with runtime.open_engine(CONFIG) as engine:
        params = GREEDY(max_tokens=8, ignore_eos=True)
        during = [fake(engine).is_running async for _ in engine.generate("Hello", params)]
    assert during == [True] * 7 + [False]


async def test_every_step_gives_the_loop_a_turn() -> None:
    """The fake device answers at once: nothing else could run if the steps did not let it."""
    turns = 0

    async def tick() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async with runtime.open_engine(CONFIG) as engine:
        ticking = asyncio.create_task(tick())
        await read(engine, "Hello", GREEDY(max_tokens=50, ignore_eos=True))
        ticking.cancel()
    assert turns >= 50


async def test_a_reading_of_the_counters_does_not_change() -> None:
    async with runtime.open_engine(CONFIG) as engine:
        before = engine.statistics().counters
        await read(engine, "Hello")
        assert (before.predicted_tokens, engine.statistics().counters.predicted_tokens) == (0, 12)


async def test_answers_go_on_while_a_long_prompt_is_read() -> None:
    async with runtime.open_engine(CONFIG) as engine:
        fake(engine).keep_steps = True
        async with aclosing(engine.generate([1, 2], GREEDY(ignore_eos=True))) as tokens:
            await anext(tokens)
            await read(engine, list(range(200)), GREEDY(max_tokens=1))
        kinds = [step.kind for step in fake(engine).steps]
    first = kinds.index(StepKind.PREFILL, 1)
    chunks = [kind for kind in kinds[first:] if kind is StepKind.PREFILL]
    assert len(chunks) >= 7  # 200 tokens in chunks of at most 32
    pairs = list(pairwise(kinds))
    assert (StepKind.PREFILL, StepKind.PREFILL) not in pairs[first:]


async def test_prompt_progress_is_reported_per_chunk() -> None:
    seen: list[tuple[int, int]] = []
    async with runtime.open_engine(CONFIG) as engine:
        await read(engine, LONG, on_progress=lambda p: seen.append((p.n_processed, p.n_total)))
    assert seen == [(32, 100), (64, 100), (96, 100), (100, 100)]


async def test_the_context_ends_an_answer_and_bounds_a_prompt() -> None:
    config = runtime.EngineConfig(device="fake", n_ctx=64, n_parallel=2)
    async with runtime.open_engine(config) as engine:
        assert engine.shape.n_ctx_sequence == 32
        tokens = await read(engine, list(range(30)), GREEDY(ignore_eos=True))
        assert len(tokens) == 2
        last = tokens[-1]
        assert (last.finish_reason, last.stop_type, last.truncated) == ("length", "limit", True)
        with pytest.raises(runtime.ContextTooLong) as error:
            await read(engine, list(range(32)))
    assert (error.value.n_prompt_tokens, error.value.n_ctx) == (32, 32)


async def test_max_tokens_zero_only_fills_the_cache() -> None:
    async with runtime.open_engine(CONFIG) as engine:
        (token,) = await read(engine, LONG, GREEDY(max_tokens=0))
        assert (token.id, token.text, token.finish_reason) == (None, "", "length")
        assert (await read(engine, LONG))[0].n_cached == 99


async def test_an_end_token_ends_the_answer_unless_ignored() -> None:
    async with runtime.open_engine(CONFIG) as engine:
        fake(engine).next_token = lambda tokens: 258 if len(tokens) == 8 else ord("x")
        tokens = await read(engine, list(b"12345"), GREEDY(max_tokens=9))
        assert text(tokens) == "xxx"
        assert (tokens[-1].id, tokens[-1].finish_reason, tokens[-1].stop_type) == (
            258,
            "stop",
            "eos",
        )
        ignoring = await read(engine, list(b"12345"), GREEDY(max_tokens=9, ignore_eos=True))
        assert len(ignoring) == 9


async def test_characters_of_several_tokens_come_whole() -> None:
    answer = "né漢🙂"
    script = answer.encode()
    async with runtime.open_engine(CONFIG) as engine:
        fake(engine).next_token = lambda tokens: script[min(len(tokens) - 2, len(script) - 1)]
        tokens = await read(engine, [1, 2], GREEDY(max_tokens=len(script)))
    assert [token.text for token in tokens if token.text] == list(answer)
    assert b"".join(token.bytes for token in tokens) == script


async def test_logprobs_are_those_of_the_raw_logits() -> None:
    params = runtime.SamplingParams(n_probs=3, max_tokens=4, seed=1, temperature=5.0)
    async with runtime.open_engine(CONFIG) as engine:
        tokens = await read(engine, "Hello", params)
    for token in tokens:
        assert token.logprob is not None
        assert token.logprob <= token.top_logprobs[0].logprob <= 0
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].bytes != b""


async def test_slots_show_what_runs() -> None:
    async with runtime.open_engine(CONFIG) as engine:
        with fake(engine).hold() as gate:
            task = asyncio.create_task(read(engine, LONG, GREEDY(max_tokens=2)))
            await gate.reached()
            gate.release()
            await gate.reached()
            slot = engine.statistics().slots[0]
            assert (slot.is_processing, slot.state, slot.n_processed) == (True, "PREFILL", 32)
        await task
        slot = engine.statistics().slots[0]
        assert (slot.is_processing, slot.n_prompt, slot.n_generated) == (False, 100, 2)


async def test_a_big_vocabulary_is_sampled_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime.engine import step_loop

    threads: set[str] = set()
    plain = step_loop.choose

    def spy(*args: object) -> object:
        threads.add(threading.current_thread().name)
        return plain(*args)

    monkeypatch.setattr(step_loop, "choose", spy)
    async with runtime.open_engine(CONFIG) as engine:
        inline = await read(engine, "Hello")
        assert threads == {threading.main_thread().name}
        threads.clear()
        monkeypatch.setattr(step_loop, "INLINE_LOGITS", 0)
        assert ids(await read(engine, "Hello")) == ids(inline)
    assert all(name.startswith("engine helper") for name in threads)


async def test_many_answers_of_a_step_give_the_loop_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime.engine import step_loop

    turns = 0
    seen: list[int] = []
    plain = step_loop.choose

    def spy(*args: object) -> object:
        seen.append(turns)
        return plain(*args)

    async def tick() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    monkeypatch.setattr(step_loop, "choose", spy)
    monkeypatch.setattr(step_loop, "TURN_SECONDS", -1.0)  # every answer takes too long
    params = runtime.SamplingParams(seed=3, max_tokens=3, ignore_eos=True)
    async with runtime.open_engine(CONFIG) as engine:
        ticking = asyncio.create_task(tick())
        await read(engine, LONG, params, n=4)
        ticking.cancel()
    assert len(seen) == len(set(seen)) == 12  # no two answers in one turn


def test_two_engines_in_two_threads() -> None:
    answers: dict[int, list[int | None]] = {}

    def work(number: int) -> None:
        async def main() -> None:
            async with runtime.open_engine(CONFIG) as engine:
                tokens = await asyncio.gather(*(read(engine, LONG[n:]) for n in range(3)))
                answers[number] = [i for answer in tokens for i in ids(answer)]

        asyncio.run(main())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers[0] == answers[1]
    assert len(answers[0]) == 36
