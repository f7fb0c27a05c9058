"""Notices: what is not as its user would expect, and why; told once, counted always.

Whoever decides that something falls back, shrinks or stays off adds a notice. The console shows a
new one as a warning, `Engine.notices` and `/props` list all, and the server's
`hotexpert_fallback_total{reason}` counts them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from threading import Lock

logger = logging.getLogger(__name__)


class Reason(StrEnum):
    """Kinds of notices; the values are labels of a metric, so they stay.

    CACHE_OFF        experts do not move between the CPU and the GPU
    CPU              the CPU computes what a GPU was meant to
    SHRUNK           something is smaller than planned, because memory ran out
    UNPINNED         the GPU cannot read experts where they lie
    SLOW_LINK        a link is far slower than it should be
    SLOW_UPLOADS     every copy of a matrix is a call of the driver
    PROFILE_REFUSED  what was known of a model's use is not used
    FEWER_HITS       the experts on the GPU are used less than expected
    SLOW_PROMPTS     kernels for single tokens read prompts
    NO_EFFECT        settings that change nothing on the device that computes
    GPU_LEFT_OUT     a GPU of the machine is not used
    NOT_KEPT         the next start will not find what this one has made or learned
    TOOLS_UNSEEN     the chat template has no place for tools, so the model does not know them
    STEP_SPLIT       a step failed, and its sequences were computed one by one
    """

    CACHE_OFF = "cache_off"
    CPU = "cpu"
    SHRUNK = "shrunk"
    UNPINNED = "unpinned"
    SLOW_LINK = "slow_link"
    SLOW_UPLOADS = "slow_uploads"
    PROFILE_REFUSED = "profile_refused"
    FEWER_HITS = "fewer_hits"
    SLOW_PROMPTS = "slow_prompts"
    NO_EFFECT = "no_effect"
    GPU_LEFT_OUT = "gpu_left_out"
    NOT_KEPT = "not_kept"
    TOOLS_UNSEEN = "tools_unseen"
    STEP_SPLIT = "step_split"


@dataclass(frozen=True)
class Notice:
    """A reason, in words too, and how often it came up."""

    reason: Reason
    text: str
    count: int


class Notices:
    """Written by any thread, read by anyone."""

    def __init__(self) -> None:
        self._counts: dict[tuple[Reason, str], int] = {}
        self._lock = Lock()

    def add(self, reason: Reason, text: str, *, usual: bool = False) -> None:
        """It came up; a text that is new is a warning in the log, or, where it is what one expects
        of such a machine, a line for those who want to know."""
        with self._lock:
            count = self._counts.get((reason, text), 0)
            self._counts[reason, text] = count + 1
        if count == 0:
            level = logging.INFO if usual else logging.WARNING
            logger.log(level, "%s: %s", reason.value.replace("_", " "), text)

    @property
    def all(self) -> tuple[Notice, ...]:
        """In the order in which they first came up."""
        with self._lock:
            counts = dict(self._counts)
        return tuple(Notice(reason, text, count) for (reason, text), count in counts.items())

    @property
    def totals(self) -> Mapping[Reason, int]:
        """How often each reason came up, 0 for those that did not."""
        totals = dict.fromkeys(Reason, 0)
        for notice in self.all:
            totals[notice.reason] += notice.count
        return totals

    def describe(self) -> list[dict[str, object]]:
        """For /props."""
        return [{"reason": n.reason.value, "text": n.text, "count": n.count} for n in self.all]
