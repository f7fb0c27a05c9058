"""Answer: turns a sequence's chosen tokens into the items its caller reads, and sees its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol

from runtime.engine.sampler import Choice, Sampler
from runtime.engine.sequence import Sequence, TokenChannel
from runtime.engine.stop_strings import StopStrings
from runtime.engine.token import (
    FinishReason,
    PromptProgress,
    StopType,
    Timings,
    Token,
    TokenProbability,
)
from runtime.experts.totals import RequestUse

Ending = tuple[FinishReason, StopType, str]


class Detokenizer(Protocol):
    """Ids in, complete characters out."""

    def push(self, token_id: int, /) -> str: ...

    def flush(self) -> str: ...


class Vocabulary(Protocol):
    """The part of a tokenizer that answers use."""

    @property
    def n_vocab(self) -> int: ...

    def token_bytes(self, token_id: int, /) -> bytes: ...

    def is_end(self, token_id: int, /) -> bool: ...

    def detokenizer(self, special: bool = False) -> Detokenizer: ...


class Answer:
    """One completion of a request: its sequence, its sampler, its text so far."""

    def __init__(
        self,
        sequence: Sequence,
        sampler: Sampler,
        vocabulary: Vocabulary | None,
        channel: TokenChannel,
        *,
        n_ctx: int,
        index: int = 0,
        special: bool = False,
        on_progress: Callable[[PromptProgress], None] | None = None,
    ) -> None:
        """n_ctx: tokens the sequence may have at most; vocabulary None: ids only, no text.

        special: control tokens are part of the text.

        has_begun says whether `begin` was called; params are the sampler's; use: of experts.
        """
        self.sequence = sequence
        self.sampler = sampler
        self.params = sampler.params
        self.channel = channel
        self.index = index
        self.has_begun = False
        self.use = RequestUse()
        self.has_new_line = False
        self._vocabulary = vocabulary
        self._detokenizer = vocabulary.detokenizer(special) if vocabulary else None
        self._stops = StopStrings(self.params.stop)
        self._n_ctx = n_ctx
        self._on_progress = on_progress
        self._began = self._first_token = time.perf_counter()

    @property
    def n_remain(self) -> int:
        """Tokens it may still generate; -1: as many as the context holds."""
        if self.params.max_tokens is None:
            return -1
        return max(self.params.max_tokens - self.sequence.n_generated, 0)

    @property
    def ends_next(self) -> bool:
        """Whether the next token is its last, whatever it is."""
        return self.n_remain == 1 or len(self.sequence.tokens) + 1 >= self._n_ctx

    def begin(self) -> None:
        """Its first step is about to run: the prompt's time starts here, not in the queue."""
        self.has_begun = True
        self._began = self._first_token = time.perf_counter()

    def report_progress(self) -> None:
        """Tell the caller how far the prompt is read; what the callback raises, the caller gets."""
        if self._on_progress is None:
            return
        sequence = self.sequence
        ms = 1e3 * (time.perf_counter() - self._began)
        n_processed = min(sequence.n_computed, sequence.n_prompt)
        try:
            self._on_progress(
                PromptProgress(self.index, sequence.n_prompt, sequence.n_cached, n_processed, ms)
            )
        except Exception as error:  # other callers' answers go on
            self._on_progress = None
            self.channel.put(error)

    def take(self, choice: Choice) -> bool:
        """Append the chosen token and send its item; True where the answer ends with it."""
        now = time.perf_counter()
        sequence = self.sequence
        if sequence.n_generated == 0:
            self._first_token = now
        sequence.tokens.append(choice.id)
        self.sampler.accept(choice.id)
        text, ending = self._read(choice.id, now)
        if ending is not None and ending[1] != "word":
            text += self._flush()
        if ending is None or ending[1] != "eos":
            self.has_new_line = self.has_new_line or "\n" in text
        logprob, tops = self._probabilities(choice)
        self._send(choice.id, text, ending, now, logprob, tops)
        return ending is not None

    def fill_only(self) -> None:
        """The prompt is computed and no token is wanted: send the single closing item."""
        self._send(None, "", ("length", "limit", ""), time.perf_counter(), None, ())

    def _read(self, token_id: int, now: float) -> tuple[str, Ending | None]:
        """The text that became certain with a token, and how the answer ends, if it does."""
        vocabulary, detokenizer = self._vocabulary, self._detokenizer
        if vocabulary is not None and detokenizer is not None:
            if vocabulary.is_end(token_id):
                return "", ("stop", "eos", "")
            # A padded output layer has more rows than the tokenizer has tokens.
            is_known = token_id < vocabulary.n_vocab
            text, stop = self._stops.push(detokenizer.push(token_id) if is_known else "")
            if stop:
                return text, ("stop", "word", stop)
        else:
            text = ""
        late = 0 < self.params.t_max_predict_ms < 1e3 * (now - self._first_token)
        is_full = len(self.sequence.tokens) >= self._n_ctx
        if is_full or self.n_remain == 0 or (late and (self.has_new_line or "\n" in text)):
            return text, ("length", "limit", "")
        return text, None

    def _flush(self) -> str:
        """The text that was held back; even that may still hold a stop string."""
        if self._detokenizer is None:
            return ""
        text, stop = self._stops.push(self._detokenizer.flush())
        return text if stop else text + self._stops.flush()

    def _probabilities(self, choice: Choice) -> tuple[float | None, tuple[TokenProbability, ...]]:
        if not self.params.wants_logprobs:
            return None, ()
        if self.params.post_sampling_probs:
            return choice.prob, self._candidates(choice.top_probs)
        return choice.logprob, self._candidates(choice.top_logprobs)

    def _candidates(self, pairs: Iterable[tuple[int, float]]) -> tuple[TokenProbability, ...]:
        return tuple(TokenProbability(i, self._bytes(i), value) for i, value in pairs)

    def _bytes(self, token_id: int | None) -> bytes:
        vocabulary = self._vocabulary
        if vocabulary is None or token_id is None or token_id >= vocabulary.n_vocab:
            return b""
        return vocabulary.token_bytes(token_id)

    def _send(
        self,
        token_id: int | None,
        text: str,
        ending: Ending | None,
        now: float,
        logprob: float | None,
        tops: tuple[TokenProbability, ...],
    ) -> None:
        sequence = self.sequence
        reason, stop_type, word = ending or (None, None, "")
        self.channel.put(
            Token(
                index=self.index,
                id=token_id,
                text=text,
                bytes=self._bytes(token_id),
                slot=sequence.slot,
                n_prompt=sequence.n_prompt,
                n_cached=sequence.n_cached,
                n_generated=sequence.n_generated,
                logprob=logprob,
                top_logprobs=tops,
                finish_reason=reason,
                stop_type=stop_type,
                stopping_word=word,
                truncated=stop_type == "limit" and len(sequence.tokens) >= self._n_ctx,
                timings=None if ending is None else self._timings(now),
            )
        )

    def _timings(self, now: float) -> Timings:
        sequence = self.sequence
        if not sequence.n_generated:
            self._first_token = now
        has_used = self.use.uses > 0
        return Timings(
            cache_n=sequence.n_cached,
            prompt_n=sequence.n_prompt - sequence.n_cached,
            prompt_ms=1e3 * (self._first_token - self._began),
            predicted_n=sequence.n_generated,
            predicted_ms=1e3 * (now - self._first_token),
            expert_hit_rate=self.use.hit_rate if has_used else None,
            expert_miss_bytes=self.use.miss_bytes if has_used else None,
        )
