"""Statistics: a frozen reading of an engine for /slots, /metrics and the console."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from runtime.engine.params import SamplingParams
from runtime.experts.totals import ExpertTotals
from runtime.notices import Notice


@dataclass(frozen=True)
class SlotStatistics:
    """One of the `n_parallel` places; the figures of a sequence stay until the next one comes.

    n_tokens   prompt and answer: n_prompt (n_cached reused, n_processed computed) and n_generated
    n_remain   tokens it may still generate; -1: no limit but the context
    request    running number of the request; None where the slot was never used
    """

    id: int
    state: str
    n_ctx: int
    is_processing: bool = False
    request: int | None = None
    n_tokens: int = 0
    n_prompt: int = 0
    n_cached: int = 0
    n_processed: int = 0
    n_generated: int = 0
    n_remain: int = -1
    has_new_line: bool = False
    params: SamplingParams | None = None


@dataclass(slots=True)
class Counters:
    """Totals since the engine opened; the seconds are those of prompt steps and of decode steps.

    The step loop counts in its own; a reading is a copy.
    """

    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    prompt_seconds: float = 0.0
    predicted_tokens: int = 0
    predicted_seconds: float = 0.0
    decode_steps: int = 0
    prompt_steps: int = 0
    busy_slots: int = 0  # running sequences, added up over all steps
    max_tokens: int = 0  # most tokens any sequence has had
    preemptions: int = 0
    requests_failed: int = 0


@dataclass(frozen=True)
class Statistics:
    """The engine now: sequences running and waiting, KV pages, totals, and every slot.

    experts   who served the routed ones; None where they do not move
    notices   what fell back, shrank or stayed off
    layers    of steps, by the device that computed them, see `LayerCountingExecutor`
    """

    n_running: int
    n_waiting: int
    n_pages: int
    n_pages_free: int
    n_pages_cached: int
    counters: Counters
    slots: tuple[SlotStatistics, ...]
    experts: ExpertTotals | None = None
    notices: tuple[Notice, ...] = ()
    layers: Mapping[str, int] = field(default_factory=dict)
