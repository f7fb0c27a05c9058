"""The samplers: pure functions from candidates to candidates, and the table that names them.

Formulas and order are llama.cpp's.  z are the logits of the candidates still in the race and
p = softmax(z).  Logits stay f32 until few candidates are left; sums and exponentials are f64.
Equal logits are ordered by token id, so that a selection never depends on a sort's habits.
No edit makes a logit infinite: whatever numbers a request holds, one candidate stays possible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from runtime.engine.params import SamplingParams

Floats = NDArray[np.float32]
Ids = NDArray[np.intp]

SETS_PER_BEST = 8  # for each of the best wanted, sets whose maxima stand for them in `largest`
MIN_SETS = 512
FEW = 256  # up to here a full sort costs less than looking for the best first
FEW_TO_SORT = 1024  # up to here a stable argsort costs less than sorting keys
FIRST_GUESS = 256  # candidates that usually hold top_p of the whole
MAX_LOGIT = 3e38  # what fits f32; edits beyond it end here
MIN_TEMPERATURE = 1e-30  # below it only the best is left, whatever the logits


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens still in the race.

    logits   f32[n]   -inf: forbidden, yet counted as a candidate
    ids      intp[n]      None: the whole vocabulary, ids = 0..n-1
    ordered  best first
    """

    logits: Floats
    ids: Ids | None = None
    ordered: bool = False

    def take(self, index: Ids | slice, *, ordered: bool) -> Candidates:
        """The candidates at `index`, in that order."""
        if self.ids is not None:
            ids = self.ids[index]
        else:
            ids = np.arange(len(self.logits))[index] if isinstance(index, slice) else index
        return Candidates(self.logits[index], ids, ordered)

    def id_at(self, index: int) -> int:
        return index if self.ids is None else int(self.ids[index])


@dataclass(frozen=True, slots=True)
class Step:
    """What a sampler may know besides the candidates."""

    uniform: Callable[[], float]  # the position's next number in [0, 1)
    token_counts: Mapping[int, int]  # of the last repeat_last_n tokens
    dry_penalties: Callable[[], Mapping[int, float]]


@dataclass(frozen=True, slots=True)
class SamplerRow:
    """A sampler.

    letter      its place in `--sampler-seq`
    is_on       whether these params make it do anything
    apply       its formula
    keeps_best  it never drops the best candidate: it may be left out before a greedy choice
    """

    letter: str
    is_on: Callable[[SamplingParams], bool]
    apply: Callable[[Candidates, SamplingParams, Step], Candidates]
    keeps_best: bool = False


def probabilities(candidates: Candidates) -> NDArray[np.float64]:
    """Softmax of the candidates' logits, f64[n]."""
    z = candidates.logits.astype(np.float64)
    z -= z[0] if candidates.ordered else z.max()
    weights: NDArray[np.float64] = np.exp(z, out=z)
    weights /= weights.sum()
    return weights


def best(candidates: Candidates, k: int) -> Candidates:
    """The k candidates with the largest logits, best first."""
    if candidates.ordered:
        return candidates.take(slice(0, k), ordered=True)
    return candidates.take(largest(candidates.logits, k), ordered=True)


def largest(z: Floats, k: int) -> Ids:
    """Where the k largest of f32[n] stand, largest first, equal ones by index."""
    n = len(z)
    n_sets = max(SETS_PER_BEST * k, MIN_SETS)
    if n <= FEW or 4 * k > n:
        return descending(z)[:k]
    if 2 * n_sets <= n:
        # The k-th largest of the sets' maxima cannot exceed the k-th largest logit, and few others
        # reach it.  Every n_sets-th logit makes a set: that is a maximum of whole vectors.
        maxima = z[: n - n % n_sets].reshape(-1, n_sets).max(axis=0)
        maxima.partition(n_sets - k)
        bound = maxima[n_sets - k]
    else:
        bound = np.partition(z, n - k)[n - k]
    index: Ids = (z >= bound).nonzero()[0]
    return index[descending(z[index])[:k]]


def descending(z: Floats) -> Ids:
    """The order from the largest to the smallest of f32[n], equal ones by index.

    Many are sorted as one u64 each, (inverted bits, index): 8 times faster than a stable argsort
    of 150,000.
    """
    if len(z) <= FEW_TO_SORT:
        return (-z).argsort(kind="stable")
    bits = (z + np.float32(0)).view(np.uint32)  # + 0: -0 equals 0
    ascending = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    keys = (~ascending).astype(np.uint64) << np.uint64(32)
    keys |= np.arange(len(z), dtype=np.uint64)
    keys.sort()
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.intp)


def add_bias(candidates: Candidates, ids: Ids, biases: NDArray[np.float32]) -> Candidates:
    """z + bias for the whole vocabulary's tokens `ids`."""
    z = candidates.logits.copy()
    z[ids] = bounded(z[ids].astype(np.float64) + biases)
    return Candidates(z)


def penalize(
    candidates: Candidates,
    counts: Mapping[int, int],
    repeat: float,
    frequency: float,
    presence: float,
) -> Candidates:
    """Tokens seen: z/repeat if z > 0 else z*repeat, then - count*frequency - presence."""
    index, tokens = _seen(candidates, counts)
    if not len(index):
        return candidates
    z = candidates.logits.copy()
    old = z[index].astype(np.float64)
    seen = np.array([counts[token] for token in tokens], dtype=np.float64)
    new = np.where(old > 0, old / repeat, old * repeat) - seen * frequency - presence
    z[index] = bounded(new)
    return Candidates(z, candidates.ids)


def subtract(candidates: Candidates, penalties: Mapping[int, float]) -> Candidates:
    """z - penalty of the token (DRY)."""
    index, tokens = _seen(candidates, penalties)
    if not len(index):
        return candidates
    z = candidates.logits.copy()
    z[index] = bounded(z[index] - np.array([penalties[token] for token in tokens]))
    return Candidates(z, candidates.ids)


def top_n_sigma(candidates: Candidates, n: float) -> Candidates:
    """Forbid z < max - n * sigma, sigma over the finite logits."""
    z = candidates.logits
    if len(z) <= 1:
        return candidates
    deviations = (z if z.min() > -np.inf else z[z > -np.inf]).astype(np.float64)
    top = float(deviations.max())
    deviations -= deviations.mean()
    variance = float(np.einsum("i,i->", deviations, deviations)) / len(deviations)
    bound = max(top - n * math.sqrt(variance), -MAX_LOGIT)
    return Candidates(np.where(z < bound, -np.inf, z), candidates.ids, candidates.ordered)


def leading(keys: Floats, probs: NDArray[np.float64], p: float, *, beyond: bool) -> Ids:
    """The shortest run by descending key whose probabilities sum to at least p (`beyond`: more)."""
    size = FIRST_GUESS
    while True:
        index = largest(keys, size)
        side: Literal["left", "right"] = "right" if beyond else "left"
        count = int(probs[index].cumsum().searchsorted(p, side=side)) + 1
        if count <= len(index) or size >= len(keys):
            return index[:count]
        size *= 16


def typical(candidates: Candidates, p: float, min_keep: int) -> Candidates:
    """Those whose surprise is nearest to the entropy, until they hold more than p of the whole."""
    probs = probabilities(candidates)
    possible = probs > 0  # what an earlier sampler forbade has no logarithm
    surprise = -np.log(probs, where=possible, out=np.full(len(probs), -np.inf))
    entropy = float(np.sum(probs[possible] * surprise[possible]))
    nearness = -np.abs(surprise - entropy).astype(np.float32)
    index = leading(nearness, probs, p, beyond=True)
    if len(index) < min_keep:
        index = largest(nearness, min_keep)
    return candidates.take(index, ordered=False)


def top_p(candidates: Candidates, p: float, min_keep: int) -> Candidates:
    """The shortest run of best candidates that holds at least p of the whole."""
    probs = probabilities(candidates)
    if candidates.ordered:
        count = int(probs.cumsum().searchsorted(p, side="left")) + 1
        return candidates.take(slice(0, max(count, min_keep)), ordered=True)
    index = leading(candidates.logits, probs, p, beyond=False)
    if len(index) < min_keep:
        return best(candidates, min_keep)
    return candidates.take(index, ordered=True)


def min_p(candidates: Candidates, p: float, min_keep: int) -> Candidates:
    """Those at least p times as likely as the best."""
    z = candidates.logits
    if candidates.ordered:
        count = np.count_nonzero(z >= float(z[0]) + math.log(p))
        return candidates.take(slice(0, max(count, min_keep)), ordered=True)
    index = (z >= float(z.max()) + math.log(p)).nonzero()[0]
    if len(index) < min_keep:
        return best(candidates, min_keep)
    return candidates.take(index, ordered=False)


def xtc(candidates: Candidates, threshold: float, min_keep: int) -> Candidates:
    """Without the likely candidates (p >= threshold), except the least likely of these."""
    probs = probabilities(candidates)
    index = np.flatnonzero((probs >= threshold) & (probs > 0))
    if len(index) < 2 or len(candidates.logits) - len(index) + 1 < min_keep:
        return candidates
    dropped = index[largest(candidates.logits[index], len(index) - 1)]
    kept = np.delete(np.arange(len(candidates.logits)), dropped)
    return candidates.take(kept, ordered=candidates.ordered)


def temperature(candidates: Candidates, t: float) -> Candidates:
    """z / t; t <= 0 or too small for f32: only the best is not forbidden."""
    z = candidates.logits
    if t > MIN_TEMPERATURE and abs(float(z[0] if candidates.ordered else z.max())) / t < MAX_LOGIT:
        with np.errstate(over="ignore"):  # what is that much worse than the best is forbidden
            return Candidates(z / t, candidates.ids, candidates.ordered)
    only = np.full_like(z, -np.inf)
    winner = int(np.argmax(z))
    only[winner] = z[winner]
    return Candidates(only, candidates.ids, candidates.ordered)


def dynamic_temperature(
    candidates: Candidates, t: float, spread: float, exponent: float
) -> Candidates:
    """Temperature in [t - spread, t + spread], the higher the more even the candidates are."""
    n = len(candidates.logits)
    if n <= 1:
        return candidates
    probs = probabilities(candidates)
    probs = probs[probs > 0]
    evenness = max(0.0, -float(np.sum(probs * np.log(probs)))) / math.log(n)
    low = max(0.0, t - spread)
    try:
        part = evenness**exponent
    except (OverflowError, ZeroDivisionError):  # a negative exponent
        part = MAX_LOGIT
    return temperature(candidates, min(low + (t + spread - low) * part, MAX_LOGIT))


def mirostat_1_cut(candidates: Candidates, mu: float, n_vocab: int) -> Candidates:
    """The k best, k such that a Zipf tail of the estimated exponent has a surprise of about mu."""
    z = best(candidates, 100).logits.astype(np.float64)
    z = z[z > -np.inf]
    if len(z) < 2:
        return best(candidates, 1)
    ranks = np.arange(1, len(z))
    steps = np.log((ranks + 1) / ranks)
    exponent = float(steps @ (z[:-1] - z[1:]) / (steps @ steps))
    epsilon = exponent - 1
    try:
        size = ((epsilon * 2.0**mu) / (1 - float(n_vocab) ** -epsilon)) ** (1 / exponent)
        k = max(int(min(size, n_vocab)), 1)
    except (ZeroDivisionError, OverflowError):
        k = n_vocab
    return best(candidates, k)


def mirostat_2_cut(candidates: Candidates, mu: float) -> Candidates:
    """Those whose surprise is at most mu, at least one."""
    index = np.flatnonzero(probabilities(candidates) >= 2.0 ** min(-mu, 1.0))
    if not len(index):
        return best(candidates, 1)
    return candidates.take(index, ordered=candidates.ordered)


def adapt(candidates: Candidates, probs: NDArray[np.float64], target: float) -> Candidates:
    """z = 5 - 10 x^2 / (1 + x), x = |p - target| / 0.3: what is near the target becomes likely."""
    x = np.abs(probs - target) / 0.3
    z = np.where(np.isneginf(candidates.logits), -np.inf, 5 - 10 * x * x / (1 + x))
    return Candidates(z, candidates.ids)


def bounded(z: NDArray[np.float64]) -> NDArray[np.float64]:
    """Logits that fit f32; -inf stays: it is forbidden."""
    return np.where(np.isneginf(z), z, np.clip(z, -MAX_LOGIT, MAX_LOGIT))


def _seen(candidates: Candidates, tokens: Mapping[int, object]) -> tuple[Ids, list[int]]:
    """Where those of `tokens` that are candidates stand, and which they are."""
    n = len(candidates.logits)
    if candidates.ids is None:
        present = [token for token in tokens if 0 <= token < n]
        return np.array(present, dtype=np.intp), present
    index = [i for i, token in enumerate(candidates.ids.tolist()) if token in tokens]
    return np.array(index, dtype=np.intp), candidates.ids[index].tolist()


def _run_xtc(candidates: Candidates, params: SamplingParams, step: Step) -> Candidates:
    chance = step.uniform()
    if len(candidates.logits) < 2 or chance > params.xtc_probability:
        return candidates
    return xtc(candidates, params.xtc_threshold, params.min_keep)


def _run_temperature(candidates: Candidates, params: SamplingParams, _: Step) -> Candidates:
    if params.dynatemp_range > 0:
        return dynamic_temperature(
            candidates, params.temperature, params.dynatemp_range, params.dynatemp_exponent
        )
    return temperature(candidates, params.temperature)


SAMPLERS: dict[str, SamplerRow] = {
    "penalties": SamplerRow(
        "e",
        lambda p: (
            p.repeat_last_n > 0
            and (p.repeat_penalty, p.frequency_penalty, p.presence_penalty) != (1.0, 0.0, 0.0)
        ),
        lambda c, p, step: penalize(
            c, step.token_counts, p.repeat_penalty, p.frequency_penalty, p.presence_penalty
        ),
    ),
    "dry": SamplerRow(
        "d",
        lambda p: p.dry_multiplier > 0 and p.dry_penalty_last_n > 0,
        lambda c, _, step: subtract(c, step.dry_penalties()),
    ),
    "top_n_sigma": SamplerRow(
        "s",
        lambda p: p.top_n_sigma > 0,
        lambda c, p, _: top_n_sigma(c, p.top_n_sigma),
        keeps_best=True,
    ),
    "top_k": SamplerRow("k", lambda p: p.top_k > 0, lambda c, p, _: best(c, p.top_k), True),
    "typ_p": SamplerRow(
        "y", lambda p: p.typical_p < 1, lambda c, p, _: typical(c, p.typical_p, p.min_keep)
    ),
    "top_p": SamplerRow(
        "p", lambda p: p.top_p < 1, lambda c, p, _: top_p(c, p.top_p, p.min_keep), True
    ),
    "min_p": SamplerRow(
        "m", lambda p: p.min_p > 0, lambda c, p, _: min_p(c, p.min_p, p.min_keep), True
    ),
    "xtc": SamplerRow("x", lambda p: p.xtc_probability > 0 and p.xtc_threshold <= 0.5, _run_xtc),
    "temperature": SamplerRow(
        "t", lambda p: p.temperature != 1 or p.dynatemp_range > 0, _run_temperature
    ),
    # Draws by itself at the end of the chain, wherever it is listed: runtime/engine/sampler.py.
    "adaptive_p": SamplerRow("a", lambda p: p.adaptive_target >= 0, lambda c, _p, _s: c),
}

# What mirostat puts in front of itself instead of the chain: no dynamic temperature.
PLAIN_TEMPERATURE = SamplerRow("t", lambda p: True, lambda c, p, _: temperature(c, p.temperature))

DEFAULT_SAMPLERS = tuple(name for name in SAMPLERS if name != "adaptive_p")

_ALIASES = {"nucleus": "top_p", "temp": "temperature", "typ": "typ_p"}


def sampler_name(given: str) -> str | None:
    """The table's name for `given`: top_k, top-k, topk, TOP_K ...; None where there is none."""
    wanted = given.lower()
    if wanted in _ALIASES:
        return _ALIASES[wanted]
    spellings = ((name, (name, name.replace("_", "-"), name.replace("_", ""))) for name in SAMPLERS)
    return next((name for name, accepted in spellings if wanted in accepted), None)
