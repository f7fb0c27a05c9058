"""RecencyPolicy: what it proposes can always be carried out."""

from __future__ import annotations

import numpy as np

from runtime.experts.cache import ExpertCache, LayerShape
from runtime.experts.policy import LISTED_TOKENS, LISTED_VICTIMS, RecencyPolicy


def test_one_look_never_names_a_victim_twice() -> None:
    """A list of victims that runs out during a look is made anew: the ones that go are still in
    their slots then."""
    n_expert, n_slots = 4 * LISTED_VICTIMS, LISTED_VICTIMS + 8
    cache = ExpertCache([LayerShape(n_expert, 1)], [1] * n_slots)
    for expert in range(n_slots):
        cache.fill(0, expert)
    cache.begin_step(0)
    policy = RecencyPolicy(cache)
    absent = np.arange(n_slots, n_slots + 96)
    for _ in range(2):
        policy.used(np.array([[absent[:1]]], np.int32))
    policy.swaps(cache, 1)  # makes the first list
    for _ in range(LISTED_TOKENS - 1):
        policy.used(np.full((1, 1, 1), -1, np.int32))
    for _ in range(2):
        policy.used(absent[None, None].astype(np.int32))
    swaps = policy.swaps(cache, n_slots)
    victims = [swap.victim for swap in swaps]
    assert len(victims) >= LISTED_VICTIMS - 1 and len(set(victims)) == len(victims)
    for swap in swaps:
        cache.replace(*swap.expert, swap.victim)
