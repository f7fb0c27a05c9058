"""The GPU kernel `take_rows`: rows of a table that the CPU team gathers while the step runs.

The CPU's side is `ops.cpu.gather_rows`.
"""

from __future__ import annotations

from collections.abc import Iterator

from ops import gathering
from ops.gpu.kernel import Kernel, launch_defines
from ops.quants.block import U8

BLOCK = 128
UNIT_BYTES = 16
"""What a thread copies at a time."""
MOST_BLOCKS = 32
"""Each looks for the rows over the link by itself."""

PATIENCE_NS = 2_000_000_000
"""How long the team's heartbeat may stand still."""


def take_rows(*, overlapped: bool = False) -> Kernel:
    """Grid `take_rows_grid`."""
    return Kernel(
        entry="take_rows",
        source="take_rows.ptx",
        defines={
            **launch_defines(BLOCK, 1, overlapped),
            "READY": gathering.READY,
            "HEARTBEAT": gathering.HEARTBEAT,
            "FAILED": gathering.FAILED,
        },
        params=(
            *((name, "u64") for name in ("epoch", "count", "words", "source")),
            ("stride", "u32"),
            ("target", "u64"),
            ("row_bytes", "u32"),
            ("patience", "u64"),
        ),
        block=BLOCK,
        reference=take_rows_reference,
    )


def take_rows_grid(n_tokens: int, row_bytes: int) -> tuple[int]:
    """Blocks for steps of up to n_tokens, row_bytes each."""
    return (max(1, min(MOST_BLOCKS, -(-n_tokens * row_bytes // (UNIT_BYTES * BLOCK)))),)


def take_rows_reference(source: U8, target: U8, epoch: int, n_tokens: int, *, here: bool) -> U8:
    """target u8[rows, row_bytes] with the first n_tokens rows of source u8[2, stride]; as it was
    where they are not here."""
    result = target.copy()
    if here:
        n_bytes = n_tokens * target.shape[1]
        result[:n_tokens] = source[epoch % 2, :n_bytes].reshape(n_tokens, -1)
    return result


def variants() -> Iterator[tuple[str, Kernel]]:
    """Alone and overlapped."""
    yield "take_rows", take_rows()
    yield "take_rows (overlapped)", take_rows(overlapped=True)
