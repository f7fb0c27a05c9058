"""Numbers at the ends of their ranges: every request gets a token, and nothing overflows."""

from __future__ import annotations

import asyncio
import random
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

import runtime
from runtime.engine.candidate_sampler import CandidateSampler
from runtime.engine.params import LIMITS, SamplingParams
from runtime.engine.sampler import Sampler
from runtime.engine.sampling_vocabulary import SamplingVocabulary
from runtime.errors import RequestError
from tests.support.fake_engine import GREEDY, ids, read

FLOATS = (
    0.0, 1e-320, 1e-45, 1e-38, 1e-6, 0.1, 0.5, 1, 2, 100, 5000, 1e10, 1e30, 3.4e38,
    -1e-40, -0.5, -2, -5000, -3.4e38,
)  # fmt: skip
WHOLE = (0, 1, 2, 3, 40, 300, 2**31 - 1)
BIASES = (False, 3.3e38, -3.3e38, 1e30, -100)

# Each ended the engine once, and with it every other answer.
ENDINGS: dict[str, dict[str, object]] = {
    "a temperature that f32 rounds to zero": {"temperature": 1e-320},
    "a temperature that makes logits infinite": {"temperature": 1e-38},
    "a bias that a temperature makes infinite": {"temperature": 0.5, "logit_bias": {3: 3.3e38}},
    "two biases": {"logit_bias": [(3, -3.3e38), (3, -3.3e38)], "top_k": 0},
    "a penalty": {"repeat_penalty": 1e-38},
    "a reward": {"frequency_penalty": -3.4e38},
    "a surprise that nothing has": {"mirostat": 2, "mirostat_tau": -5000},
    "a learning rate": {"mirostat": 2, "mirostat_eta": -3.4e38},
    "no evenness to a negative power": {"dynatemp_range": 0.5, "dynatemp_exponent": -2},
    "a huge negative power": {"dynatemp_range": 1e-320, "dynatemp_exponent": -3.4e38},
    "xtc of what is forbidden": {
        "xtc_probability": 1, "xtc_threshold": 0, "logit_bias": {5: False}, "samplers": "xt",
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def logits(n: int, kind: int, seed: int) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    z = rng.standard_normal(n) * (5, 5, 1e37, 0)[kind]
    if kind == 1:
        z[rng.random(n) < 0.5] = -np.inf
        z[0] = 1
    return z.astype(np.float32)


def chosen(params: SamplingParams, z: NDArray[np.float32]) -> list[int]:
    one = Sampler(params, SamplingVocabulary(len(z)), [0, 1, 1] if len(z) > 1 else [0])
    tokens = []
    for position in range(4):
        tokens.append(one.choose(z, position).id)
        one.accept(tokens[-1])
    return tokens


@pytest.mark.parametrize("kind", range(4))
@pytest.mark.parametrize("name", ENDINGS)
def test_extreme_numbers_choose_a_possible_token(name: str, kind: int) -> None:
    params = SamplingParams(**{"seed": 4, **ENDINGS[name]})
    z = logits(300, kind, 6)
    forbidden = {token for token, bias in params.biases if bias == -np.inf}
    for token in chosen(params, z):
        assert 0 <= token < 300
        assert z[token] > -np.inf and token not in forbidden


def test_a_tiny_temperature_is_greedy() -> None:
    z = logits(300, 0, 1)
    for temperature in (1e-320, 1e-38, 1e-12):
        params = SamplingParams(temperature=temperature, samplers="t", seed=2)
        assert chosen(params, z) == [int(z.argmax())] * 4
    huge = SamplingParams(temperature=0.5, logit_bias={7: 3.3e38}, seed=2)
    assert chosen(huge, z) == [7] * 4


@pytest.mark.parametrize("seed", range(8))
def test_any_numbers_choose_a_token(seed: int) -> None:
    rng = random.Random(seed)
    n_chosen = 0
    for i in range(150):
        n = rng.choice([1, 2, 300, 3000])
        fields: dict[str, object] = {"seed": i, "dry_sequence_breakers": ()}
        for name in rng.sample(list(LIMITS), 3):
            fields[name] = rng.choice(WHOLE if LIMITS[name].kind is int else FLOATS)
        if rng.random() < 0.5:
            fields["logit_bias"] = [(rng.randrange(n), rng.choice(BIASES)) for _ in range(3)]
        if rng.random() < 0.5:
            fields["samplers"] = "".join(rng.choices("edskypmxta", k=6))
        try:
            tokens = chosen(SamplingParams(**fields), logits(n, rng.randrange(4), i))
        except RequestError:
            continue  # refused, or it forbids every token
        assert all(0 <= token < n for token in tokens), fields
        n_chosen += 1
    assert n_chosen > 50


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1e-320},
        {"logit_bias": {3: 3.3e38}},
        {"frequency_penalty": -3.4e38},
        {"repeat_penalty": 1e-38},
    ],
)
def test_what_a_device_could_not_hold_is_chosen_by_the_host(fields: dict[str, object]) -> None:
    def work(**fields: object) -> object:
        return CandidateSampler(SamplingParams(**fields), SamplingVocabulary(300)).device_work(1)

    assert work(**fields) is None
    assert work(temperature=0.01, logit_bias={3: 1e6, 4: False}) is not None


async def test_a_sampler_that_fails_ends_its_request_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = Sampler.choose

    def broken(self: Sampler, z: NDArray[np.float32], position: int) -> object:
        if self.params.top_k == 7:
            raise IndexError("index 1 is out of bounds")
        return plain(self, z, position)

    monkeypatch.setattr(Sampler, "choose", broken)
    config = runtime.EngineConfig(device="fake", n_ctx=256)
    async with runtime.open_engine(config) as engine:
        expected = ids(await read(engine, [1, 2, 3]))
        answers = await asyncio.gather(
            read(engine, [1, 2, 3]),
            read(engine, [1, 2, 3], GREEDY(max_tokens=9, top_k=7)),
            return_exceptions=True,
        )
        assert isinstance(answers[1], runtime.EngineBug)
        assert not isinstance(answers[0], BaseException)
        assert ids(answers[0]) == expected
        assert "a sampler failed" in caplog.text
        await read(engine, [4])
