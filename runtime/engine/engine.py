"""Engine: the public door.  `open_engine` loads a model; `Engine.generate` answers prompts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from enum import Enum, auto
from functools import cached_property
from typing import TYPE_CHECKING, Any

from runtime.config import EngineConfig
from runtime.engine.answer import Answer
from runtime.engine.candidate_sampler import CandidateSampler
from runtime.engine.executor import Executor, SamplingExecutor
from runtime.engine.kv_cache import KVCache
from runtime.engine.opening import open_off_loop
from runtime.engine.params import SamplingParams, defaults_from_metadata
from runtime.engine.placement import Opened
from runtime.engine.sampler import Sampler
from runtime.engine.sampling_vocabulary import SamplingVocabulary
from runtime.engine.scheduler import Scheduler
from runtime.engine.sequence import Sequence as TokenSequence
from runtime.engine.sequence import TokenChannel
from runtime.engine.slots import Slots
from runtime.engine.state_cache import states_of
from runtime.engine.statistics import Statistics
from runtime.engine.step_loop import StepLoop
from runtime.engine.token import PromptProgress, Token
from runtime.errors import (
    ContextTooLong,
    EngineBug,
    EngineClosed,
    EngineError,
    RequestError,
    TokenizerUnavailable,
)
from runtime.progress import Progress
from runtime.text.guard import GUARD

if TYPE_CHECKING:
    from runtime.text.chat_template import ChatTemplate
    from runtime.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Longer texts and prompts are handled on a thread: beyond this they would hold up the loop for over
# a millisecond.
INLINE_CHARACTERS = 4_000
INLINE_TOKENS = 2_000


@asynccontextmanager
async def open_engine(
    config: EngineConfig, progress: Progress | None = None
) -> AsyncIterator[Engine]:
    """Load the model off the loop and serve until the block ends.

    progress: where the load stands, readable meanwhile (`progress.state.phase`), for /health.
    Cancelling the load ends it at once; a thread may compile on for a moment and then cleans up.
    An engine whose own steps fail cancels the block and leaves it with the cause.
    Raises: ConfigError, ModelError, DeviceError.
    """
    progress = progress or Progress()
    async with AsyncExitStack() as stack:
        opened = await open_off_loop(config, progress)
        stack.push_async_callback(opened.close)
        helper = ThreadPoolExecutor(1, thread_name_prefix="engine helper")
        # Nobody waits for its work any more when the block ends, and joining would block the loop.
        stack.callback(helper.shutdown, wait=False, cancel_futures=True)
        engine = Engine(config, opened, helper)
        progress.finish()
        logger.info("%s on %s (%s)", opened.model.name, config.device, opened.reason)
        try:
            async with asyncio.TaskGroup() as tasks:
                engine._start(tasks)
                try:
                    yield engine
                finally:
                    engine.close()
        except BaseExceptionGroup as group:
            # One thing went wrong first: the block's own exception, or the step that failed and
            # cancelled the block.  What went wrong after it is for the log only.
            first = engine.failure or group.exceptions[0]
            for other in group.exceptions:
                if other is not first:
                    logger.error("another error while the engine ended", exc_info=other)
            raise first from first.__cause__


class EngineState(Enum):
    OPEN = auto()
    CLOSED = auto()
    FAILED = auto()


class Engine:
    """One model on one executor; every method belongs to the event loop that opened it.

    config    as given;  shape: how many sequences and tokens there is room for
    model     facts of the model (ModelFacts);  executor: what computes (see `describe`)
    failure   what ended the engine, if something did
    """

    def __init__(self, config: EngineConfig, opened: Opened, helper: ThreadPoolExecutor) -> None:
        """Use `open_engine`."""
        self.config = config
        self.model = opened.model
        self.shape = opened.shape
        self.executor: Executor = opened.executor
        self.failure: EngineError | None = None
        self._reason = opened.reason
        self._check_model = opened.check_model
        self._state = EngineState.OPEN
        self._loop = asyncio.get_running_loop()
        limits = opened.executor.limits
        self._kv = KVCache(limits.n_pages, limits.page_tokens, keep=config.prefix_cache)
        scheduler = Scheduler(
            limits,
            self._kv,
            n_batch=config.n_batch or limits.max_step_tokens,
            n_ctx_sequence=self.shape.n_ctx_sequence,
            states=states_of(limits, keep=config.prefix_cache),
        )
        self._steps = StepLoop(scheduler, opened.executor, helper)
        self._slots = Slots(self._steps, self._kv, self.shape, self._model_key())
        self._vocabulary = SamplingVocabulary(limits.n_vocab, opened.model.text)
        self._stepping: asyncio.Task[None] | None = None
        self._n_requests = 0

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        n: int = 1,
        reuse_prefix: bool = True,
        special: bool = False,
        on_progress: Callable[[PromptProgress], None] | None = None,
    ) -> AsyncGenerator[Token, None]:
        """The tokens of `n` answers, as they are made (`Token.index` says whose).

        Nothing runs before the first item is asked for, errors come from there, and closing the
        generator (or cancelling the task that reads it) frees the sequences within one step.
        A text prompt gets the model's BOS and its special tokens are recognised; ids are taken as
        they are.  params None: the model's defaults.  n > 1: answer i uses seed + i.
        special: the text shows control tokens.

        Raises: RequestError (ContextTooLong), ComputeError, EngineClosed, TokenizerUnavailable
            where the prompt, a stop string or a bias is text and the model has no tokenizer,
            CorruptModel where the model's file was truncated meanwhile.
        """
        if type(n) is not int or n < 1:
            raise RequestError("n", f"{n!r}: use a whole number of at least 1")
        return self._generate(
            prompt, params or self.default_params, n, reuse_prefix, special, on_progress
        )

    async def _generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        n: int,
        reuse_prefix: bool,
        special: bool,
        on_progress: Callable[[PromptProgress], None] | None,
    ) -> AsyncGenerator[Token, None]:
        self._check_usable()
        ids = await self.tokenize(prompt) if isinstance(prompt, str) else self._checked(prompt)
        if not ids:
            raise RequestError("prompt", "is empty: give at least one token")
        if len(ids) >= self.shape.n_ctx_sequence:
            raise ContextTooLong(len(ids), self.shape.n_ctx_sequence)
        if params.stop and not self.model.has_tokenizer:
            raise TokenizerUnavailable(f"stop strings need a tokenizer: {self.model.text_error}")
        samplers = await self._samplers(params, ids, n)
        self._check_usable()
        self._check_model()
        channel = TokenChannel()
        answers: list[Answer] = []
        for index, sampler in enumerate(samplers):
            self._n_requests += 1
            leader = answers[0].sequence if answers else None
            answers.append(
                Answer(
                    TokenSequence(
                        self._n_requests, ids, leader=leader, reuse_prefix=reuse_prefix or index > 0
                    ),
                    sampler,
                    self.model.text,
                    channel,
                    n_ctx=self.shape.n_ctx_sequence,
                    index=index,
                    special=special,
                    on_progress=on_progress,
                )
            )
        try:
            for answer in answers:
                self._steps.submit(answer)
            n_open = n
            while n_open:
                token = await channel.get()
                n_open -= token.finish_reason is not None
                yield token
        finally:
            for answer in answers:
                self._steps.cancel(answer)

    async def _samplers(self, params: SamplingParams, ids: list[int], n: int) -> list[Sampler]:
        seeds = [params.seed + i if params.seed >= 0 else params.seed for i in range(n)]

        kind = CandidateSampler if isinstance(self.executor, SamplingExecutor) else Sampler

        def make() -> list[Sampler]:
            return [kind(replace(params, seed=seed), self._vocabulary, ids) for seed in seeds]

        # DRY looks through the whole vocabulary for its breakers, and every text bias is tokenized.
        quick = len(ids) * n < INLINE_TOKENS and not params.dry_multiplier
        return make() if quick else await self._steps.off_loop(make)

    def _checked(self, ids: Sequence[int]) -> list[int]:
        """Raises: RequestError where one is not a token of this model."""
        n_vocab = self._vocabulary.n_vocab
        checked = list(ids)
        for token in checked:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < n_vocab:
                raise RequestError("prompt", f"{token!r} is not a token id (0 to {n_vocab - 1})")
        return checked

    async def tokenize(
        self,
        text: str,
        *,
        add_special: bool = True,
        parse_special: bool = True,
        guard: str | None = None,
    ) -> list[int]:
        """Ids of `text`; long texts are tokenized off the loop.

        guard: the character that a rendered chat has after the first one of harmless special-token
        text.
        Raises: TokenizerUnavailable.
        """
        tokenizer = self.tokenizer

        def encode() -> list[int]:
            return list(
                tokenizer.encode(
                    text, add_special=add_special, parse_special=parse_special, guard=guard
                )
            )

        self._check_usable()
        if len(text) <= INLINE_CHARACTERS:
            return encode()
        return await asyncio.to_thread(encode)

    async def chat_prompt(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        template: ChatTemplate | None = None,
        **options: Any,
    ) -> list[int]:
        """Ids of a conversation as the chat template writes it, for `generate`.

        messages: {"role": ..., "content": ...}; control tokens come from the template only, never
        from what a message says.  template None: the model's.  options: of `ChatTemplate.render`,
        such as tools.  Rendered off the loop: a template is the model file's own program.
        Raises: TemplateError, RequestError, TokenizerUnavailable.
        """
        chosen = template or self.chat_template
        text = await asyncio.to_thread(chosen.render, list(messages), **options)
        return await self.tokenize(text, parse_special=True, guard=GUARD)

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises: TokenizerUnavailable."""
        return self.model.tokenizer

    @property
    def chat_template(self) -> ChatTemplate:
        """Raises: TemplateError."""
        return self.model.chat_template

    @cached_property
    def default_params(self) -> SamplingParams:
        """What the model's file says about sampling, else the usual defaults."""
        return defaults_from_metadata(self.model.metadata)

    def statistics(self) -> Statistics:
        """A reading of everything that changes."""
        return self._slots.statistics()

    def describe(self) -> dict[str, object]:
        """Facts for /props and the console: context, device, choices and their reasons."""
        return {
            "n_ctx": self.shape.n_ctx,
            "n_ctx_sequence": self.shape.n_ctx_sequence,
            "n_parallel": self.shape.n_parallel,
            "n_batch": self.config.n_batch or self.executor.limits.max_step_tokens,
            "prefix_cache": self.config.prefix_cache,
            "device_reason": self._reason,
            **self.executor.describe(),
        }

    async def save_slot(self, slot: int) -> tuple[bytes, int]:
        """An image of the tokens and KV pages of the slot's last sequence, and how many tokens it
        holds: those whose KV is in the cache.  Raises: RequestError.
        """
        self._check_usable()
        return await self._slots.save(slot)

    async def restore_slot(self, slot: int, image: bytes) -> int:
        """Put a saved image into the prefix cache; returns its tokens.  Raises: RequestError."""
        self._check_usable()
        return await self._slots.restore(slot, image)

    async def erase_slot(self, slot: int) -> int:
        """Forget the KV of the slot's last sequence; returns its tokens.  Raises: RequestError."""
        self._check_usable()
        return await self._slots.erase(slot)

    def close(self) -> None:
        """End now: running requests get EngineClosed.  Harmless when it has ended already."""
        if self._state is EngineState.OPEN:
            self._state = EngineState.CLOSED
            self._steps.fail_all(EngineClosed("the engine was closed"))
        if self._stepping is not None:
            self._stepping.cancel()

    def _start(self, tasks: asyncio.TaskGroup) -> None:
        self._stepping = tasks.create_task(self._step_forever(), name="engine steps")

    async def _step_forever(self) -> None:
        try:
            await self._steps.run_forever()
        except Exception as error:
            self._state = EngineState.FAILED
            self.failure = error if isinstance(error, EngineError) else EngineBug(repr(error))
            closed = EngineClosed(f"the engine has failed: {error}")
            closed.__cause__ = error
            self._steps.fail_all(closed)
            logger.exception("the engine has failed")
            if self.failure is error:
                raise
            raise self.failure from error

    def _check_usable(self) -> None:
        if self._state is EngineState.CLOSED:
            raise EngineClosed("the engine is closed")
        if self._state is EngineState.FAILED:
            raise EngineClosed("the engine has failed") from self.failure
        if asyncio.get_running_loop() is not self._loop:
            raise EngineError(
                "the engine belongs to the event loop that opened it: "
                "call it from there (asyncio.run_coroutine_threadsafe)"
            )

    def _model_key(self) -> str:
        """What saved pages depend on."""
        config, model = self.config, self.model
        cache = f"{config.cache_type_k} {config.cache_type_v}"
        return f"{model.architecture} {model.name} {model.n_vocab} {model.n_bytes} {cache}"
