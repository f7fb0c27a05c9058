"""Sampler: every formula against a plain reference, on the whole distribution."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from runtime.engine.params import SamplingParams
from runtime.engine.sampler import Choice, Sampler
from runtime.engine.sampling_chain import descending, largest
from runtime.engine.sampling_vocabulary import SamplingVocabulary
from runtime.errors import ComputeError, EngineBug, RequestError, TokenizerUnavailable
from tests.support import sampling_reference as reference
from tests.support.sampling_reference import Row

SIZES = (7, 300, 5000)  # few; a full sort; by block maxima
OFF = {"samplers": (), "temperature": 1.0}


class Letters:
    """A tokenizer whose token i is the text of `pieces[i]`."""

    def __init__(self, pieces: Sequence[str], end_ids: Sequence[int] = ()) -> None:
        self.pieces = pieces
        self.end_ids = end_ids
        self.n_vocab = len(pieces)

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id].encode()

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        assert not add_special
        return [self.pieces.index(letter) for letter in text]


def random_logits(n: int, seed: int = 0, spread: float = 2.5) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(n) * spread).astype(np.float32)


def sampler(n: int, prompt: Sequence[int] = (), **fields: object) -> Sampler:
    params = SamplingParams(**{"seed": 1, "n_probs": n, "post_sampling_probs": True, **fields})
    return Sampler(params, SamplingVocabulary(n), prompt)


def distribution(logits: NDArray[np.float32], prompt: Sequence[int] = (), **fields: object):
    return dict(sampler(len(logits), prompt, **fields).choose(logits, 0).top_probs)


def row_of(logits: NDArray[np.float32]) -> Row:
    return list(enumerate(logits.astype(np.float64).tolist()))


def assert_same(got: dict[int, float], wanted: Row) -> None:
    """`got` is the softmax of `wanted`, without its zeros."""
    pairs = zip(wanted, reference.softmax(wanted), strict=True)
    expected = {i: q for (i, _), q in pairs if q > 0}
    assert got.keys() == expected.keys()
    ids = sorted(expected)
    np.testing.assert_allclose([got[i] for i in ids], [expected[i] for i in ids], rtol=2e-5)


HISTORY = [3, 1, 4, 1, 5, 2, 6, 5, 3, 1, 4, 1]
CASES: dict[str, tuple[dict[str, object], Callable[[Row], Row]]] = {
    "nothing": ({}, lambda row: row),
    "top_k": ({"top_k": 5}, lambda row: reference.top_k(row, 5)),
    "top_k of all": ({"top_k": 10**6}, lambda row: row),
    "top_k of most": ({"top_k": 4000}, lambda row: reference.top_k(row, 4000)),
    "top_p": ({"top_p": 0.7}, lambda row: reference.top_p(row, 0.7)),
    "top_p, nearly all": ({"top_p": 0.999}, lambda row: reference.top_p(row, 0.999)),
    "top_p 0": ({"top_p": 0.0}, lambda row: reference.top_k(row, 1)),
    "top_p min_keep": (
        {"top_p": 0.01, "min_keep": 4},
        lambda row: reference.top_p(row, 0.01, 4),
    ),
    "min_p": ({"min_p": 0.08}, lambda row: reference.min_p(row, 0.08)),
    "min_p min_keep": ({"min_p": 0.99, "min_keep": 4}, lambda row: reference.min_p(row, 0.99, 4)),
    "typ_p": ({"typical_p": 0.6}, lambda row: reference.typical(row, 0.6)),
    "typ_p min_keep": (
        {"typical_p": 0.01, "min_keep": 5},
        lambda row: reference.typical(row, 0.01, 5),
    ),
    "top_n_sigma": ({"top_n_sigma": 1.2}, lambda row: reference.top_n_sigma(row, 1.2)),
    "xtc": (
        {"xtc_probability": 1.0, "xtc_threshold": 0.02},
        lambda row: reference.xtc(row, 0.02),
    ),
    "xtc keeps min_keep": (
        {"xtc_probability": 1.0, "xtc_threshold": 0.0, "min_keep": 2},
        lambda row: row,
    ),
    "temperature": ({"temperature": 0.6}, lambda row: reference.temperature(row, 0.6)),
    "temperature, dynamic": (
        {"temperature": 0.9, "dynatemp_range": 0.5, "dynatemp_exponent": 1.3},
        lambda row: reference.dynamic_temperature(row, 0.9, 0.5, 1.3),
    ),
    "penalties": (
        {
            "repeat_penalty": 1.3,
            "frequency_penalty": 0.4,
            "presence_penalty": 0.2,
            "repeat_last_n": 7,
        },
        lambda row: reference.penalties(row, HISTORY, 7, 1.3, 0.4, 0.2),
    ),
    "dry": (
        {"dry_multiplier": 0.9, "dry_base": 1.6, "dry_sequence_breakers": ()},
        lambda row: reference.dry(row, HISTORY, 0.9, 1.6, 2),
    ),
    "dry, short window": (
        {"dry_multiplier": 0.9, "dry_penalty_last_n": 9, "dry_sequence_breakers": ()},
        lambda row: reference.dry(row, HISTORY[-9:], 0.9, 1.75, 2),
    ),
}


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_formula(name: str, n: int) -> None:
    fields, formula = CASES[name]
    logits = random_logits(n)
    settings = {**OFF, "samplers": (name.split()[0].strip(","),), **fields}
    if name == "nothing":
        settings = OFF
    assert_same(distribution(logits, HISTORY, **settings), formula(row_of(logits)))


def test_default_chain() -> None:
    logits = random_logits(5000, spread=4)
    row = reference.min_p(reference.top_p(reference.top_k(row_of(logits), 40), 0.95), 0.05)
    assert_same(distribution(logits), reference.temperature(row, 0.8))


def test_whole_chain_in_its_order() -> None:
    logits = random_logits(3000, spread=3)
    got = distribution(
        logits,
        HISTORY,
        repeat_penalty=1.2,
        dry_multiplier=0.5,
        dry_sequence_breakers=(),
        top_n_sigma=3.0,
        typical_p=0.95,
        xtc_probability=1.0,
        xtc_threshold=0.3,
        temperature=0.7,
    )
    row = reference.penalties(row_of(logits), HISTORY, 64, 1.2, 0, 0)
    row = reference.dry(row, HISTORY, 0.5, 1.75, 2)
    row = reference.top_k(reference.top_n_sigma(row, 3.0), 40)
    row = reference.min_p(reference.top_p(reference.typical(row, 0.95), 0.95), 0.05)
    assert_same(got, reference.temperature(reference.xtc(row, 0.3), 0.7))


def test_order_and_repetition_change_the_result() -> None:
    logits = random_logits(300)
    row = row_of(logits)
    late = distribution(logits, samplers="pt", temperature=2.0, top_p=0.5)
    early = distribution(logits, samplers="tp", temperature=2.0, top_p=0.5)
    twice = distribution(logits, samplers="tt", temperature=2.0)
    assert_same(late, reference.temperature(reference.top_p(row, 0.5), 2.0))
    assert_same(early, reference.top_p(reference.temperature(row, 2.0), 0.5))
    assert_same(twice, reference.temperature(row, 4.0))
    assert len(early) > len(late)


def test_typical_after_forbidden_tokens() -> None:
    logits = random_logits(3000)
    got = distribution(logits, samplers="sy", top_n_sigma=1.5, typical_p=0.7)
    assert_same(got, reference.typical(reference.top_n_sigma(row_of(logits), 1.5), 0.7))


def test_penalties_after_a_cut_touch_only_what_is_left() -> None:
    logits = random_logits(5000)
    top = reference.top_k(row_of(logits), 6)
    history = [top[0][0], top[2][0], top[0][0], 17]
    got = distribution(logits, history, samplers="ke", top_k=6, frequency_penalty=1.0)
    assert_same(got, reference.penalties(top, history, 64, 1.0, 1.0, 0))


@pytest.mark.parametrize("n", SIZES)
def test_mirostat(n: int) -> None:
    logits = random_logits(n)
    row = reference.temperature(row_of(logits), 0.9)
    for version, cut in (
        (1, lambda mu: reference.mirostat_1(row, mu, n)),
        (2, lambda mu: reference.mirostat_2(row, mu)),
    ):
        fields = {"mirostat_tau": 1.2, "mirostat_eta": 0.4, "temperature": 0.9}
        one = sampler(n, mirostat=version, dynatemp_range=0.5, **fields)
        mu = 2.4
        for position in range(5):
            choice = one.choose(logits, position)
            assert_same(dict(choice.top_probs), cut(mu))
            one.accept(choice.id)
            mu -= 0.4 * (-math.log2(choice.prob) - 1.2)


def test_adaptive_p() -> None:
    logits = random_logits(300)
    one = sampler(300, samplers="ka", top_k=20, adaptive_target=0.3, adaptive_decay=0.5)
    row = reference.top_k(row_of(logits), 20)
    probs = {i: q for (i, _), q in zip(row, reference.softmax(row), strict=True)}
    total, weight = 0.3 / 0.5, 1 / 0.5
    for position in range(5):
        choice = one.choose(logits, position)
        assert_same(dict(choice.top_probs), reference.adaptive(row, 0.3, total / weight))
        one.accept(choice.id)
        total, weight = probs[choice.id] + 0.5 * total, 1 + 0.5 * weight


def test_a_token_that_was_not_chosen_teaches_nothing() -> None:
    logits = random_logits(300)
    one = sampler(300, mirostat=2, mirostat_tau=1.0)
    first = one.choose(logits, 0)
    one.accept((first.id + 1) % 300)
    assert one.choose(logits, 0) == first


def test_xtc_by_chance() -> None:
    logits = random_logits(300)
    one = sampler(300, **{**OFF, "samplers": "x"}, xtc_probability=0.3, xtc_threshold=0.02)
    cut = sum(len(one.choose(logits, position).top_probs) < 300 for position in range(1000))
    assert 240 < cut < 360


def test_dry_breakers() -> None:
    pieces = ["a", "b", "c", "x\n", "#", "=", "#=", "d"]
    history = [0, 1, 2, 7, 3, 0, 1, 2]  # a b c d \n a b c
    logits = random_logits(len(pieces))

    def penalized(prompt: Sequence[int], breakers: Sequence[str]) -> set[int]:
        fields = {"samplers": "d", "dry_multiplier": 1.0, "dry_sequence_breakers": breakers}
        params = SamplingParams(temperature=1.0, n_probs=8, post_sampling_probs=True, **fields)
        one = Sampler(params, SamplingVocabulary(8, Letters(pieces)), prompt)
        got = dict(one.choose(logits, 0).top_probs)
        factor = {i: got[i] / math.exp(logits[i]) for i in got}
        return {i for i in got if factor[i] < 0.99 * max(factor.values())}

    assert penalized(history, ("\n",)) == {7}
    assert penalized([0, 1, 2, 7, 0, 1, 3, 2], ("\n",)) == set()
    assert penalized([0, 1, 2, 7, 0, 1, 4, 5, 0, 1], ()) == {2, 4}
    assert penalized([0, 1, 2, 7, 0, 1, 4, 5, 0], ("#=",)) == set()  # one token after "#" "="
    assert penalized([0, 1, 2, 7, 0, 1, 6, 0, 1], ("#=",)) == {2}  # the breaker itself is free


def test_logit_bias() -> None:
    logits = random_logits(26)
    letters = [chr(97 + i) for i in range(26)]
    params = SamplingParams(
        **OFF,
        n_probs=26,
        post_sampling_probs=True,
        logit_bias=((3, 2.5), ("ef", -1.5), (3, 0.5), (7, False), (99, 1.0), (-1, 1.0)),
        ignore_eos=True,
    )
    vocabulary = SamplingVocabulary(26, Letters(letters, end_ids=(25, 24)))
    got = dict(Sampler(params, vocabulary).choose(logits, 0).top_probs)
    change = {3: 3.0, 4: -1.5, 5: -1.5, 7: -math.inf, 24: -math.inf, 25: -math.inf}
    assert_same(got, [(i, z + change.get(i, 0.0)) for i, z in row_of(logits)])


def test_greedy() -> None:
    logits = random_logits(5000)
    best = int(np.argmax(logits))
    for fields in (
        {"temperature": 0.0},
        {"temperature": -1.0},
        {"top_k": 1},
        {"temperature": 0.0, "mirostat": 1},
        {"temperature": 0.0, "samplers": "kt"},
        {"temperature": 0.0, "samplers": "ktx", "xtc_probability": 1.0},
    ):
        assert distribution(logits, **fields) == {best: 1.0}
    second = int(np.argsort(-logits)[1])
    assert distribution(logits, temperature=0.0, logit_bias={best: False}) == {second: 1.0}
    penalty = {"temperature": 0.0, "frequency_penalty": 1.0}
    assert distribution(logits, [best] * 9, **penalty) == {second: 1.0}
    assert distribution(logits, [best] * 9, samplers="te", **penalty) == {best: 1.0}


def test_equal_logits_go_by_id() -> None:
    rng = np.random.default_rng(2)
    for n in (50, 600, 3000, 20000):
        z = rng.integers(-3, 3, n).astype(np.float32)
        z[z == 0] *= rng.choice([-1.0, 1.0])
        z[: n // 10] = -np.inf
        wanted = sorted(range(n), key=lambda i, z=z: (-z[i], i))
        assert descending(z).tolist() == wanted
        for k in (1, 40, n // 20, n // 2, n):
            assert largest(z, k).tolist() == wanted[:k]


@pytest.mark.parametrize(
    ("fields", "is_quick"),
    [
        ({}, True),
        ({"temperature": 0.0}, True),
        ({"temperature": 0.0, "logprobs": True}, False),
        ({"repeat_penalty": 1.1}, True),
        ({"top_k": 0}, False),
        ({"samplers": "ptk"}, False),
        ({"temperature": 0.0, "typical_p": 0.5}, True),
        ({"temperature": 0.0, "typical_p": 0.5, "samplers": "ykt"}, False),
        ({"mirostat": 2}, False),
    ],
)
def test_what_takes_many_passes_over_the_logits_is_known(fields: dict, is_quick: bool) -> None:
    assert Sampler(SamplingParams(**fields), SamplingVocabulary(100)).is_quick is is_quick


def test_logprobs_are_raw() -> None:
    logits = random_logits(3000)
    z = logits.astype(np.float64)
    exact = z - z.max() - math.log(np.exp(z - z.max()).sum())
    params = SamplingParams(n_probs=4, logit_bias={123: 1e9}, temperature=0.3)
    choice = Sampler(params, SamplingVocabulary(3000)).choose(logits, 0)
    assert choice.id == 123
    assert choice.logprob == pytest.approx(exact[123], abs=1e-12)
    top = np.argsort(-z)[:4]
    assert [i for i, _ in choice.top_logprobs] == top.tolist()
    assert [p for _, p in choice.top_logprobs] == pytest.approx(exact[top].tolist(), abs=1e-12)
    assert choice.prob is None

    plain = Sampler(SamplingParams.greedy(), SamplingVocabulary(3000)).choose(logits, 0)
    assert plain == Choice(int(top[0]))
    own = Sampler(SamplingParams.greedy(logprobs=True), SamplingVocabulary(3000)).choose(logits, 0)
    assert own.logprob == pytest.approx(exact[top[0]]) and own.top_logprobs == ()


def test_draws_follow_the_distribution() -> None:
    logits = random_logits(20)
    one = sampler(20, **OFF)
    probs = dict(one.choose(logits, 0).top_probs)
    n = 8000
    counts = Counter(one.choose(logits, position).id for position in range(n))
    chi2 = sum((counts[i] - n * q) ** 2 / (n * q) for i, q in probs.items() if n * q > 5)
    assert chi2 < 50  # 20 degrees of freedom: 1 in 5000


def test_a_choice_depends_on_seed_and_position_only() -> None:
    logits = random_logits(300)
    forward, backward = sampler(300), sampler(300)
    there = [forward.choose(logits, position).id for position in range(20)]
    back = [backward.choose(logits, position).id for position in reversed(range(20))]
    assert there == back[::-1]
    other = sampler(300, seed=2)
    assert there != [other.choose(logits, position).id for position in range(20)]


def test_a_random_seed_is_reported_and_repeats() -> None:
    logits = random_logits(300, spread=0.5)
    first = sampler(300, seed=-1)
    again = sampler(300, seed=first.seed)
    assert 0 <= first.seed < 2**32 - 1
    ids = [first.choose(logits, position).id for position in range(20)]
    assert ids == [again.choose(logits, position).id for position in range(20)]
    assert first.seed != sampler(300, seed=-1).seed


def test_logits_are_left_as_they_are() -> None:
    logits = random_logits(5000)
    logits.setflags(write=False)
    before = logits.copy()
    for fields in ({}, {"logit_bias": {3: 1.0}, "repeat_penalty": 1.5}, {"top_n_sigma": 1.0}):
        sampler(5000, [3, 4], **fields).choose(logits, 0)
    assert np.array_equal(before, logits)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_row_that_is_not_finite(value: float, temperature: float) -> None:
    logits = random_logits(300)
    logits[200] = value
    with pytest.raises(ComputeError, match="position 7"):
        sampler(300, temperature=temperature).choose(logits, 7)


def test_forbidden_logits() -> None:
    logits = np.full(300, -np.inf, dtype=np.float32)
    with pytest.raises(ComputeError):
        sampler(300).choose(logits, 0)
    logits[40] = -5
    assert sampler(300).choose(logits, 0).id == 40
    with pytest.raises(RequestError, match="logit_bias"):
        sampler(300, logit_bias={40: False}).choose(logits, 0)
    with pytest.raises(EngineBug):
        sampler(301).choose(logits, 0)


def test_texts_need_a_tokenizer() -> None:
    with pytest.raises(TokenizerUnavailable, match="logit_bias"):
        sampler(10, logit_bias={"a": 1.0})
    with pytest.raises(RequestError, match="dry_sequence_breakers"):
        sampler(10, dry_multiplier=1.0)
