"""FittedPolicy: keeps the experts that the next tokens are expected to use most, by two rates.

How often an expert was used by the last few tokens, and by the last few hundred, both say something
about the next ones; how much, differs from model to model and from text to text. Where routing
stays with an expert for a while, the fast rate does; where experts are popular and take turns, the
slow one, and the fast one even speaks against. So the weights of the two are fitted, all the time,
to what was used afterwards (least squares, older tokens fading).
"""

from __future__ import annotations

import numpy as np

from profiles import HALF_LIVES, RecentUse
from runtime.experts.cache import ExpertCache, Rows
from runtime.experts.scored_policy import (
    COUNTED_TOKENS,
    F64,
    I32,
    I64,
    U64,
    PolicySettings,
    ScoredPolicy,
)
from runtime.experts.token_uses import Places, TokenUses

FAST_TOKENS, SLOW_TOKENS = HALF_LIVES
"""After so many tokens a use counts half."""
FIT_TOKENS = 16
"""How far the fit looks ahead."""
FIT_EVERY = 64
KEPT = 0.9
"""What a fit keeps of the earlier ones: half after 420 tokens."""
MARGIN_SHARE = 0.3
"""Of the uses a token that an expert has on average: what a newcomer must be better by."""
FIRST_WEIGHTS = (0.5, 0.5)
FIRST_SHARE = 0.01
"""Of the first weights, in every fit: without data they stay."""
RESCALE = 2.0**500


class FittedPolicy(ScoredPolicy):
    """Scores are expected uses a token; see the module."""

    def __init__(self, cache: ExpertCache, settings: PolicySettings) -> None:
        super().__init__(cache, settings)
        places = Places(self._slots, self._coming, cache.class_of, cache.n_free)
        self._uses = TokenUses(places, self.shape, (FAST_GROWTH, SLOW_GROWTH))
        self._fast, self._slow, self._life = self._uses.first, self._uses.second, self._uses.uses
        self._set_weights(FIRST_WEIGHTS)
        self._squares = np.zeros((2, 2))
        self._products = np.zeros(2)
        self._rates_then: F64 | None = None
        self._life_then: I64 = self.life.copy()

    @property
    def weights(self) -> tuple[float, float]:
        """How much the fast and the slow rate count."""
        state = self._uses.state
        return state.first_weight / FAST_SHARE, state.second_weight / SLOW_SHARE

    def _set_weights(self, weights: tuple[float, float]) -> None:
        state = self._uses.state
        state.first_weight, state.second_weight = weights[0] * FAST_SHARE, weights[1] * SLOW_SHARE

    def know(self, uses: U64, n_tokens: int, recent: RecentUse | None = None) -> None:
        """See `ScoredPolicy.know`: without recent use they are the first slow rates."""
        super().know(uses, n_tokens)
        fast_unit, slow_unit = self._units
        if recent is None:
            self._slow += uses.reshape(-1) / (max(n_tokens, 1) * slow_unit)
            return
        fast, slow = recent.rates.reshape(2, -1).astype(np.float64)
        self._fast += fast / fast_unit
        self._slow += slow / slow_unit
        a, b, d, with_fast, with_slow = (value * self.n_cells for value in recent.fit)
        self._squares = np.array([[a, b], [b, d]])
        self._products = np.array([with_fast, with_slow])
        self._set_weights(_solved(self._squares, self._products))
        self._begin_fit()

    def recent(self) -> RecentUse:
        """See `ScoredPolicy.recent`."""
        rates = np.clip(self._rates(), 0.0, 1.0).astype(np.float32).reshape(2, *self.shape)
        (a, b), (_, d) = (self._squares / self.n_cells).tolist()
        with_fast, with_slow = (self._products / self.n_cells).tolist()
        return RecentUse(rates, (a, b, d, with_fast, with_slow))

    def _best_first(self) -> I64:
        """By score; of those that score alike, the most used ever."""
        scores = self._scores(np.arange(self.n_cells))
        return np.lexsort((self._expert_numbers(), -self.life, -scores))

    def used(self, choices: I32) -> None:
        """See `Policy.used`: a compiled call for each token."""
        n = choices.shape[1]
        for token in range(max(n - COUNTED_TOKENS, 0), n):
            self._uses.add(choices if n == 1 else choices[:, token : token + 1])
            self.n_tokens += 1
            if self.n_tokens % FIT_TOKENS == 0 or self.n_tokens == 1:
                self._after_tokens()

    def swaps(self, cache: ExpertCache, most: int) -> Rows:
        """See `Policy.swaps`: all scores are looked at, by a compiled call."""
        if self.settings.sticky:
            return super().swaps(cache, most)
        self._uses.state.margin = self.margin
        return self._uses.swaps(max(most, 0), most + cache.n_pending)

    def _take_recent(self) -> I64:
        cells = self._uses.recent.copy()
        self._uses.swaps(0, 0)  # none: they are no longer recent
        return cells

    def _after_tokens(self) -> None:
        if self.n_tokens == 1 and self.settings.margin is None:
            self.margin = MARGIN_SHARE * len(self._uses.recent) / self.n_cells
        since = self.n_tokens % FIT_EVERY
        if since == 0:
            self._rescale()
            self._begin_fit()
        elif since == FIT_TOKENS:
            self._fit()

    def _rescale(self) -> None:
        """Uses now are worth 1 again, and those before less: worths grow without end."""
        state = self._uses.state
        if max(state.first_worth, state.second_worth) > RESCALE:
            self._fast /= state.first_worth
            self._slow /= state.second_worth
            state.first_worth = state.second_worth = 1.0

    @property
    def _units(self) -> tuple[float, float]:
        """What turns the sums of now into uses a token."""
        state = self._uses.state
        return FAST_SHARE / state.first_worth, SLOW_SHARE / state.second_worth

    def _scores(self, cells: I64) -> F64:
        (fast_unit, slow_unit), (fast, slow) = self._units, self.weights
        scores: F64 = self._fast[cells] * (fast * fast_unit)
        scores += self._slow[cells] * (slow * slow_unit)
        return scores

    def _score(self, cell: int) -> float:
        return float(self._scores(np.array([cell]))[0])

    def _begin_fit(self) -> None:
        """Keep the rates of now and the uses so far."""
        self._rates_then = self._rates()
        self._life_then = self.life.copy()

    def _rates(self) -> F64:
        """Uses a token, f64[2, n_cells]."""
        fast_unit, slow_unit = self._units
        return np.stack([self._fast * fast_unit, self._slow * slow_unit])

    def _fit(self) -> None:
        """Compare the rates of FIT_TOKENS ago with the uses since."""
        rates = self._rates_then
        if rates is None:
            return
        uses = (self.life - self._life_then) / FIT_TOKENS
        self._squares = KEPT * self._squares + rates @ rates.T
        self._products = KEPT * self._products + rates @ uses
        self._set_weights(_solved(self._squares, self._products))


FAST_GROWTH, SLOW_GROWTH = 2.0 ** (1.0 / FAST_TOKENS), 2.0 ** (1.0 / SLOW_TOKENS)
FAST_SHARE, SLOW_SHARE = 1.0 - 1.0 / FAST_GROWTH, 1.0 - 1.0 / SLOW_GROWTH
"""What turns a sum of fading uses into uses a token."""


def _solved(squares: F64, products: F64) -> tuple[float, float]:
    """The two weights; drawn to the first ones by a share of the squares' size."""
    (a, b), (_, d) = squares.tolist()
    ridge = FIRST_SHARE * (a + d) / 2 + 1e-30
    fast, slow = products.tolist()
    fast += ridge * FIRST_WEIGHTS[0]
    slow += ridge * FIRST_WEIGHTS[1]
    a, d = a + ridge, d + ridge
    over = a * d - b * b
    return (d * fast - b * slow) / over, (a * slow - b * fast) / over
