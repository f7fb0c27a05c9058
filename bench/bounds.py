"""What a token's time is bounded by where some experts are not on the GPU, from bare read rates.

The GPU reads everything but the routed experts, then those experts that it holds while the CPU
reads the others; each layer with a miss adds a hand-over, each launch what the GPU takes to begin.
"""

from __future__ import annotations

from dataclasses import dataclass

HAND_OVER_SECONDS = 4.4e-6
LAUNCH_SECONDS = 0.5e-6
LAUNCHES_A_LAYER = 11


@dataclass(frozen=True)
class Rates:
    """Bytes a second of bare reads: the GPU's memory, the host's, and the link between them."""

    gpu: float
    host: float
    link: float


@dataclass(frozen=True)
class TokenWork:
    """Of one token: bytes of experts that were hit and missed, bytes of everything else.

    missed_layers  that missed at least one expert
    """

    hit_bytes: float
    missed_bytes: float
    rest_bytes: float
    n_layers: int
    missed_layers: float


def serial_seconds(work: TokenWork, rates: Rates) -> float:
    """T_s: hits and misses of a layer at the same time, one layer after another."""
    experts = max(work.hit_bytes / rates.gpu, _host_seconds(work, rates))
    overhead = work.missed_layers * HAND_OVER_SECONDS
    overhead += work.n_layers * LAUNCHES_A_LAYER * LAUNCH_SECONDS
    return work.rest_bytes / rates.gpu + experts + overhead


def overlapped_seconds(work: TokenWork, rates: Rates) -> float:
    """T_o: as if the CPU never waited for the GPU."""
    gpu = (work.rest_bytes + work.hit_bytes) / rates.gpu
    gpu += work.missed_layers * HAND_OVER_SECONDS
    gpu += work.n_layers * LAUNCHES_A_LAYER * LAUNCH_SECONDS
    return max(gpu, _host_seconds(work, rates))


def _host_seconds(work: TokenWork, rates: Rates) -> float:
    """0 for a model without routed experts, whose host rate nobody measured."""
    return work.missed_bytes / rates.host if work.missed_bytes else 0.0
