"""What a request is made into before it is queued: checked token ids, and a sampler an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from runtime.engine.candidate_sampler import CandidateSampler
from runtime.engine.params import SamplingParams
from runtime.engine.sampler import Sampler
from runtime.engine.sampling_vocabulary import SamplingVocabulary
from runtime.errors import ContextTooLong, RequestError


def checked_ids(ids: Sequence[int], n_vocab: int) -> list[int]:
    """Raises: RequestError where one is not a token of the model."""
    checked = list(ids)
    for token in checked:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < n_vocab:
            raise RequestError("prompt", f"{token!r} is not a token id (0 to {n_vocab - 1})")
    return checked


def check_length(ids: Sequence[int], n_ctx: int) -> None:
    """Raises: RequestError where there is none, ContextTooLong where none is left to generate."""
    if not ids:
        raise RequestError("prompt", "is empty: give at least one token")
    if len(ids) >= n_ctx:
        raise ContextTooLong(len(ids), n_ctx)


def samplers_of(
    params: SamplingParams,
    vocabulary: SamplingVocabulary,
    ids: list[int],
    n: int,
    *,
    candidates: bool,
) -> list[Sampler]:
    """Of n answers, each with its own seed; candidates: the executor may choose tokens itself."""
    kind = CandidateSampler if candidates else Sampler
    seeds = [params.seed + i if params.seed >= 0 else params.seed for i in range(n)]
    return [kind(replace(params, seed=seed), vocabulary, ids) for seed in seeds]
