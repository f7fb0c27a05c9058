"""Memory through which a GPU's step hands missed experts to the CPU team and gets their results.

It is host memory that both see. Every MoE layer of every step has a number of its own, `sequence`;
it grows (modulo 2^32) and nothing is ever reset. The GPU posts a layer that misses experts by
storing its number, after what belongs to it. The CPU answers in words that carry that number, so
that a value and the news of its arrival cross the link together.

A post may bring a forecast besides: what the router of the next MoE layer makes of this layer's
input, since that layer's is much like it. The CPU has the experts that it expects to be asked for
brought into its caches while the GPU is on its way there; no result depends on it. A layer that
misses nothing hands over its forecast alone.
"""

from __future__ import annotations

from dataclasses import dataclass

POSTED, N_MISSES, N_TOKENS = 0, 8, 12
"""u32 number of the last posted layer; u32 slots it misses, u32 tokens of the step."""
FORECAST = 16
"""u32 bytes from the forecast of a token to that of the next one; 0: the post brings none."""
FORESEEN = 64
"""u32 number of the last layer that missed nothing and handed over a forecast alone: the GPU does
not wait then, so the forecast and what belongs to it may be a later layer's. A post sets it to the
number before its own, lest it fall behind by so much that it seems to be ahead."""
HEARTBEAT = 128
"""u64 that changes as long as the team is alive."""
SERVED = 192
"""u32 number of the layer that the team serves, or waits for: those before it are answered, as far
as they ever will be."""
FAILED = 256
"""u32[2, 2]: of the even and of the odd steps, the last one in which the GPU waited in vain, as
`failed_number` has it, and for which layer. Two steps in flight have a place each."""
MISSES = 512
"""u32[n_slots], slot | expert << 16, ascending by slot; then the records, the forecasts, the
answers."""

ANSWER_BYTES = 8
"""f32 value, u32 number of the layer it belongs to."""
PART_BYTES = 256
MAX_SLOTS = MAX_EXPERTS = 1 << 16
FORECAST_TOKENS = 4
"""Steps of more tokens bring no forecast: what they miss is more than caches hold."""


@dataclass(frozen=True)
class ExchangeLayout:
    """Where what lies; for the largest step and the largest layer that use it.

    n_slots         of a step: tokens times experts a token
    n_tokens        of a step
    record_bytes    of a token's activation record, a multiple of 16
    n_rows          values of an answer, even
    forecast_bytes  of all forecasts of a post, a multiple of 16
    """

    n_slots: int
    n_tokens: int
    record_bytes: int
    n_rows: int
    forecast_bytes: int = 0

    def __post_init__(self) -> None:
        odd = self.record_bytes % 16 or self.n_rows % 2 or self.forecast_bytes % 16
        if not 0 < self.n_slots <= MAX_SLOTS or odd:
            raise ValueError(f"no exchange has such sizes: {self}")

    @property
    def records_offset(self) -> int:
        """u8[n_tokens, record_bytes of the layer]."""
        return _whole_parts(MISSES + 4 * self.n_slots + 16)

    @property
    def forecasts_offset(self) -> int:
        """f32[n_tokens, *], the rows as far apart as the post says."""
        return self.records_offset + _whole_parts(self.n_tokens * self.record_bytes)

    @property
    def answers_offset(self) -> int:
        """u64[misses, n_rows of the layer], in the order of the list."""
        return self.forecasts_offset + _whole_parts(self.forecast_bytes)

    @property
    def n_bytes(self) -> int:
        return self.answers_offset + _whole_parts(ANSWER_BYTES * self.n_slots * self.n_rows)


def sequence(epoch: int, n_layers: int, layer: int) -> int:
    """The number of MoE layer `layer` of `n_layers` in the step `epoch`, which counts from 1."""
    return (epoch * n_layers + layer + 1) % (1 << 32)


def failed_number(epoch: int) -> int:
    """What a step in which the GPU waited in vain leaves in its place, where 0 stands for none."""
    return epoch | 1


def _whole_parts(n_bytes: int) -> int:
    return -(-n_bytes // PART_BYTES) * PART_BYTES
