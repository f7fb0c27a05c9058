"""candidates: ids and logits of the best after edits, those of `ops.gpu.sampling`'s reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from ops.gpu.kernel import Kernel
from ops.gpu.sampling import (
    EDIT,
    MAX_K,
    PENALTIES,
    candidates,
    candidates_blocks,
    candidates_reference,
    edited,
    scratch_bytes,
)
from ops.quants.block import F32
from tests.support.cases.case import Array, Case, Outcome, joined_bytes
from tests.support.machines import Machine

EPOCH = 9
UNTOUCHED = 77


@dataclass(frozen=True)
class Setting:
    """k of each row, edits of each row (0: no list); counted: the grid has a row too many."""

    n_vocab: int
    k: tuple[int, ...]
    n_edits: int = 0
    counted: bool = False
    shape: str = "normal"


SMALL = {
    "the best alone": Setting(9001, (1, 1), counted=True),
    "40 and 1": Setting(17000, (40, 1), n_edits=300),
    "256": Setting(16384, (256, 200), n_edits=3, counted=True),
    "fewer than k": Setting(70, (100, 40)),
    "equal logits": Setting(8300, (256, 17), shape="equal"),
    "one far away": Setting(16500, (256, 200), shape="outlier"),
    "crowded sets": Setting(16384, (256, 100), shape="crowded"),
    "not finite": Setting(8195, (4, 1, 3), n_edits=2, shape="not finite"),
}

LARGE = {
    "1 of 151936": Setting(151936, (1,)),
    "40 of 151936": Setting(151936, (40,)),
    "40 of 151936, 31 rows": Setting(151936, (40,) * 31, n_edits=64, counted=True),
    "256 of 262144": Setting(262144, (256, 1), n_edits=64),
}


def logits_of(setting: Setting, stride: int) -> F32:
    """f32[rows, stride]; what lies beyond n_vocab would win."""
    rng = np.random.default_rng(setting.n_vocab)
    rows, n = len(setting.k) + setting.counted, setting.n_vocab
    x = (rng.normal(size=(rows, stride)) * 4).astype(np.float32)
    if setting.shape == "equal":
        x[0], x[1, ::3], x[1, 1::3] = 2.5, 0.0, -0.0
    if setting.shape == "outlier":
        x = (x / np.float32(1e6)).astype(np.float32)
        x[:, n // 2] = 1e30
    if setting.shape == "crowded":  # whole sets of logits above all others
        token = np.arange(stride)
        x[:, (token % 1024 < 120) & (token < 8192)] += 50
    if setting.shape == "not finite":
        x[0, 8190], x[1, 3], x[2, 100] = np.nan, np.inf, -np.inf
    x[:, n:] = np.inf
    return x


def edits_of(setting: Setting) -> tuple[Array, Array, Array]:
    """(first_edit, edits, penalties): some tokens forbidden, some raised, some seen before."""
    rng = np.random.default_rng(3)
    rows, n = len(setting.k), setting.n_edits
    first = np.arange(rows + 1, dtype=np.int32) * n
    edits = np.zeros(rows * n, EDIT)
    for row in range(rows):
        ids = rng.permutation(setting.n_vocab)[:n]
        part = edits[first[row] : first[row + 1]]
        part["id"], part["count"] = ids, rng.integers(0, 4, n)
        part["bias"] = rng.choice([0, 0, 30, -5, -np.inf], n)
        part["dry"] = rng.choice([0, 0.7, 3e38], n)
    penalties = np.zeros(rows, PENALTIES)
    penalties["repeat"] = np.linspace(1.1, 1.3, rows)
    penalties["frequency"], penalties["presence"] = 0.3, 0.1
    return first, edits, penalties


def run(setting: Setting, kernel: Kernel, m: Machine) -> Outcome:
    """Ids, logits, flags and tokens, as bytes; the counters have to be 0 again."""
    n, rows = setting.n_vocab, len(setting.k)
    launched, stride = rows + setting.counted, -(-n // 4) * 4
    logits, (first, edits, penalties) = logits_of(setting, stride), edits_of(setting)
    k = np.array([*setting.k, 1][:launched], np.int32)
    outs = [
        np.full((launched, MAX_K), UNTOUCHED, np.int32),
        np.full((launched, MAX_K), UNTOUCHED, np.float32),
        np.full(launched, UNTOUCHED, np.uint32),
        np.zeros(launched, np.uint32),
        np.full(launched, UNTOUCHED, np.int32),
    ]
    ids, values, flags, counters, tokens = (m.place(out) for out in outs)
    m.launch(
        kernel,
        (candidates_blocks(n), launched),
        {
            "logits": m.place(logits),
            "n_vocab": n,
            "stride": stride,
            "count": m.place(np.array([rows], np.uint32)) if setting.counted else 0,
            "k": m.place(k),
            "first_edit": m.place(first) if setting.n_edits else 0,
            "edits": m.place(edits) if setting.n_edits else 0,
            "penalties": m.place(penalties),
            "epoch": m.place(np.array([EPOCH], np.uint32)),
            "flags": flags,
            "scratch": m.place(np.zeros(launched * scratch_bytes(n), np.uint8)),
            "counters": counters,
            "ids": ids,
            "values": values,
            "tokens": tokens,
        },
    )
    result = [
        m.read(place, out.dtype, out.shape)
        for place, out in zip((ids, values, flags, counters, tokens), outs, strict=True)
    ]
    for row, wanted in enumerate(setting.k):
        raw = logits[row, :n]
        if not np.isfinite(raw).all():
            outs[2][row] = EPOCH
        mine = edits[first[row] : first[row + 1]]
        with np.errstate(over="ignore", invalid="ignore"):
            best, best_logits = candidates_reference(edited(raw, mine, penalties[row]), wanted)
        outs[0][row, :wanted] = -1
        outs[0][row, : len(best)] = best
        outs[1][row, : len(best)] = best_logits
        outs[4][row] = best[0]
    result[1] += np.float32(0)  # -0 equals 0
    outs[1] += np.float32(0)
    return Outcome(joined_bytes(result), joined_bytes(outs))


def cases() -> Iterator[Case]:
    """Everything alone, a part of it overlapped."""
    for overlapped in (False, True):
        kernel = candidates(overlapped=overlapped)
        for name, setting in SMALL.items():
            yield Case(name, kernel, partial(run, setting, kernel))
    for name, setting in LARGE.items():
        yield Case(name, candidates(), partial(run, setting, candidates()), large=True)
