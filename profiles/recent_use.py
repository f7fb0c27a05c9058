"""RecentUse: how often the last tokens used each expert, and what that said about the next ones.

With it a cache begins with the experts that it would hold had it never ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from profiles.errors import ProfileError

F32 = NDArray[np.float32]

HALF_LIVES = (8.0, 256.0)
"""After so many tokens a use counts half: one rate follows a sentence, the other a talk."""
FIT_VALUES = 5
LARGEST_RATE = 1.01
"""A token uses an expert once at most; the rest is rounding."""
LARGEST_FIT = 1e9


@dataclass(frozen=True)
class RecentUse:
    """rates  f32[2, n_layers, n_expert]: uses a token by the tokens before, for each half-life
    fit    what the rates were worth so far, a mean over the experts: the sums of fast * fast,
           fast * slow, slow * slow, fast * use and slow * use; `use` is that of the tokens behind
    served share of the experts that a cache held lately, and of the uses that found theirs in it;
           None: not known

    Nobody can tell from it what a text was, beyond which experts its last tokens used.
    """

    rates: F32
    fit: tuple[float, float, float, float, float]
    served: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        """Raises: ProfileError for values that no model's use leads to."""
        if not isinstance(self.rates, np.ndarray):
            raise ProfileError("rates: use an array f32")
        shape = self.rates.shape
        if self.rates.dtype != np.float32 or len(shape) != 3 or shape[0] != len(HALF_LIVES):
            raise ProfileError(f"rates of shape {shape} and type {self.rates.dtype}")
        if not (np.all(self.rates >= 0.0) and np.all(self.rates <= LARGEST_RATE)):
            raise ProfileError("a rate that is no share of the tokens")
        fit = self.fit
        if len(fit) != FIT_VALUES or not all(0.0 <= value <= LARGEST_FIT for value in fit):
            raise ProfileError("a fit of the rates that cannot be")
        if fit[1] ** 2 > fit[0] * fit[2] * (1.0 + 1e-6) + 1e-30:
            raise ProfileError("a fit of the rates that no rates lead to")
        served = self.served
        if served is not None and not (len(served) == 2 and all(0 <= s <= 1 for s in served)):
            raise ProfileError("experts served that cannot be")

    def part(self, layers: slice, n_expert: int | None = None) -> RecentUse:
        """Of some of the layers, and of their first n_expert experts."""
        return RecentUse(self.rates[:, layers, :n_expert], self.fit, self.served)

    def facts(self) -> dict[str, Any]:
        """What a file says beside the rates."""
        facts = {"half_lives": list(HALF_LIVES), "fit": list(self.fit)}
        return facts if self.served is None else {**facts, "served": list(self.served)}

    @classmethod
    def read(cls, facts: dict[str, Any], rates: NDArray[Any]) -> RecentUse | None:
        """From a file; None: of other half-lives.  Raises: ProfileError."""
        half_lives, fit = facts.get("half_lives"), facts.get("fit")
        served = facts.get("served", [])
        if not (_are_numbers(half_lives) and _are_numbers(fit) and _are_numbers(served)):
            raise ProfileError("recent use without its half-lives, its fit, or what was served")
        if tuple(half_lives or ()) != HALF_LIVES:
            return None
        values = tuple(float(value) for value in fit or ())
        both = tuple(float(value) for value in served) or None
        return cls(rates, values, both)  # type: ignore[arg-type]


def _are_numbers(values: Sequence[Any] | None) -> bool:
    return isinstance(values, list) and all(type(value) in (int, float) for value in values)
