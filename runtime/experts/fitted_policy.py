"""FittedPolicy: keeps the experts that the next tokens are expected to use most, by two rates.

How often an expert was used by the last few tokens, and by the last few hundred, both say something
about the next ones; how much, differs from model to model and from text to text. Where routing
stays with an expert for a while, the fast rate does; where experts are popular and take turns, the
slow one, and the fast one even speaks against. So the weights of the two are fitted, all the time,
to what was used afterwards (least squares, older tokens fading).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from profiles import HALF_LIVES, RecentUse
from runtime.experts.cache import ExpertCache
from runtime.experts.policy import Swap
from runtime.experts.scored_policy import (
    COUNTED_TOKENS,
    F64,
    I32,
    I64,
    U64,
    PolicySettings,
    ScoredPolicy,
)

if TYPE_CHECKING:
    from runtime.experts.token_uses import TokenUses

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
FEW_SWAPS = 32
"""Most that there is room for, until more are asked for."""


class FittedPolicy(ScoredPolicy):
    """Scores are expected uses a token; see the module."""

    def __init__(self, cache: ExpertCache, settings: PolicySettings) -> None:
        super().__init__(cache, settings)
        self._fast: F64 = np.zeros(self.n_cells)
        self._slow: F64 = np.zeros(self.n_cells)
        self._fast_worth = self._slow_worth = 1.0  # of a use now; sums grow instead of decaying
        self._factors = 0.0, 0.0
        self.weights = FIRST_WEIGHTS
        """How much the fast and the slow rate count."""
        self._squares = np.zeros((2, 2))
        self._products = np.zeros(2)
        self._rates_then: F64 | None = None
        self._life_then: I64 = self.life.copy()
        from runtime.experts.token_uses import Places, Sums, TokenUses  # loads Numba

        self._classes = sorted(set(self._class_of))
        kinds = np.searchsorted(self._classes, self._class_of).astype(np.int32)
        sums = Sums(self._fast, self._slow, self._life)
        places = Places(self._slots, self._coming, kinds)
        self._make_uses = partial(TokenUses, sums, places, self.shape)
        self._uses: TokenUses | None = None
        self._set_factors()

    def know(self, uses: U64, n_tokens: int, recent: RecentUse | None = None) -> None:
        """See `ScoredPolicy.know`: without recent use they are the first slow rates."""
        super().know(uses, n_tokens)
        if recent is None:
            self._slow += uses.reshape(-1) * (self._slow_worth / (max(n_tokens, 1) * SLOW_SHARE))
            return
        fast, slow = recent.rates.reshape(2, -1).astype(np.float64)
        self._fast += fast * (self._fast_worth / FAST_SHARE)
        self._slow += slow * (self._slow_worth / SLOW_SHARE)
        a, b, d, with_fast, with_slow = (value * self.n_cells for value in recent.fit)
        self._squares = np.array([[a, b], [b, d]])
        self._products = np.array([with_fast, with_slow])
        self.weights = _solved(self._squares, self._products)
        self._set_factors()
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
        """See `Policy.used`."""
        choices = choices[:, -COUNTED_TOKENS:]
        uses = self._uses_of(choices.shape[2], FEW_SWAPS)
        for token in range(choices.shape[1]):
            self.n_tokens += 1
            self._grow()
            cells = uses.add(choices[:, token], self._fast_worth, self._slow_worth)
            self._recent.append(cells)
            self._after_token()

    def swaps(self, cache: ExpertCache, most: int) -> list[Swap]:
        """See `Policy.swaps`: all scores are looked at, by a compiled call."""
        if self.settings.sticky or self._uses is None:
            return super().swaps(cache, most)
        recent, self._recent = self._recent, []
        if most <= 0 or not recent:
            return []
        cells = recent[0] if len(recent) == 1 else np.unique(np.concatenate(recent))
        free = [cache.n_free(size_class) for size_class in self._classes]
        uses = self._uses_of(self._uses.n_used, most)
        best = most + cache.n_pending
        found = uses.swaps(cells, free, most, best, self._factors, self.margin)
        n = self._n_expert
        return [
            Swap(divmod(cell, n), None if victim < 0 else divmod(victim, n))
            for cell, victim in found
        ]

    def _uses_of(self, n_used: int, most: int) -> TokenUses:
        """What counts tokens that use so many experts in a layer, and finds so many swaps."""
        uses = self._uses
        if uses is None or uses.n_used != n_used or uses.most < most:
            uses = self._uses = self._make_uses(n_used, most)
        return uses

    def _grow(self) -> None:
        """Another token: a use of it is worth more than those before."""
        self._fast_worth *= FAST_GROWTH
        self._slow_worth *= SLOW_GROWTH
        if self._fast_worth > RESCALE or self._slow_worth > RESCALE:
            self._fast /= self._fast_worth
            self._slow /= self._slow_worth
            self._fast_worth = self._slow_worth = 1.0

    def _after_token(self) -> None:
        if self.n_tokens == 1 and self.settings.margin is None:
            self.margin = MARGIN_SHARE * len(self._recent[-1]) / self.n_cells
        since = self.n_tokens % FIT_EVERY
        if since == 0:
            self._begin_fit()
        elif since == FIT_TOKENS:
            self._fit()
        self._set_factors()

    def _set_factors(self) -> None:
        fast, slow = self.weights
        self._factors = (
            fast * FAST_SHARE / self._fast_worth,
            slow * SLOW_SHARE / self._slow_worth,
        )

    def _scores(self, cells: I64) -> F64:
        fast, slow = self._factors
        scores: F64 = self._fast[cells] * fast
        scores += self._slow[cells] * slow
        return scores

    def _score(self, cell: int) -> float:
        fast, slow = self._factors
        return float(self._fast.item(cell) * fast + self._slow.item(cell) * slow)

    def _begin_fit(self) -> None:
        """Keep the rates of now and the uses so far."""
        self._rates_then = self._rates()
        self._life_then = self.life.copy()

    def _rates(self) -> F64:
        """Uses a token, f64[2, n_cells]."""
        fast = self._fast * (FAST_SHARE / self._fast_worth)
        slow = self._slow * (SLOW_SHARE / self._slow_worth)
        return np.stack([fast, slow])

    def _fit(self) -> None:
        """Compare the rates of FIT_TOKENS ago with the uses since."""
        rates = self._rates_then
        if rates is None:
            return
        uses = (self.life - self._life_then) / FIT_TOKENS
        self._squares = KEPT * self._squares + rates @ rates.T
        self._products = KEPT * self._products + rates @ uses
        self.weights = _solved(self._squares, self._products)


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
