"""CandidateSampler: a device's candidates lead to the token that the whole row leads to."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from ops.gpu.sampling import (
    MAX_K,
    candidates,
    candidates_blocks,
    candidates_reference,
    edited,
    sample,
    sample_reference,
    scratch_bytes,
)
from runtime.engine.candidate_sampler import CandidateSampler, DeviceWork
from runtime.engine.params import SamplingParams
from runtime.engine.philox import uniform
from runtime.engine.sampling_vocabulary import SamplingVocabulary
from runtime.errors import ComputeError, RequestError
from tests.support.machines import InterpretedMachine

N_VOCAB = 700
PROMPT = tuple(np.random.default_rng(5).integers(0, 60, 90).tolist())
NO_BREAKERS = {"dry_sequence_breakers": ()}

CHAINS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0},
    "greedy with penalties": {"temperature": 0, "repeat_penalty": 1.3, "presence_penalty": 0.5},
    "default": {},
    "penalties": {"repeat_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": -0.3},
    "dry": {"dry_multiplier": 0.8, "repeat_penalty": 0.9, **NO_BREAKERS},
    "bias": {"logit_bias": {3: 6.0, 5: False, 650: -2}, "top_k": 7, "temperature": 2.5},
    "not cut": {"top_k": 256, "top_p": 1, "min_p": 0, "temperature": 1},
    "cut hard": {"top_p": 0.3, "min_keep": 3, "temperature": 3},
}
WHOLE = tuple(CHAINS)
"""Every chain above is done by the device alone; those below end on the host."""

HALF: dict[str, dict[str, object]] = {
    "typical": {"typical_p": 0.6, "temperature": 2},
    "xtc": {"xtc_probability": 0.9, "xtc_threshold": 0.05, "temperature": 2},
    "dynamic": {"dynatemp_range": 0.5},
    "another order": {"samplers": ("top_k", "temperature", "min_p"), "temperature": 2},
    "greedy after top-k": {"temperature": 0, "typical_p": 0.5},
}
AHEAD = ("greedy", "default", "bias", "not cut", "cut hard")
"""Chains whose work does not depend on the tokens before."""

NOT_FOR_A_DEVICE: dict[str, dict[str, object]] = {
    "no top-k": {"top_k": 0},
    "many": {"top_k": 257},
    "mirostat": {"mirostat": 2},
    "adaptive": {"samplers": ("top_k", "adaptive_p"), "adaptive_target": 0.3},
    "log-probabilities": {"logprobs": True},
    "sigma first": {"top_n_sigma": 1.5},
    "dry before penalties": {
        "samplers": ("dry", "penalties", "top_k"),
        "dry_multiplier": 1,
        "repeat_penalty": 1.1,
        **NO_BREAKERS,
    },
}


def sampler(seed: int, **fields: object) -> CandidateSampler:
    params = SamplingParams(**{"seed": seed, **fields})  # type: ignore[arg-type]
    return CandidateSampler(params, SamplingVocabulary(N_VOCAB), PROMPT)


def logits(seed: int) -> NDArray[np.float32]:
    """Some equal, the prompt's tokens high."""
    z = (np.random.default_rng(seed).normal(size=N_VOCAB) * 2).astype(np.float32)
    z[:60] += 3
    return np.round(z, 1) if seed % 2 else z


def on_the_device(work: DeviceWork, row: NDArray[np.float32]) -> tuple[NDArray, NDArray]:
    return candidates_reference(edited(row, work.edits, work.penalties[0]), work.k)


@pytest.mark.parametrize(("name", "seed"), list(product([*CHAINS, *HALF], range(12))))
def test_the_token_is_that_of_the_whole_row(name: str, seed: int) -> None:
    one = sampler(seed, **(CHAINS | HALF)[name])
    row, position = logits(seed), 10 * seed + 7
    work = one.device_work(position)
    assert work is not None
    ids, values = on_the_device(work, row)
    expected = one.choose(row, position).id
    assert one.choose_among(ids, values, position).id == expected
    assert (work.chain is None) == (name in HALF)
    if work.chain is not None:
        index = sample_reference(values, work.chain[0], uniform(one.seed, position))
        assert ids[index] == expected


@pytest.mark.parametrize("name", [*CHAINS, *HALF, *NOT_FOR_A_DEVICE])
def test_whose_work_is_known_ahead(name: str) -> None:
    """Work for a later position is the same before and after the tokens up to it."""
    one = sampler(3, **(CHAINS | HALF | NOT_FOR_A_DEVICE)[name])
    before = one.device_work(102)
    for token in (5, 5, 9):
        one.accept(token)
    after = one.device_work(102)
    assert one.runs_ahead == (name in AHEAD)
    if one.runs_ahead:
        assert before is not None
        assert after is not None
        assert before.edits.tobytes() == after.edits.tobytes()
        assert before.chain is not None
        assert after.chain is not None
        assert before.chain.tobytes() == after.chain.tobytes()
        other = one.device_work(103)
        assert other is not None
        assert before.k == 1 or other.chain != before.chain


@pytest.mark.parametrize("name", NOT_FOR_A_DEVICE)
def test_other_chains_take_the_whole_row(name: str) -> None:
    assert sampler(1, **NOT_FOR_A_DEVICE[name]).device_work(0) is None


def test_what_allows_no_choice_is_an_error() -> None:
    nothing = np.full(1, -np.inf, np.float32)
    everything = {token: False for token in range(N_VOCAB)}
    with pytest.raises(RequestError, match="forbids every token"):
        sampler(1, logit_bias=everything).choose_among(np.zeros(1, np.int32), nothing, 4)
    with pytest.raises(ComputeError, match="position 4"):
        sampler(1).choose_among(np.zeros(1, np.int32), nothing, 4)


def test_the_kernels_choose_the_same_tokens() -> None:
    samplers = [sampler(i, **CHAINS[name]) for i, name in enumerate(WHOLE * 3)]
    rows = np.stack([logits(i) for i in range(len(samplers))])
    works = [one.device_work(i) for i, one in enumerate(samplers)]
    expected = [
        one.choose(row, i).id for i, (one, row) in enumerate(zip(samplers, rows, strict=True))
    ]
    assert _run([work for work in works if work is not None], rows) == expected


def _run(works: list[DeviceWork], rows: NDArray[np.float32]) -> list[int]:
    """The tokens that both kernels, interpreted, choose from the rows."""
    m, n = InterpretedMachine(), len(works)
    first = np.cumsum([0, *(len(work.edits) for work in works)]).astype(np.int32)
    k = m.place(np.array([work.k for work in works], np.int32))
    ids, values = m.place(np.zeros((n, MAX_K), np.int32)), m.place(np.zeros((n, MAX_K), np.float32))
    tokens = m.place(np.zeros(n, np.int32))
    shared = {"count": 0, "k": k, "n_vocab": N_VOCAB, "ids": ids, "values": values}
    m.launch(
        candidates(),
        (candidates_blocks(N_VOCAB), n),
        {
            **shared,
            "logits": m.place(rows),
            "stride": N_VOCAB,
            "first_edit": m.place(first),
            "edits": m.place(np.concatenate([work.edits for work in works])),
            "penalties": m.place(np.concatenate([work.penalties for work in works])),
            "epoch": m.place(np.ones(1, np.uint32)),
            "flags": m.place(np.zeros(n, np.uint32)),
            "scratch": m.place(np.zeros(n * scratch_bytes(N_VOCAB), np.uint8)),
            "counters": m.place(np.zeros(n, np.uint32)),
            "tokens": tokens,
        },
    )
    chains = np.concatenate([work.chain for work in works if work.chain is not None])
    m.launch(sample(), (n,), {**shared, "chains": m.place(chains), "tokens": tokens})
    return m.read(tokens, np.int32, n).tolist()
