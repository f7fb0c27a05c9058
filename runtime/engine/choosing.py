"""Choosing: an answer's next token, from logits or what the executor chose; errors are values."""

from __future__ import annotations

from runtime.engine.answer import Answer
from runtime.engine.candidate_sampler import CandidateSampler
from runtime.engine.sampler import Choice
from runtime.engine.step import F32, Chosen, DeviceWork
from runtime.errors import EngineBug, EngineError


def choose(answer: Answer, logits: F32) -> Choice | EngineError:
    """The answer's next token, or why there is none."""
    try:
        return answer.sampler.choose(logits, len(answer.sequence.tokens))
    except EngineError as error:
        return error


def choose_chosen(
    answer: Answer, work: DeviceWork, chosen: Chosen, row: int
) -> Choice | EngineError:
    """The same where the executor did `work` for the output `row`."""
    sampler = answer.sampler
    if not isinstance(sampler, CandidateSampler):
        return EngineBug(f"a {type(sampler).__name__} got candidates")
    try:
        return sampler.choice_of(work, chosen, row, len(answer.sequence.tokens))
    except EngineError as error:
        return error
