"""What a request is made into before it is queued: checked parts, and a sampler an answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace

from runtime.checks import check_flags, shown
from runtime.engine.candidate_sampler import CandidateSampler
from runtime.engine.params import SamplingParams
from runtime.engine.sampler import Sampler
from runtime.engine.sampling_vocabulary import SamplingVocabulary
from runtime.errors import ContextTooLong, RequestError

MOST_ANSWERS = 1024
"""To one prompt: each keeps a list of its tokens."""


def checked_ids(ids: Sequence[int], n_vocab: int) -> list[int]:
    """Raises: RequestError where one is not a token of the model."""
    if not isinstance(ids, Iterable) or isinstance(ids, bytes | bytearray | Mapping | Set):
        raise RequestError("prompt", f"{shown(ids)} is neither a text nor a list of token ids")
    checked = list(ids)
    for token in checked:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < n_vocab:
            raise RequestError("prompt", f"{shown(token)} is not a token id (0 to {n_vocab - 1})")
    return checked


def check_options(params: SamplingParams, n: int, on_progress: object, **flags: object) -> None:
    """Raises: RequestError where one of a request's options is of the wrong kind or size."""
    if not isinstance(params, SamplingParams):
        raise RequestError("params", f"{shown(params)} is not a runtime.SamplingParams")
    if type(n) is not int or not 1 <= n <= MOST_ANSWERS:
        raise RequestError("n", f"{shown(n)}: use a whole number of 1 to {MOST_ANSWERS}")
    if on_progress is not None and not callable(on_progress):
        raise RequestError("on_progress", f"{shown(on_progress)} cannot be called")
    check_flags(**flags)


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
