"""Choosing: an answer's next token, from logits or what the executor chose; errors are values.

Whatever a sampler raises ends its own answer alone: the others go on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from runtime.engine.answer import Answer
from runtime.engine.candidate_sampler import CandidateSampler
from runtime.engine.sampler import Choice
from runtime.engine.step import F32, Chosen, DeviceWork
from runtime.errors import EngineBug, EngineError

logger = logging.getLogger(__name__)


def choose(answer: Answer, logits: F32) -> Choice | EngineError:
    """The answer's next token, or why there is none."""
    return _outcome(lambda: answer.sampler.choose(logits, len(answer.sequence.tokens)))


def choose_chosen(
    answer: Answer, work: DeviceWork, chosen: Chosen, row: int
) -> Choice | EngineError:
    """The same where the executor did `work` for the output `row`."""
    sampler = answer.sampler
    if not isinstance(sampler, CandidateSampler):
        return EngineBug(f"a {type(sampler).__name__} got candidates")
    return _outcome(lambda: sampler.choice_of(work, chosen, row, len(answer.sequence.tokens)))


def _outcome(work: Callable[[], Choice]) -> Choice | EngineError:
    try:
        return work()
    except EngineError as error:
        return error
    except Exception as error:
        logger.exception("a sampler failed")
        return EngineBug(f"the sampler failed: {error!r}")
