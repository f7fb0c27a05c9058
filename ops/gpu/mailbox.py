"""The GPU kernel that hands the experts a layer misses to the CPU team and stores their results.

It runs on a side branch of the step's graph, forked after `route` and joined before the results
are combined, while the main branch computes the experts that are here. The CPU's side is
`ops.cpu.serve`, the memory between them `ops.exchange`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ops import exchange
from ops.exchange import ExchangeLayout
from ops.gpu.kernel import Kernel, launch_defines
from ops.quants.block import F32

STATE_BYTES = 16
"""Device memory of a step's mailboxes, zeroed once: what its parameter `state` points to."""

PATIENCE_NS = 2_000_000_000
"""How long the team's heartbeat may stand still."""

BLOCK = 128
"""Threads of a block: so few find room on a multiprocessor that is full of expert kernels, which
may have started first."""

PAIRS_A_THREAD = 4
"""Pairs of answers that a thread looks for at once."""

MOST_BLOCKS = 8
"""Their looks fill the link. More of them take room from the experts' kernels beside them, also
where nothing is missed: with 128, layers of 8 and 31 tokens took 1 to 2 us longer then."""

UNITS_A_PUBLISHER = 4
"""16-byte stores of a thread that hands over records; with more, another block helps."""


@dataclass(frozen=True)
class Forecast:
    """What the next layer's router makes of this layer's input; see `ops.exchange`.

    address  of f32 rows, 16-byte aligned; stride  bytes from one to the next, a multiple of 16
    n_bytes  of all of them, a multiple of 16
    """

    address: int = 0
    stride: int = 0
    n_bytes: int = 0


NO_FORECAST = Forecast()


@dataclass(frozen=True)
class MailboxLaunch:
    """How the kernel is launched for one layer.

    n_slots, n_tokens   of the largest step of the graph
    record_bytes        of the layer's activation records
    n_rows              values of an answer
    """

    n_slots: int
    n_tokens: int
    record_bytes: int
    n_rows: int
    block: int = BLOCK

    @property
    def grid(self) -> tuple[int]:
        """Threads for all values, up to a number of blocks that keeps the link busy."""
        n_pairs = self.n_slots * self.n_rows // 2
        return (max(1, min(MOST_BLOCKS, -(-n_pairs // (PAIRS_A_THREAD * self.block)))),)

    @property
    def publishers(self) -> int:
        n_units = self.n_tokens * self.record_bytes // 16
        return max(1, min(self.grid[0], n_units // (UNITS_A_PUBLISHER * self.block)))

    @property
    def shared_bytes(self) -> int:
        return 4 * self.n_slots + 16

    def sizes(self, layout: ExchangeLayout, forecast: Forecast = NO_FORECAST) -> dict[str, int]:
        """The kernel's arguments that follow from the sizes."""
        return {
            "forecast": forecast.address,
            "forecast_stride": forecast.stride,
            "forecast_bytes": forecast.n_bytes,
            "forecasts_offset": layout.forecasts_offset,
            "n_used": self.n_slots // self.n_tokens,
            "n_rows": self.n_rows,
            "record_bytes": self.record_bytes,
            "records_offset": layout.records_offset,
            "answers_offset": layout.answers_offset,
            "publishers": self.publishers,
        }


def mailbox_reference(y: F32, rows: list[int], answers: F32) -> F32:
    """f32[n_slots, n_rows] with the rows of the missing slots replaced by their answers."""
    result = y.copy()
    result[rows] = answers
    return result


def mailbox(block: int = BLOCK, *, overlapped: bool = False) -> Kernel:
    """See `MailboxLaunch` for the grid and the shared memory."""
    return Kernel(
        entry="mailbox",
        source="mailbox.ptx",
        defines={
            **launch_defines(block, 1, overlapped),
            "POSTED": exchange.POSTED,
            "N_MISSES": exchange.N_MISSES,
            "N_TOKENS": exchange.N_TOKENS,
            "FORECAST": exchange.FORECAST,
            "FORESEEN": exchange.FORESEEN,
            "HEARTBEAT": exchange.HEARTBEAT,
            "SERVED": exchange.SERVED,
            "FAILED": exchange.FAILED,
            "MISSES": exchange.MISSES,
        },
        params=(
            *((name, "u64") for name in ("epoch", "counts", "experts", "choices", "records")),
            *((name, "u64") for name in ("y", "slots", "exchange", "state", "patience")),
            *((name, "u32") for name in ("layer", "n_layers", "n_used", "n_rows", "record_bytes")),
            *((name, "u32") for name in ("records_offset", "answers_offset", "publishers")),
            ("forecast", "u64"),
            *((name, "u32") for name in ("forecast_stride", "forecast_bytes", "forecasts_offset")),
        ),
        block=block,
        reference=mailbox_reference,
    )


def variants() -> Iterator[tuple[str, Kernel]]:
    """The one that ships."""
    yield "mailbox", mailbox()
