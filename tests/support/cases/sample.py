"""sample: the token that the host's sampler chooses from the whole row of logits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import product

import numpy as np

from ops.gpu.kernel import Kernel
from ops.gpu.sampling import CHAIN, MAX_K, candidates_reference, sample
from ops.quants.block import F32
from runtime.engine.params import SamplingParams
from runtime.engine.sampler import Sampler
from runtime.engine.sampling_vocabulary import SamplingVocabulary
from tests.support.cases.case import Case, Outcome, given
from tests.support.machines import Machine

UNTOUCHED = -7
TOP_K = (1, 3, 40, 100, 128, 131, 200, 255, 256)
"""Among them every way in which a sum over k values is split."""

TOP_P, MIN_P, MIN_KEEP = (0.95, 1.0, 0.5, 0.0), (0.05, 0.0, 0.4), (0, 0, 30)
TEMPERATURES = (0.8, 1.0, 0.2, 1.7)


def params_of(n_rows: int) -> list[SamplingParams]:
    """Chains of every kind, in an order in which neighbours differ in all."""
    combinations = list(product(TOP_K, TOP_P, MIN_P, MIN_KEEP, TEMPERATURES))
    chosen = np.random.default_rng(8).permutation(len(combinations))
    return [
        SamplingParams(
            seed=1000 + row, top_k=top_k, top_p=top_p, min_p=min_p, min_keep=keep, temperature=t
        )
        for row in range(n_rows)
        for top_k, top_p, min_p, keep, t in [combinations[chosen[row % len(chosen)]]]
    ]


def logits_of(n_rows: int, n_vocab: int) -> F32:
    """Peaked and flat rows, rows with many equals, one of equals alone, some tokens forbidden."""
    rng = np.random.default_rng(n_vocab)
    spread = rng.choice([0.02, 1, 3], (n_rows, 1))
    x = (rng.normal(size=(n_rows, n_vocab)) * spread).astype(np.float32)
    x[1::4] = np.round(x[1::4])
    x[2::7] = 0.25
    x[::5, ::3] = -np.inf
    return x


def run(n_rows: int, n_vocab: int, counted: bool, kernel: Kernel, m: Machine) -> Outcome:
    """Tokens of all rows."""
    logits, params = logits_of(n_rows, n_vocab), params_of(n_rows)
    vocabulary = SamplingVocabulary(n_vocab)
    positions = np.arange(n_rows, dtype=np.uint64) * np.uint64(0x3_1234_5677)
    chains = np.zeros(n_rows, CHAIN)
    ids, values = np.full((n_rows, MAX_K), -1, np.int32), np.zeros((n_rows, MAX_K), np.float32)
    expected = np.full(n_rows + counted, UNTOUCHED, np.int32)
    for row, wanted in enumerate(params):
        log_min_p = math.log(wanted.min_p) if wanted.min_p > 0 else -math.inf
        chains[row]["top_p"], chains[row]["log_min_p"] = wanted.top_p, log_min_p
        chains[row]["position"], chains[row]["seed"] = positions[row], wanted.seed
        chains[row]["min_keep"], chains[row]["temperature"] = wanted.min_keep, wanted.temperature
        best, best_logits = candidates_reference(logits[row], wanted.top_k)
        ids[row, : len(best)], values[row, : len(best)] = best, best_logits
        choice = Sampler(wanted, vocabulary).choose(logits[row], int(positions[row]))
        expected[row] = choice.id

    tokens = m.place(np.full(n_rows + counted, UNTOUCHED, np.int32))
    m.launch(
        kernel,
        (n_rows + counted,),
        {
            "count": given(m, np.array([n_rows], np.uint32), counted),
            "k": given(m, np.array([p.top_k for p in params], np.int32)),
            "n_vocab": n_vocab,
            "ids": given(m, ids),
            "values": given(m, values),
            "chains": given(m, chains),
            "tokens": tokens,
        },
    )
    return Outcome(m.read(tokens, np.int32, n_rows + counted), expected)


def cases() -> Iterator[Case]:
    for overlapped in (False, True):
        kernel = sample(overlapped=overlapped)
        for n_rows, n_vocab, counted in ((96, 300, True), (24, 150, False)):
            case = partial(run, n_rows, n_vocab, counted, kernel)
            yield Case(f"{n_rows} rows of {n_vocab}", kernel, case)
    case = partial(run, 1296, 600, False, sample())
    yield Case("every chain", sample(), case, large=True)
