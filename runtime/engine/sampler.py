"""Sampler: chooses one sequence's next token from a row of logits.

Holds what a sequence's past means for its next token (penalty window, the memories of mirostat and
adaptive-p) and nothing else; random numbers come from (seed, position), so a choice depends on
neither batch nor executor.
"""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from runtime.engine import sampling_chain as chain
from runtime.engine.params import RANDOM_SEED, SamplingParams
from runtime.engine.philox import uniform
from runtime.engine.sampling_chain import Candidates
from runtime.engine.sampling_history import TokenWindow, dry_penalties
from runtime.engine.sampling_vocabulary import SamplingVocabulary
from runtime.errors import ComputeError, EngineBug, RequestError

TokenProbs = tuple[tuple[int, float], ...]
ONE_PASS = "eds"  # samplers that look at all logits once, at most, and exponentiate none


@dataclass(frozen=True, slots=True)
class Choice:
    """A chosen token and, where the params ask for them, figures about it.

    logprob, top_logprobs  natural logs from the raw logits; logprob also outside the top list
    prob, top_probs        after the whole chain, without zeros (`post_sampling_probs`)
    Both lists are (token id, figure) pairs, most likely first.
    """

    id: int
    logprob: float | None = None
    top_logprobs: TokenProbs = ()
    prob: float | None = None
    top_probs: TokenProbs = ()


class Sampler:
    """One sequence's sampler; the caller gives it every token of the sequence by `accept`.

    is_quick   a pass or two over the logits leave few candidates: the work is small
    """

    def __init__(
        self, params: SamplingParams, vocabulary: SamplingVocabulary, prompt: Sequence[int] = ()
    ) -> None:
        """Raises: RequestError where params need a tokenizer that the model lacks."""
        self.params = params
        self.seed = secrets.randbelow(RANDOM_SEED) if params.seed < 0 else params.seed
        self._n_vocab = vocabulary.n_vocab
        self._bias = _bias_arrays(params, vocabulary)
        self._chain, self._greedy = _plan(params)
        head, top_k, _ = "".join([row.letter for row in self._chain]).partition("k")
        few_left = bool(top_k or self._greedy) and set(head) <= set(ONE_PASS)
        self.is_quick = few_left and not params.wants_logprobs
        self._adaptive = _runs("adaptive_p", params)
        self._window = TokenWindow(params.repeat_last_n if _runs("penalties", params) else 0)
        self._dry_tokens: deque[int] = deque(maxlen=0)
        if _runs("dry", params):
            self._dry_tokens = deque(maxlen=params.dry_penalty_last_n)
            self._breakers = vocabulary.breakers(params.dry_sequence_breakers)
        self._mirostat_mu = 2 * params.mirostat_tau
        self._adaptive_weight = 1 / (1 - params.adaptive_decay)
        self._adaptive_sum = params.adaptive_target * self._adaptive_weight
        self._pending: tuple[int, float] | None = None  # chosen token, its probability
        n_remembered = max(self._window.tokens.maxlen or 0, self._dry_tokens.maxlen or 0)
        for token in prompt[-n_remembered:] if n_remembered else ():
            self.accept(token)

    def accept(self, token: int) -> None:
        """Note that the sequence goes on with `token`, chosen or given."""
        self._window.push(token)
        self._dry_tokens.append(token)
        pending, self._pending = self._pending, None
        if pending is None or pending[0] != token:
            return
        if self.params.mirostat:
            surprise = -math.log2(pending[1])
            self._mirostat_mu -= self.params.mirostat_eta * (surprise - self.params.mirostat_tau)
        elif self._adaptive:
            decay = self.params.adaptive_decay
            self._adaptive_sum = pending[1] + decay * self._adaptive_sum
            self._adaptive_weight = 1 + decay * self._adaptive_weight

    def choose(self, logits: NDArray[np.float32], position: int) -> Choice:
        """The token for `position` of the sequence.

        logits  f32[n_vocab], left as they are
        Raises: ComputeError where a logit is NaN or +inf, or all are -inf; RequestError where the
        request's own biases forbid every token.
        """
        if logits.shape != (self._n_vocab,):
            raise EngineBug(f"logits of shape {logits.shape} for a vocabulary of {self._n_vocab}")
        winner = int(logits.argmax())
        if not math.isfinite(logits[winner]):
            raise ComputeError(f"the logits of position {position} are not finite")
        if self._greedy and not self._chain and self._bias is None:
            return self._report(logits, winner, Candidates(logits), None, 0)
        candidates = self._run_chain(logits, position)
        if self._greedy:
            index = int(candidates.logits.argmax())
            return self._report(logits, candidates.id_at(index), candidates, None, index)
        candidates, remembered = self._reshape(candidates)
        probs = chain.probabilities(candidates)
        index = draw_index(probs, uniform(self.seed, position))
        token = candidates.id_at(index)
        self._pending = token, float((probs if remembered is None else remembered)[index])
        return self._report(logits, token, candidates, probs, index)

    def _run_chain(self, logits: NDArray[np.float32], position: int) -> Candidates:
        candidates = Candidates(logits)
        if self._bias is not None:
            candidates = chain.add_bias(candidates, *self._bias)
            if candidates.logits.max() == -np.inf:
                raise RequestError("logit_bias", "together with ignore_eos it forbids every token")
        draws = count(1)
        step = chain.Step(
            uniform=lambda: uniform(self.seed, position, next(draws)),
            token_counts=self._window.counts,
            dry_penalties=self._dry_penalties,
        )
        for row in self._chain:
            candidates = row.apply(candidates, self.params, step)
        return candidates

    def _dry_penalties(self) -> dict[int, float]:
        params = self.params
        return dry_penalties(
            tuple(self._dry_tokens),
            self._breakers,
            params.dry_multiplier,
            params.dry_base,
            params.dry_allowed_length,
        )

    def _reshape(self, candidates: Candidates) -> tuple[Candidates, NDArray[np.float64] | None]:
        """What mirostat or adaptive-p make of the candidates; the probabilities `accept` needs."""
        if self.params.mirostat == 1:
            return chain.mirostat_1_cut(candidates, self._mirostat_mu, self._n_vocab), None
        if self.params.mirostat == 2:
            return chain.mirostat_2_cut(candidates, self._mirostat_mu), None
        if self._adaptive:
            probs = chain.probabilities(candidates)
            target = 2 * self.params.adaptive_target - self._adaptive_sum / self._adaptive_weight
            return chain.adapt(candidates, probs, min(max(target, 0.0), 1.0)), probs
        return candidates, None

    def _report(
        self,
        logits: NDArray[np.float32],
        token: int,
        candidates: Candidates,
        probs: NDArray[np.float64] | None,
        index: int,
    ) -> Choice:
        """The choice with the figures that were asked for; probs None: `token` was certain."""
        n = self.params.n_probs
        if not self.params.wants_logprobs:
            return Choice(token)
        if not self.params.post_sampling_probs:
            logprob, top = raw_logprobs(logits, token, n)
            return Choice(token, logprob=logprob, top_logprobs=top)
        if probs is None:
            return Choice(token, prob=1.0, top_probs=((token, 1.0),) if n else ())
        order = np.argsort(-probs, kind="stable")[:n]
        listed = tuple((candidates.id_at(int(i)), float(probs[i])) for i in order if probs[i] > 0)
        return Choice(token, prob=float(probs[index]), top_probs=listed)


def draw_index(probs: NDArray[np.float64], number: float) -> int:
    """The first index whose cumulative probability exceeds `number` in [0, 1); never a zero."""
    cumulative = probs.cumsum()
    return int(cumulative.searchsorted(number * cumulative[-1], side="right"))


def raw_logprobs(logits: NDArray[np.float32], token: int, n: int) -> tuple[float, TokenProbs]:
    """Natural log-probability of `token` and of the n most likely tokens, in f64."""
    z = logits.astype(np.float64)
    largest = float(z.max())
    total = largest + math.log(float(np.exp(z - largest).sum()))
    top: TokenProbs = ()
    if n:
        order = chain.best(Candidates(logits), min(n, len(logits)))
        top = tuple(
            (order.id_at(i), float(z[order.id_at(i)]) - total) for i in range(len(order.logits))
        )
    return float(z[token]) - total, top


def _runs(name: str, params: SamplingParams) -> bool:
    return not params.mirostat and name in params.samplers and chain.SAMPLERS[name].is_on(params)


def _plan(params: SamplingParams) -> tuple[tuple[chain.SamplerRow, ...], bool]:
    """The rows of the chain that do something, and whether its end is simply the best candidate."""
    if params.mirostat:
        return ((), True) if params.temperature <= 0 else ((chain.PLAIN_TEMPERATURE,), False)
    is_greedy = params.temperature <= 0 and params.dynatemp_range <= 0
    rows: list[chain.SamplerRow] = []
    for name in params.samplers:
        if name == "temperature" and is_greedy:
            while rows and rows[-1].keeps_best:
                rows.pop()
            return tuple(rows), True
        row = chain.SAMPLERS[name]
        if name != "adaptive_p" and row.is_on(params):
            rows.append(row)
    return tuple(rows), False


def _bias_arrays(
    params: SamplingParams, vocabulary: SamplingVocabulary
) -> tuple[NDArray[np.intp], NDArray[np.float32]] | None:
    """logit_bias and ignore_eos as (ids, biases), one entry a token of the vocabulary, or None."""
    total: dict[int, float] = {}
    for token, bias in params.biases:
        ids = vocabulary.tokens_of("logit_bias", token) if isinstance(token, str) else (token,)
        for i in ids:
            total[i] = total.get(i, 0.0) + float(bias)
    if params.ignore_eos:
        total.update(dict.fromkeys(vocabulary.end_ids, -math.inf))
    kept = {i: bias for i, bias in total.items() if 0 <= i < vocabulary.n_vocab}
    if not kept:
        return None
    biases = chain.bounded(np.array(list(kept.values()), np.float64))
    return np.array(list(kept), dtype=np.intp), biases.astype(np.float32)
