"""A step that chooses more tokens than a class has room for: several graphs, one result."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from ops.gpu.sampling import MAX_K
from runtime.engine.executor import StepInFlight
from runtime.engine.gpu.step_shape import part_of
from runtime.engine.step import I32, Chosen, Step, StepResult

N_AHEAD = 2
"""Parts in flight: their sequences differ, so one need not wait for what another one chooses."""


class PartsExecutor(Protocol):
    @property
    def runs_ahead(self) -> bool: ...

    async def begin_part(self, part: Step, cells: I32) -> StepInFlight: ...


class PartsInFlight:
    """See `StepInFlight`: the last parts are in flight, the others have ended."""

    def __init__(self, ended: Sequence[StepResult], flights: Sequence[StepInFlight]) -> None:
        self._ended, self._flights = ended, flights

    async def result(self) -> StepResult:
        last = [kept(await flight.result()) for flight in self._flights]
        return joined([*self._ended, *last])


async def in_parts(
    executor: PartsExecutor, step: Step, cells: I32, spans: Sequence[slice]
) -> PartsInFlight:
    """Begin a step in parts, each behind the one before it; the last of them are in flight then.

    cells: the page that holds each token
    Raises: as `SamplingExecutor.begin`.
    """
    ended: list[StepResult] = []
    flights: deque[StepInFlight] = deque()
    for index, span in enumerate(spans):
        if len(flights) == N_AHEAD:
            ended.append(kept(await flights.popleft().result()))
        part, _ = part_of(step, span)
        part = replace(part, follows=index > 0 and executor.runs_ahead)
        flights.append(await executor.begin_part(part, cells[span]))
    return PartsInFlight(ended, flights)


def kept(result: StepResult) -> StepResult:
    """The same with candidates that stay as they are when other steps end."""
    chosen = result.chosen
    if chosen is None or chosen.ids is None or chosen.values is None:
        return result
    own = Chosen(chosen.tokens, chosen.ids.copy(), chosen.values.copy())
    return StepResult(result.logits, result.not_finite, own, result.uses)


def joined(parts: Sequence[StepResult]) -> StepResult:
    """The result of a step from those of its parts, whose outputs follow each other."""
    found = [part.chosen or Chosen([]) for part in parts]
    firsts = np.cumsum([0, *(len(chosen.tokens) for chosen in found)]).tolist()
    tokens = [token for chosen in found for token in chosen.tokens]
    wrong = [first + i for first, part in zip(firsts, parts, strict=False) for i in part.not_finite]
    logits = np.empty((len(tokens), 0), np.float32)
    uses = tuple(use for part in parts for use in part.uses)
    return StepResult(logits, tuple(wrong), _candidates(found, tokens), uses)


def _candidates(found: Sequence[Chosen], tokens: list[int]) -> Chosen:
    """Of all parts; where a part has only its tokens, each is its output's one candidate."""
    if all(chosen.ids is None for chosen in found):
        return Chosen(tokens)
    ids = np.zeros((len(tokens), MAX_K), np.int32)
    values = np.zeros((len(tokens), MAX_K), np.float32)
    ids[:, 0], first = tokens, 0
    for chosen in found:
        rows = slice(first, first + len(chosen.tokens))
        if chosen.ids is not None and chosen.values is not None:
            ids[rows], values[rows] = chosen.ids, chosen.values
        first = rows.stop
    return Chosen(tokens, ids, values)
