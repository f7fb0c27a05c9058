"""Engine: the public door, once it is open.  `Engine.generate` answers prompts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from enum import Enum, auto
from functools import cached_property
from typing import TYPE_CHECKING, Any

from runtime.checks import shown
from runtime.config import EngineConfig, is_gib
from runtime.engine.answer import Answer
from runtime.engine.executor import (
    CountingExecutor,
    Executor,
    LayerCountingExecutor,
    ResizableExecutor,
    SamplingExecutor,
)
from runtime.engine.kv_cache import KVCache
from runtime.engine.params import SamplingParams, defaults_from_metadata
from runtime.engine.placement import Opened
from runtime.engine.request_parts import check_length, check_options, checked_ids, samplers_of
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
    ConfigError,
    EngineBug,
    EngineClosed,
    EngineError,
    RequestError,
    TokenizerUnavailable,
)
from runtime.experts.totals import ExpertTotals
from runtime.profiling.instrument import Instrument
from runtime.profiling.profiler import Profiler
from runtime.text.guard import GUARD

if TYPE_CHECKING:
    from runtime.text.chat_template import ChatTemplate
    from runtime.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Longer texts and prompts are handled on a thread: beyond this they would hold up the loop for over
# a millisecond.
INLINE_CHARACTERS = 4_000
INLINE_TOKENS = 2_000


class EngineState(Enum):
    OPEN = auto()
    CLOSED = auto()
    FAILED = auto()


class Engine:
    """One model on one executor; every method belongs to the event loop that opened it.

    config    as given;  shape: how many sequences and tokens there is room for
    model     facts of the model (ModelFacts);  executor: what computes (see `describe`)
    failure   what ended the engine, if something did
    plan      what it takes of which memory, and its choices, as of its opening; None: a fake one
    notices   what fell back, shrank or stayed off, and why (`runtime.notices`)
    """

    def __init__(self, config: EngineConfig, opened: Opened, helper: ThreadPoolExecutor) -> None:
        """Use `open_engine`."""
        self.config = config
        self.model = opened.model
        self.shape = opened.shape
        self.executor: Executor = opened.executor
        self.failure: EngineError | None = None
        self.notices, self.plan = opened.notices, opened.plan
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
        self._steps = StepLoop(scheduler, opened.executor, helper, opened.notices)
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
        special: the text shows control tokens.  on_progress: called after each part of the prompt;
        what it raises ends this request alone, and comes out here.

        Raises: RequestError (ContextTooLong), ComputeError, EngineClosed, TokenizerUnavailable
            where the prompt, a stop string or a bias is text and the model has no tokenizer,
            CorruptModel where the model's file was truncated meanwhile.
        """
        chosen = self.default_params if params is None else params
        return self._generate(prompt, chosen, n, reuse_prefix, special, on_progress)

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
        check_options(params, n, on_progress, reuse_prefix=reuse_prefix, special=special)
        if isinstance(prompt, str):
            ids = await self.tokenize(prompt)
        else:
            ids = checked_ids(prompt, self._vocabulary.n_vocab)
        check_length(ids, self.shape.n_ctx_sequence)
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
        candidates = isinstance(self.executor, SamplingExecutor)

        def make() -> list[Sampler]:
            return samplers_of(params, self._vocabulary, ids, n, candidates=candidates)

        # DRY looks through the whole vocabulary for its breakers, and every text bias is tokenized.
        quick = len(ids) * n < INLINE_TOKENS and not params.dry_multiplier
        return make() if quick else await self._steps.off_loop(make)

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
        Raises: RequestError for what is no text, or one piece of too much; TokenizerUnavailable.
        """
        tokenizer = self.tokenizer

        def encode() -> list[int]:
            return list(
                tokenizer.encode(
                    text, add_special=add_special, parse_special=parse_special, guard=guard
                )
            )

        self._check_usable()
        if isinstance(text, str) and len(text) > INLINE_CHARACTERS:
            return await asyncio.to_thread(encode)
        return encode()

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
        from runtime.text.chat_template import ChatTemplate

        chosen = self.chat_template if template is None else template
        if not isinstance(chosen, ChatTemplate):
            raise RequestError("template", f"{shown(chosen)} is not a ChatTemplate")
        text = await asyncio.to_thread(chosen.render, messages, **options)
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

    def attach(self, instrument: Instrument) -> None:
        """Let `instrument` see every step from now on; see `runtime.profiling.instrument`.

        Some steps are timed from then on, which costs under 2 % of the time.
        Raises: ConfigError where it is no `Instrument`.
        """
        if not isinstance(instrument, Instrument):
            raise ConfigError(f"instrument: {shown(instrument)} is not a runtime.Instrument")
        if self._steps.profiler is None:
            self._steps.profiler = Profiler(self.executor)
        self._steps.profiler.attach(instrument)

    def detach(self, instrument: Instrument) -> None:
        """Close an attached instrument; harmless for any other one."""
        if self._steps.profiler is not None and self._steps.profiler.detach(instrument):
            self._steps.profiler = None

    async def _let_instruments_go(self) -> None:
        profiler, self._steps.profiler = self._steps.profiler, None
        if profiler is not None:
            await asyncio.to_thread(profiler.close)

    @property
    def expert_totals(self) -> ExpertTotals | None:
        """Who served the routed experts so far; None: they do not move between CPU and GPU."""
        executor = self.executor
        return executor.expert_totals() if isinstance(executor, CountingExecutor) else None

    def statistics(self) -> Statistics:
        """A reading of everything that changes."""
        executor = self.executor
        counts = executor.layers_computed if isinstance(executor, LayerCountingExecutor) else {}
        return replace(
            self._slots.statistics(),
            experts=self.expert_totals,
            notices=self.notices.all,
            layers=dict(counts),
        )

    def describe(self) -> dict[str, object]:
        """Facts for /props and the console: context, device, choices and their reasons."""
        return {
            "n_ctx": self.shape.n_ctx,
            "n_ctx_sequence": self.shape.n_ctx_sequence,
            "n_parallel": self.shape.n_parallel,
            "n_batch": self.config.n_batch or self.executor.limits.max_step_tokens,
            "prefix_cache": self.config.prefix_cache,
            "device_reason": self._reason,
            **({} if self.plan is None else {"plan": self.plan.describe()}),
            "notices": self.notices.describe(),
            **self.executor.describe(),
        }

    async def resize(self, vram: float | None) -> int:
        """Use so many GiB of each GPU's memory, None: all that is free, and hold as many experts
        there as then fit; returns their bytes once they are there.

        Happens between two steps, and no bit of an answer changes.
        Raises: ConfigError where no GPU holds just some experts, or what else is there takes more;
        EngineClosed, DeviceError.
        """
        self._check_usable()
        if vram is not None and not is_gib(vram):
            raise ConfigError(f"vram = {shown(vram)}: use GiB, a number above 0, or None")
        executor = self.executor
        if not isinstance(executor, ResizableExecutor):
            raise ConfigError("vram: no GPU computes this model")
        limit = None if vram is None else int(vram * 2**30)
        return await self._steps.between_steps.result_of(lambda: executor.resize(limit))

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
        sizes = f"{model.n_vocab} {model.n_bytes}"
        cache = f"{config.cache_type_k} {config.cache_type_v}"
        return f"{model.architecture} {model.name} {sizes} {cache} {model.fingerprint}".rstrip()
