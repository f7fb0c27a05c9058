"""The GPU kernels `hand_over`, `take_over` and `take_tokens`: a step goes on to the next GPU.

The layers of a model may be split over several GPUs. All their graphs are launched together; the
last but one kernel of a graph is `hand_over`, the second one of the next graph is `take_over`.

epoch            address of a u32 in the GPU's own memory: the number of the step
count            address of the u32 number of tokens
x, row_bytes     u8[n_tokens, row_bytes], a multiple of 16
target / source  u8[2, stride], one of them a step by turns: the next GPU's memory, which the GPU
                 before reaches as its peer, or mapped host memory
given            u32 beside it: the last step whose rows are complete
taken            u32 in the memory of the GPU before, or mapped: the last step whose rows were read
counter          u32 of the kernel alone, in the GPU's own memory, 0 between launches
words            mapped host memory, `WORDS_BYTES`, see below
patience, link   nanoseconds; a number for messages

`take_tokens` is the second kernel of the first GPU's graphs. Where tokens of a step are those that
the one before it chooses, it waits for that one's end on the last GPU, `done` (see
`ops.gpu.step_io`), and fetches them from there; else it leaves.

token_ids        i32[n_tokens]: ids, or -1 - row of the token that the step before chose for it
done             u32 in mapped memory: the last step of which the last GPU told
source           i32[RING, stride / 4] in mapped memory: the tokens that steps chose
tokens           i32[*] of the first GPU: row gets its token

The three u32 given, taken and counter begin with 0; epochs with 1. Nobody waits for ever: the host
changes BEAT as long as it looks after the step, and sets STOP once it has no hope for it. Whoever
gives up, at STOP or after `patience` without a beat, says so in the step's place at FAILED; the
step then goes on to its end with wrong numbers, and the next one is unharmed.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ops.gpu.kernel import Kernel, launch_defines
from ops.gpu.step_io import RING
from ops.quants.block import U8

I32 = NDArray[np.int32]

BLOCK = 256
UNIT_BYTES = 16
"""What a thread copies at a time."""

MOST_BLOCKS = 64
TOKENS_BLOCK = 32

BEAT, STOP = 0, 4
"""u32 that the host changes; u32, not 0: give up."""
FAILED = 64
"""u32[2, 2]: of the even and of the odd steps, the last one in which a GPU gave up, as
`ops.exchange.failed_number` has it, and on which link."""
WORDS_BYTES = 128

PATIENCE_NS = 10_000_000_000
"""Far longer than an event loop is ever busy with something else."""

FLAGS = (("given", "u64"), ("taken", "u64"), ("counter", "u64"), ("words", "u64"))
ENDS = (*FLAGS, ("patience", "u64"), ("link", "u32"))


def hand_over(*, overlapped: bool = False) -> Kernel:
    """Rows to the next GPU."""
    return Kernel(
        entry="hand_over",
        source="hand_over.ptx",
        defines={**launch_defines(BLOCK, 1, overlapped), "FAILED": FAILED},
        params=(
            ("epoch", "u64"),
            ("count", "u64"),
            ("x", "u64"),
            ("row_bytes", "u32"),
            ("target", "u64"),
            ("stride", "u32"),
            *ENDS,
        ),
        block=BLOCK,
        reference=hand_over_reference,
    )


def take_over() -> Kernel:
    """Rows of the GPU before."""
    defines = launch_defines(BLOCK, 1, overlapped=False)
    return Kernel(
        entry="take_over",
        source="take_over.ptx",
        defines={"LAUNCH_BOUNDS": defines["LAUNCH_BOUNDS"], "FAILED": FAILED},
        params=(
            ("epoch", "u64"),
            ("count", "u64"),
            ("source", "u64"),
            ("stride", "u32"),
            ("x", "u64"),
            ("row_bytes", "u32"),
            *ENDS,
        ),
        block=BLOCK,
        reference=take_over_reference,
    )


def take_tokens() -> Kernel:
    """What the last GPU chose, to the first one; a grid of one block."""
    bounds = launch_defines(TOKENS_BLOCK, 1, overlapped=False)["LAUNCH_BOUNDS"]
    return Kernel(
        entry="take_tokens",
        source="take_tokens.ptx",
        defines={"LAUNCH_BOUNDS": bounds, "FAILED": FAILED, "RING_MASK": RING - 1},
        params=(
            ("epoch", "u64"),
            ("count", "u64"),
            ("token_ids", "u64"),
            ("done", "u64"),
            ("source", "u64"),
            ("stride", "u32"),
            ("tokens", "u64"),
            ("words", "u64"),
            ("patience", "u64"),
            ("link", "u32"),
        ),
        block=TOKENS_BLOCK,
        reference=take_tokens_reference,
    )


def blocks(n_tokens: int, row_bytes: int) -> int:
    """The grid for steps of up to n_tokens."""
    return max(1, min(MOST_BLOCKS, -(-n_tokens * row_bytes // (UNIT_BYTES * BLOCK))))


def hand_over_reference(x: U8, target: U8, epoch: int, *, free: bool) -> U8:
    """target u8[2, stride] with the rows x u8[n_tokens, row_bytes]; as it was if it is not free."""
    result = target.copy()
    if free:
        result[epoch % 2, : x.size] = x.reshape(-1)
    return result


def take_over_reference(source: U8, x: U8, epoch: int, n_tokens: int, *, here: bool) -> U8:
    """x u8[rows, row_bytes] with the first n_tokens rows of source u8[2, stride]; 0 if not here."""
    result = x.copy()
    n_bytes = n_tokens * x.shape[1]
    rows = source[epoch % 2, :n_bytes].reshape(n_tokens, -1) if here else 0
    result[:n_tokens] = rows
    return result


def take_tokens_reference(
    source: I32, tokens: I32, token_ids: I32, epoch: int, *, here: bool
) -> I32:
    """tokens i32[*] with those for which ids of i32[n_tokens] stand, of source i32[RING, *]; 0 if
    they are not here."""
    result = tokens.copy()
    rows = -1 - token_ids[token_ids < 0]
    result[rows] = source[(epoch - 1) % RING, rows] if here else 0
    return result


def variants() -> Iterator[tuple[str, Kernel]]:
    """hand_over alone and overlapped; take_over; take_tokens."""
    yield "hand_over", hand_over()
    yield "hand_over (overlapped)", hand_over(overlapped=True)
    yield "take_over", take_over()
    yield "take_tokens", take_tokens()
