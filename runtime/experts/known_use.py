"""KnownUse: what a plan may know of a model's experts before any runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class KnownUse:
    """uses    of the experts by earlier tokens, [n_moe_layers, n_expert]
    served  share of the experts that a cache held lately, and of the uses that found theirs in it;
            None: not known
    """

    uses: NDArray[np.integer[Any]]
    served: tuple[float, float] | None = None

    def part(self, layers: slice) -> KnownUse:
        """Of some of the layers."""
        return KnownUse(self.uses[layers], self.served)
