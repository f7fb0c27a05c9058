"""CandidateSampler: a sampler whose first steps, or all of them, a device has done.

Where a chain begins with penalties and top-k, or is greedy, the k best logits are all that the rest
of it needs: `ops.gpu.sampling` finds them, and draws the token too if only top-p, min-p and
temperature follow.  The token is the one that `choose` takes from the whole row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ops.gpu.sampling import CHAIN, EDIT, MAX_K, PENALTIES
from runtime.engine import sampling_chain as chain
from runtime.engine.philox import uniform
from runtime.engine.sampler import Choice, Sampler, draw_index
from runtime.engine.sampling_chain import Candidates
from runtime.errors import ComputeError, RequestError

EDITS = "ed"
"""Samplers whose effect is an edit of single logits, in the device's order."""

CUTS = "pmt"
"""Samplers that the device does after top-k, in its order."""


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """What a device has to do for one output: see `ops.gpu.sampling`.

    k          candidates
    edits      `EDIT`[n]
    penalties  `PENALTIES`, one
    chain      `CHAIN`, one; None: the device leaves the draw to `choose_among`
    """

    k: int
    edits: NDArray[Any]
    penalties: NDArray[Any]
    chain: NDArray[Any] | None


class CandidateSampler(Sampler):
    """A `Sampler` that also works with a device."""

    def device_work(self, position: int) -> DeviceWork | None:
        """What a device can do for the token of `position`; None: it takes the whole row."""
        rows, params = self._chain, self.params
        letters = "".join(row.letter for row in rows)
        edits, top_k, rest = letters.partition("k")
        is_open = params.mirostat or self._adaptive or params.wants_logprobs
        if is_open or not _in_order(edits, EDITS):
            return None
        if self._greedy and not top_k:
            return DeviceWork(1, self._edits(edits), self._penalties(), self._draw(position))
        if not top_k or params.top_k > MAX_K:
            return None
        is_whole = _in_order(rest, CUTS) and params.dynatemp_range <= 0 and not self._greedy
        drawn = self._draw(position, rest) if is_whole else None
        return DeviceWork(params.top_k, self._edits(edits), self._penalties(), drawn)

    def choose_among(
        self, ids: NDArray[np.int32], logits: NDArray[np.float32], position: int
    ) -> Choice:
        """The token for `position` from the device's candidates: their ids and edited logits.

        Raises: as `choose`.
        """
        self.check_best(float(logits[0]), position)
        if len(ids) == 1:
            return Choice(int(ids[0]))
        candidates = Candidates(logits, ids.astype(np.intp), ordered=True)
        draws = iter(range(1, len(self._chain) + 1))
        step = chain.Step(
            uniform=lambda: uniform(self.seed, position, next(draws)),
            token_counts={},
            dry_penalties=dict,
        )
        letters = [row.letter for row in self._chain]
        for row in self._chain[letters.index("k") + 1 :]:
            candidates = row.apply(candidates, self.params, step)
        if self._greedy:
            return Choice(candidates.id_at(int(candidates.logits.argmax())))
        index = draw_index(chain.probabilities(candidates), uniform(self.seed, position))
        return Choice(candidates.id_at(index))

    def check_best(self, logit: float, position: int) -> None:
        """Raise what `choose` raises where the best edited logit allows no choice."""
        if math.isfinite(logit):
            return
        if logit == -math.inf and self._bias is not None:
            raise RequestError("logit_bias", "together with ignore_eos it forbids every token")
        raise ComputeError(f"the logits of position {position} are not finite")

    def _edits(self, letters: str) -> NDArray[Any]:
        """One entry for each token that a bias, a penalty or DRY changes."""
        counts = self._window.counts if "e" in letters else {}
        dry = self._dry_penalties() if "d" in letters else {}
        biases: dict[int, float] = {}
        if self._bias is not None:
            biases = dict(zip(self._bias[0].tolist(), self._bias[1].tolist(), strict=True))
        tokens = [t for t in {*biases, *counts, *dry} if 0 <= t < self._n_vocab]
        edits = np.zeros(len(tokens), EDIT)
        edits["id"] = tokens
        edits["count"] = [counts.get(token, 0) for token in tokens]
        edits["bias"] = [biases.get(token, 0.0) for token in tokens]
        edits["dry"] = [dry.get(token, 0.0) for token in tokens]
        return edits

    def _penalties(self) -> NDArray[Any]:
        made, params = np.zeros(1, PENALTIES), self.params
        made["repeat"] = params.repeat_penalty
        made["frequency"], made["presence"] = params.frequency_penalty, params.presence_penalty
        return made

    def _draw(self, position: int, letters: str = "") -> NDArray[Any]:
        made, params = np.zeros(1, CHAIN), self.params
        made["top_p"] = params.top_p if "p" in letters else 1.0
        made["log_min_p"] = math.log(params.min_p) if "m" in letters else -math.inf
        made["temperature"] = params.temperature if "t" in letters else 1.0
        made["min_keep"], made["position"], made["seed"] = params.min_keep, position, self.seed
        return made


def _in_order(letters: str, order: str) -> bool:
    """Whether `letters` are some of `order`, each once at most and in that order."""
    rest = iter(order)
    return all(letter in rest for letter in letters)
