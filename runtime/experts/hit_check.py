"""Self-checks after some tokens: do the experts on the GPU serve what was expected, and does the
link carry them as fast as links do."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from runtime.experts.totals import NOBODY, ON_GPU, ExpertTotals, StepUse
from runtime.notices import Notices, Reason

logger = logging.getLogger(__name__)

CHECKED_TOKENS = 64
WORST_SHARE, LEAST_GAP = 0.8, 0.05
"""Of the expected hits, and by how much at least they have to be missed: below both it is told."""

SLOW_GB_S = 6.0
"""PCIe 3.0 with 8 lanes carries 7 GB/s, 4.0 with 16 carries 25."""
SOME_BYTES, COPY_BYTES = 16 << 20, 512 << 10
"""A link is judged by so many bytes, if an expert has as many as it takes to fill it."""


class HitCheck:
    """Looks once, at the first `CHECKED_TOKENS` generated tokens.

    expected  share of the uses that a GPU was expected to serve, 0 to 1
    """

    def __init__(self, expected: float, notices: Notices) -> None:
        self._expected, self._notices = expected, notices
        self._n_tokens = 0
        self._hits = self._uses = 0

    def see(self, n_tokens: int, uses: Sequence[StepUse]) -> bool:
        """A step generated so many tokens; True once it has looked, and is of no more use."""
        for use in uses:
            served = use.counts[..., :NOBODY]
            self._uses += int(served.sum())
            self._hits += int(served[..., ON_GPU].sum())
        self._n_tokens += n_tokens
        if self._n_tokens < CHECKED_TOKENS:
            return False
        self._tell(self._hits / max(self._uses, 1))
        return True

    def _tell(self, observed: float) -> None:
        text = (
            f"of the first {self._n_tokens} tokens' uses of experts {100 * observed:.1f} % found "
            f"them on the GPU, {100 * self._expected:.1f} % were expected"
        )
        gap = self._expected - observed
        if self._uses and observed < WORST_SHARE * self._expected and gap > LEAST_GAP:
            self._notices.add(Reason.FEWER_HITS, text)
        else:
            logger.info(text)


def check_links(totals: ExpertTotals, notices: Notices) -> None:
    """Tell of links that are far slower than they should be."""
    for link in totals.links:
        judged = link.uploaded >= max(SOME_BYTES, COPY_BYTES * totals.swaps)
        if judged and 0 < link.gb_s < SLOW_GB_S:
            notices.add(
                Reason.SLOW_LINK,
                f"experts reach {link.gpu} at {link.gb_s:.1f} GB/s: look at the generation and the "
                "lanes of its slot",
            )
