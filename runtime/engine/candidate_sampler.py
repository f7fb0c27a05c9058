"""CandidateSampler: a sampler whose first steps, or all of them, a device has done.

Where a chain begins with penalties and top-k, or is greedy, the k best logits are all that the rest
of it needs: `ops.gpu.sampling` finds them, and draws the token too if only top-p, min-p and
temperature follow.  The token is the one that `choose` takes from the whole row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ops.gpu.sampling import CHAIN, EDIT, MAX_K, PENALTIES
from runtime.engine import sampling_chain as chain
from runtime.engine.params import SamplingParams
from runtime.engine.philox import uniform
from runtime.engine.sampler import Choice, Sampler, draw_index
from runtime.engine.sampling_chain import Candidates
from runtime.engine.sampling_vocabulary import SamplingVocabulary
from runtime.engine.step import Chosen, DeviceWork
from runtime.errors import ComputeError, RequestError

EDITS = "ed"
"""Samplers whose effect is an edit of single logits, in the device's order."""

CUTS = "pmt"
"""Samplers that the device does after top-k, in its order."""

TAME = 1e30
"""Edits up to here, and temperatures down to its inverse, keep the device's f32 finite."""


class CandidateSampler(Sampler):
    """A `Sampler` that also works with a device.

    runs_ahead  the device alone chooses, and its work does not depend on the tokens before: that
                for a later position is known before the tokens up to it are
    """

    def __init__(
        self, params: SamplingParams, vocabulary: SamplingVocabulary, prompt: Sequence[int] = ()
    ) -> None:
        """Raises: RequestError where params need a tokenizer that the model lacks."""
        super().__init__(params, vocabulary, prompt)
        self._edited = ""  # letters of the samplers whose edits change from token to token
        self._work = self._plain_work()
        draws = self._work is not None and self._work.chain is not None
        self.runs_ahead = draws and not self._edited

    def device_work(self, position: int) -> DeviceWork | None:
        """What a device can do for the token of `position`; None: it takes the whole row."""
        work = self._work
        if work is None or (work.k == 1 and not self._edited):
            return work
        drawn = work.chain
        if drawn is not None:
            drawn = drawn.copy()
            drawn["position"] = position
        edits = self._edits(self._edited) if self._edited else work.edits
        return DeviceWork(work.k, edits, work.penalties, drawn)

    def choice_of(self, work: DeviceWork, chosen: Chosen, row: int, position: int) -> Choice:
        """The token for `position` from what a device made of `work`, the step's output `row`.

        Raises: as `choose`.
        """
        if chosen.ids is None or chosen.values is None:
            return Choice(chosen.tokens[row])
        n = min(work.k, self._n_vocab)
        if work.chain is None:
            return self.choose_among(chosen.ids[row, :n], chosen.values[row, :n], position)
        self.check_best(float(chosen.values[row, 0]), position)
        return Choice(chosen.tokens[row])

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

    def _plain_work(self) -> DeviceWork | None:
        """The work without what changes from token to token; sets `_edited`."""
        rows, params = self._chain, self.params
        letters = "".join(row.letter for row in rows)
        edits, top_k, rest = letters.partition("k")
        is_open = params.mirostat or self._adaptive or params.wants_logprobs
        if is_open or not self._is_tame() or not _in_order(edits, EDITS):
            return None
        if self._greedy and not top_k:
            k, rest, is_whole = 1, "", True
        elif not top_k or params.top_k > MAX_K:
            return None
        else:
            is_whole = _in_order(rest, CUTS) and params.dynatemp_range <= 0 and not self._greedy
            k = params.top_k
        self._edited = edits
        drawn = self._draw(rest) if is_whole else None
        return DeviceWork(k, self._edits(""), self._penalties(), drawn)

    def _is_tame(self) -> bool:
        """Whether no number of the request can make a logit infinite: those are the host's."""
        params = self.params
        edits = [params.frequency_penalty, params.presence_penalty, params.dry_multiplier]
        edits += [params.repeat_penalty, 1 / params.repeat_penalty]
        edits += [] if self._bias is None else self._bias[1][np.isfinite(self._bias[1])].tolist()
        is_warm = params.temperature <= 0 or params.temperature >= 1 / TAME
        return is_warm and max(map(abs, edits)) <= TAME

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

    def _draw(self, letters: str) -> NDArray[Any]:
        made, params = np.zeros(1, CHAIN), self.params
        made["top_p"] = params.top_p if "p" in letters else 1.0
        made["log_min_p"] = math.log(params.min_p) if "m" in letters else -math.inf
        made["temperature"] = params.temperature if "t" in letters else 1.0
        made["min_keep"], made["seed"] = params.min_keep, self.seed
        return made


def _in_order(letters: str, order: str) -> bool:
    """Whether `letters` are some of `order`, each once at most and in that order."""
    rest = iter(order)
    return all(letter in rest for letter in letters)
