"""Every policy keeps the cache's rules; each prefers what its name says; the default learns."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import pytest

from profiles import RecentUse
from runtime.errors import ConfigError
from runtime.experts.cache import NO_ROWS, NO_SLOT, NO_VICTIM, ExpertCache, LayerShape, Rows
from runtime.experts.fitted_policy import FIRST_WEIGHTS, FittedPolicy
from runtime.experts.policies import POLICIES, policy_from_environment
from runtime.experts.scored_policy import VICTIMS_A_TOKEN, PolicySettings, ScoredPolicy

LAYERS = [LayerShape(24, 0), LayerShape(16, 1), LayerShape(24, 0)]
CLASSES = [0] * 12 + [1] * 5
N_USED = 3


def a_cache() -> ExpertCache:
    return ExpertCache(LAYERS, CLASSES)


def random_choices(random: np.random.Generator, n_tokens: int = 1) -> np.ndarray:
    """i32[n_layers, n_tokens, n_used] with a few favourites, and a layer that uses one less."""
    found = np.empty((len(LAYERS), n_tokens, N_USED), np.int32)
    for layer, shape in enumerate(LAYERS):
        weights = 1.0 / (1 + np.arange(shape.n_expert)) ** 1.2
        for token in range(n_tokens):
            found[layer, token] = random.choice(
                shape.n_expert, N_USED, replace=False, p=weights / weights.sum()
            )
    found[1, :, -1] = -1
    return found


class Driver:
    """Uses a cache as the engine does; uploads arrive after two steps."""

    def __init__(self, policy: ScoredPolicy, cache: ExpertCache, room: int = 3) -> None:
        self.policy, self.cache, self.room = policy, cache, room
        self.flying: deque[list[int]] = deque()
        self.n_swaps = self.n_hits = self.n_misses = 0

    def step(self, choices: np.ndarray) -> None:
        late = [self.flying.popleft() for _ in range(len(self.flying) - self.room)]
        self.cache.begin_step(Rows.of(late), 64)
        used = choices[choices >= 0]
        found = self.cache.slot_of[np.nonzero(choices >= 0)[0], used] != NO_SLOT
        self.n_hits += int(found.sum())
        self.n_misses += int((~found).sum())
        self.policy.used(choices)
        swaps = self.policy.swaps(self.cache, self.room)
        assert len(swaps) <= self.room
        self.n_swaps += len(swaps)
        self.flying += self.cache.swap(swaps, 64).values.tolist()  # EngineBug for what cannot be
        self.cache.end_step()


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("sticky", [0.0, 0.3])
def test_every_policy_keeps_the_rules(name: str, filled: bool, sticky: float) -> None:
    cache, random = a_cache(), np.random.default_rng(5)
    policy = POLICIES[name](cache, PolicySettings(sticky=sticky, half_life=32.0))
    if filled:
        for layer, expert in policy.first(cache):
            cache.fill(layer, expert)
        assert not cache.n_free.any()
    driver = Driver(policy, cache)
    for step in range(400):
        driver.step(random_choices(random, 1 + 4 * (step % 50 == 0)))
    assert driver.n_swaps > 3
    assert int(policy.life.sum()) == driver.n_hits + driver.n_misses
    assert driver.n_hits > 0.5 * driver.n_misses


@pytest.mark.parametrize("name", POLICIES)
def test_one_look_never_names_a_victim_twice(name: str) -> None:
    """A list of victims that runs out during a look is made anew: the ones that go are still in
    their slots then."""
    n_slots = 2 * VICTIMS_A_TOKEN * 8
    cache = ExpertCache([LayerShape(3 * n_slots, 0)], [0] * n_slots)
    policy = POLICIES[name](cache, PolicySettings(admission=0, margin=0.0))
    policy.know(np.ones(cache.slot_of.shape, np.uint64), 1)
    for expert in range(n_slots):
        cache.fill(0, expert)
    cache.begin_step(NO_ROWS, 0)
    absent = np.arange(n_slots, 3 * n_slots, dtype=np.int32)
    for _ in range(2):
        policy.used(absent[None, None, :1])
    policy.swaps(cache, 1)  # makes the first list
    for _ in range(policy._list_every - 1):
        policy.used(np.full((1, 1, 1), -1, np.int32))
    for _ in range(2):
        policy.used(absent[None, None])
    listed = len(policy._victims.get(0, ()))  # the default looks at all of them every time
    swaps = policy.swaps(cache, n_slots)
    victims = swaps.values[:, 1].tolist()
    assert len(victims) > listed and len(set(victims)) == len(victims)
    assert listed or name == "fitted"
    cache.swap(swaps, 0)  # EngineBug for what cannot be


@pytest.mark.parametrize("name", POLICIES)
def test_nothing_is_proposed_without_room_or_use(name: str) -> None:
    cache = a_cache()
    policy = POLICIES[name](cache, PolicySettings())
    assert not len(policy.swaps(cache, 4))
    policy.used(random_choices(np.random.default_rng(0)))
    assert not len(policy.swaps(cache, 0))


def test_the_first_experts_are_those_used_most() -> None:
    cache = a_cache()
    policy = POLICIES["lru"](cache, PolicySettings())
    known = np.zeros(cache.slot_of.shape, np.uint64)
    known[2, 7], known[0, 3] = 9, 5
    policy.know(known, 10)
    first = list(policy.first(cache))
    assert first[:4] == [(2, 7), (0, 3), (0, 0), (1, 0)]
    assert len(first) == len(set(first)) == sum(layer.n_expert for layer in LAYERS)


def one_layer(
    name: str, settings: PolicySettings, slots: int = 2
) -> tuple[ScoredPolicy, ExpertCache]:
    cache = ExpertCache([LayerShape(8, 0)], [0] * slots)
    policy = POLICIES[name](cache, settings)
    for expert in range(slots):
        cache.fill(0, expert)
    return policy, cache


def use(policy: ScoredPolicy, cache: ExpertCache, *experts: int) -> list[int | None]:
    """Tokens that use one expert each; the victims that the swaps after the last one name."""
    for expert in experts:
        policy.used(np.array([[[expert]]], np.int32))
    victims = policy.swaps(cache, 1).values[:, 1].tolist()
    return [None if victim == NO_VICTIM else victim for victim in victims]


@pytest.mark.parametrize(
    ("name", "used", "victim"),
    [
        ("lru", (0, 1, 0, 5), 1),
        ("lru-2", (0, 0, 1, 5, 5), 1),
        ("halve", (0, 0, 1, 5, 5), 1),
        ("lfru", (0, 0, 0, 1, 1, 0, 5, 5, 5), 1),
        ("window", (0, 0, 1, 5, 5), 1),
        ("lrfu", (0, 0, 1, 5, 5), 1),
        ("slru", (0, 1, 0, 5), 1),
        ("add", (0, 0, 1, 5, 5), 1),
        ("hybrid", (0, 0, 0, 0, 1, 1, 5, 5, 5), 1),
        ("fitted", (0, 0, 1, 5, 5), 1),
    ],
)
def test_who_has_to_go(name: str, used: tuple[int, ...], victim: int) -> None:
    policy, cache = one_layer(name, PolicySettings(admission=0))
    assert use(policy, cache, *used) == [victim]


@pytest.mark.parametrize("name", ["lru", "window", "halve", "lrfu", "add"])
def test_admission_wants_a_second_use_within_the_window(name: str) -> None:
    policy, cache = one_layer(name, PolicySettings(window=8, half_life=8.0))
    assert use(policy, cache, 5) == []
    assert use(policy, cache, *[0] * 9, 5) == []
    assert use(policy, cache, 5) == [1]


def test_a_newcomer_must_beat_its_victim_by_the_margin() -> None:
    for margin, n_swaps in ((0.0, 1), (1.0, 1), (2.0, 0)):
        policy, cache = one_layer("window", PolicySettings(margin=margin))
        assert len(use(policy, cache, 0, 0, 1, 5, 5, 5)) == n_swaps


def test_sticky_experts_stay() -> None:
    policy, cache = one_layer("lru", PolicySettings(admission=0, sticky=0.5))
    policy.know(np.array([[9, 0, 0, 0, 0, 0, 0, 0]], np.uint64), 9)
    assert use(policy, cache, 1, 5) == [1]


def rotating(random: np.random.Generator, token: int) -> list[int]:
    """Half of the experts take turns, the others seldom come: who was used will not be, soon."""
    return [token % 32, 32 + int(random.integers(32))]


def staying(random: np.random.Generator, token: int) -> list[int]:
    """Two experts stay for 30 tokens, then others do."""
    return [token // 30 * 7 % 64, (token // 30 * 7 + 1) % 64]


Router = Callable[[np.random.Generator, int], list[int]]


@pytest.mark.parametrize(("router", "stays"), [(rotating, False), (staying, True)])
def test_the_default_learns_which_rate_tells_the_future(router: Router, stays: bool) -> None:
    policy = FittedPolicy(ExpertCache([LayerShape(64, 0)], [0] * 6), PolicySettings())
    random = np.random.default_rng(3)
    for token in range(1500):
        policy.used(np.array([[router(random, token)]], np.int32))
    fast, slow = policy.weights
    assert fast > 0.4 > slow if stays else slow > 0.8 and fast < 0.0, policy.weights


@pytest.mark.parametrize("router", [rotating, staying])
def test_the_default_goes_on_after_a_restart_as_if_there_had_been_none(router: Router) -> None:
    cache = ExpertCache([LayerShape(64, 0)], [0] * 6)
    policy, random = FittedPolicy(cache, PolicySettings()), np.random.default_rng(3)
    choices = [np.array([[router(random, token)]], np.int32) for token in range(700)]
    for each in choices[:640]:
        policy.used(each)
    restarted, counted = (FittedPolicy(cache, PolicySettings()) for _ in range(2))
    uses = policy.life.reshape(1, -1).astype(np.uint64)
    restarted.know(uses, policy.n_tokens, policy.recent())
    counted.know(uses, policy.n_tokens)
    first = [list(each.first(cache)) for each in (policy, restarted, counted)]
    assert first[0][:16] == first[1][:16] and first[0][:16] != first[2][:16]
    cells = np.arange(64)
    for each in choices[640:]:  # until after the next fit
        for one in (policy, restarted):
            one.used(each)
        np.testing.assert_allclose(policy.weights, restarted.weights, rtol=1e-4)
        np.testing.assert_allclose(
            policy._scores(cells), restarted._scores(cells), rtol=1e-4, atol=1e-6
        )
    assert restarted.life.tolist() == policy.life.tolist()
    assert policy.weights != FIRST_WEIGHTS


def test_only_the_default_keeps_recent_use() -> None:
    for name, make in POLICIES.items():
        recent = make(a_cache(), PolicySettings()).recent()
        assert (recent is not None) == (name == "fitted")


def test_recent_use_reaches_the_policy_of_a_cache_with_fewer_experts() -> None:
    rates = np.zeros((2, 1, 5), np.float32)
    rates[:, 0, 2] = 0.5
    recent = RecentUse(rates, (0.0,) * 5)
    known = np.array([[9, 0, 1, 0, 0]], np.uint64)
    cache = ExpertCache([LayerShape(4, 0)], [0] * 2)
    policy = policy_from_environment(known, 10, recent=recent)(cache)
    assert list(policy.first(cache))[:2] == [(0, 2), (0, 0)]


def test_scores_stay_finite_however_long_it_runs() -> None:
    cache = ExpertCache([LayerShape(4, 0)], [0] * 2)
    for name in ("fitted", "lrfu"):
        policy = POLICIES[name](cache, PolicySettings(half_life=1.0))
        for token in range(6000):
            policy.used(np.array([[[token % 4]]], np.int32))
        scores = policy._scores(np.arange(4))
        assert np.isfinite(scores).all() and scores.max() > 0
        assert np.argmax(scores) == 5999 % 4


def test_the_seed_s_variables_choose_and_adjust(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = a_cache()
    assert isinstance(policy_from_environment()(cache), FittedPolicy)
    monkeypatch.setenv("LLAMA_MOE_CACHE_POLICY", "add")
    monkeypatch.setenv("LLAMA_MOE_CACHE_WINDOW", "32")
    monkeypatch.setenv("LLAMA_MOE_CACHE_MARGIN", "2")
    policy = policy_from_environment()(cache)
    assert isinstance(policy, POLICIES["add"])  # type: ignore[arg-type]
    assert policy.settings.window == 32 and policy.margin == 2.0
    for name, value in (("POLICY", "best"), ("WINDOW", "0"), ("WINDOW", "x"), ("MARGIN", "-1")):
        with monkeypatch.context() as other:
            other.setenv(f"LLAMA_MOE_CACHE_{name}", value)
            with pytest.raises(ConfigError, match=f"LLAMA_MOE_CACHE_{name}"):
                policy_from_environment()
