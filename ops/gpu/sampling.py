"""The GPU kernels `candidates` and `sample`: from a row of logits to a token.

`candidates` changes logits as biases and penalties say, then finds the k best of each row: ids and
logits, the largest logit first, equals by the lower id.  With k = 1 that is the greedy choice, and
costs one pass.  Grid (`candidates_blocks(n_vocab)`, outputs).

logits      f32[outputs, stride], changed in place by the edits
n_vocab     up to 262144; stride: values from a row to the next, a multiple of 4
count       address of the u32 number of outputs, a block beyond it leaves; 0: all of the grid
k           i32[outputs], each 1 .. 256
first_edit  i32[outputs + 1]: the edits of a row are first_edit[row] .. first_edit[row + 1] - 1;
            0: there are none
edits       `EDIT`[*]: the ids of a row differ
penalties   `PENALTIES`[outputs]
epoch       address of a u32: the number of the step
flags       u32[outputs]: gets the epoch where a logit, before the edits, is not finite
scratch     `scratch_bytes(n_vocab)` bytes an output, 16-byte aligned
counters    u32[outputs], 0 before and after
ids         i32[outputs, 256], written: k of each row, -1 beyond the vocabulary
values      f32[outputs, 256], written: their logits after the edits
tokens      i32[outputs], written: the best of each row

`sample` draws a token among a row's candidates, as the host's sampler does with the chain top-k,
top-p, min-p, temperature: the same order of additions, exponentials of its own (within two ulp of
f64).  Grid (outputs,).

count, k, n_vocab, ids, values  as above
chains      `CHAIN`[outputs]
tokens      i32[outputs], written
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ops.gpu.kernel import Kernel, launch_defines
from ops.quants.block import F32

I32 = NDArray[np.int32]

MAX_K = 256
"""Candidates of a row: the length of its ids and values."""

MAX_VOCAB = 262144
BLOCK = 256
SET_VALUES = 32
BLOCK_VALUES = BLOCK * SET_VALUES
"""Logits that a block looks at; a thread's are a set."""

LISTED_SETS = MAX_K + 32
"""Sets that are looked at again, at most."""

EDIT = np.dtype(
    [
        ("id", "<i4"),
        ("count", "<u4"),
        ("bias", "<f4"),
        ("spare", "<u4"),
        ("dry", "<f8"),
        ("spare_2", "<u8"),
    ]
)
"""A token's changes: bias is added, then the penalties if count > 0, then dry is subtracted."""

PENALTIES = np.dtype([("repeat", "<f8"), ("frequency", "<f8"), ("presence", "<f8"), ("", "<f8")])
"""z / repeat if z > 0 else z * repeat, then - count * frequency - presence."""

CHAIN = np.dtype(
    [
        ("top_p", "<f8"),
        ("log_min_p", "<f8"),
        ("position", "<u8"),
        ("seed", "<u4"),
        ("min_keep", "<u4"),
        ("temperature", "<f4"),
        ("spare", "<u4"),
        ("spare_2", "<u8"),
    ]
)
"""top_p >= 1: off; log_min_p, ln(min_p): -inf: off; temperature 1: off, and never <= 0.

A greedy row has k = 1 and any chain.
"""

CANDIDATES_PARAMS = (
    ("logits", "u64"),
    ("n_vocab", "u32"),
    ("stride", "u32"),
    ("count", "u64"),
    ("k", "u64"),
    ("first_edit", "u64"),
    ("edits", "u64"),
    ("penalties", "u64"),
    ("epoch", "u64"),
    ("flags", "u64"),
    ("scratch", "u64"),
    ("counters", "u64"),
    ("ids", "u64"),
    ("values", "u64"),
    ("tokens", "u64"),
)

SAMPLE_PARAMS = (
    ("count", "u64"),
    ("k", "u64"),
    ("n_vocab", "u32"),
    ("ids", "u64"),
    ("values", "u64"),
    ("chains", "u64"),
    ("tokens", "u64"),
)


def candidates(*, overlapped: bool = False) -> Kernel:
    """The best of each row; grid (candidates_blocks(n_vocab), outputs)."""
    return Kernel(
        entry="candidates",
        source="candidates.ptx",
        defines={"LISTED_SETS": LISTED_SETS, **launch_defines(BLOCK, 1, overlapped)},
        params=CANDIDATES_PARAMS,
        block=BLOCK,
        reference=candidates_reference,
    )


def sample(*, overlapped: bool = False) -> Kernel:
    """A token of each row; grid (outputs,)."""
    return Kernel(
        entry="sample",
        source="sample.ptx",
        defines=launch_defines(MAX_K, 1, overlapped),
        params=SAMPLE_PARAMS,
        block=MAX_K,
        reference=sample_reference,
    )


def candidates_blocks(n_vocab: int) -> int:
    """The grid's x.

    Raises:
        ValueError: n_vocab is above `MAX_VOCAB`.
    """
    if not 0 < n_vocab <= MAX_VOCAB:
        raise ValueError(f"candidates of {n_vocab} logits: more than {MAX_VOCAB}, or none")
    return -(-n_vocab // BLOCK_VALUES)


def scratch_bytes(n_vocab: int) -> int:
    """Scratch memory of an output: maxima of sets and of blocks, and a list of keys."""
    blocks = candidates_blocks(n_vocab)
    return blocks * (8 * BLOCK + 16) + 8 * SET_VALUES * LISTED_SETS


def edited(logits: F32, edits: NDArray[np.void], penalties: NDArray[np.void]) -> F32:
    """A row f32[n_vocab] after its `EDIT`s, in the order bias, penalties, dry."""
    z = logits.copy()
    ids = edits["id"]
    z[ids] += edits["bias"]
    old = z[ids].astype(np.float64)
    repeat = np.where(old > 0, old / penalties["repeat"], old * penalties["repeat"])
    new = repeat - edits["count"] * penalties["frequency"] - penalties["presence"]
    z[ids] = np.where(edits["count"] > 0, new, old)
    z[ids] = z[ids].astype(np.float64) - edits["dry"]
    return z


def candidates_reference(logits: F32, k: int) -> tuple[I32, F32]:
    """(ids, logits) of the k best of f32[n_vocab]; fewer where there are fewer."""
    order = np.argsort(-logits, kind="stable")[:k]
    return order.astype(np.int32), logits[order]


def sample_reference(values: F32, chain: NDArray[np.void], number: float) -> int:
    """Which of the candidates' logits f32[n], largest first, the number in [0, 1) draws."""
    if chain["top_p"] < 1:
        count = int(_probabilities(values).cumsum().searchsorted(chain["top_p"])) + 1
        values = values[: max(count, int(chain["min_keep"]))]
    with np.errstate(over="ignore"):
        bound = np.float32(float(values[0]) + float(chain["log_min_p"]))
    count = int(np.count_nonzero(values >= bound))
    values = values[: max(count, int(chain["min_keep"]))] / chain["temperature"]
    cumulative = _probabilities(values).cumsum()
    return int(cumulative.searchsorted(number * cumulative[-1], side="right"))


def variants() -> Iterator[tuple[str, Kernel]]:
    """Each alone and overlapped."""
    for overlapped in (False, True):
        for kernel in (candidates(overlapped=overlapped), sample(overlapped=overlapped)):
            yield f"{kernel.entry}{' (overlapped)' if overlapped else ''}", kernel


def _probabilities(values: F32) -> NDArray[np.float64]:
    weights: NDArray[np.float64] = np.exp(values.astype(np.float64) - float(values[0]))
    weights /= weights.sum()
    return weights
