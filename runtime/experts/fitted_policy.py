"""FittedPolicy: keeps the experts that the next tokens are expected to use most, by two rates.

How often an expert was used by the last few tokens, and by the last few hundred, both say something
about the next ones; how much, differs from model to model and from text to text. Where routing
stays with an expert for a while, the fast rate does; where experts are popular and take turns, the
slow one, and the fast one even speaks against. So the weights of the two are fitted, all the time,
to what was used afterwards (least squares, older tokens fading).
"""

from __future__ import annotations

import numpy as np

from runtime.experts.cache import ExpertCache
from runtime.experts.scored_policy import F64, I64, U64, PolicySettings, ScoredPolicy

FAST_TOKENS, SLOW_TOKENS = 8, 256
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
        self._set_factors()

    def know(self, uses: U64, n_tokens: int) -> None:
        """See `ScoredPolicy.know`: they are the first slow rates."""
        super().know(uses, n_tokens)
        self._slow += uses.reshape(-1) * (self._slow_worth / (max(n_tokens, 1) * SLOW_SHARE))

    def _count(self, cells: I64) -> None:
        self._fast_worth *= FAST_GROWTH
        self._slow_worth *= SLOW_GROWTH
        if self._fast_worth > RESCALE or self._slow_worth > RESCALE:
            self._fast /= self._fast_worth
            self._slow /= self._slow_worth
            self._fast_worth = self._slow_worth = 1.0
        self._fast[cells] += self._fast_worth
        self._slow[cells] += self._slow_worth

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

    def _wanted(self, missed: I64) -> tuple[I64, F64]:
        return missed, self._scores(missed)

    def _begin_fit(self) -> None:
        """Keep the rates of now, f64[2, n_cells], and the uses so far."""
        fast = self._fast * (FAST_SHARE / self._fast_worth)
        slow = self._slow * (SLOW_SHARE / self._slow_worth)
        self._rates_then = np.stack([fast, slow])
        self._life_then = self.life.copy()

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
