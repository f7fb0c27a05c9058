"""Routers that do not exist, with the locality that was published of some that do.

Each expert's logit is a sum: how popular it is always, how the topic likes it, a part that drifts,
noise, and tiredness after use; the highest are chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from profiles import Phase, RoutingTrace


@dataclass(frozen=True)
class Router:
    """n_layers layers with n_used of n_expert experts of expert_bytes; what logits consist of.

    skew      spread of the experts' popularity
    topic     spread of a topic's likings; topic_tokens: its length, topics: how many there are
    drift     spread of the part that drifts; memory: what a token keeps of it
    tired     what a use takes from the logit; rest: what a token keeps of that
    Noise has a spread of 1.
    """

    n_layers: int
    n_expert: int
    n_used: int
    expert_bytes: int
    skew: float = 0.0
    topic: float = 0.0
    topic_tokens: int = 512
    topics: int = 8
    drift: float = 0.0
    memory: float = 0.0
    tired: float = 0.0
    rest: float = 0.0


ROUTERS = {
    # Published of 512 experts: LRU finds 67 % with 64 slots and 81 % with 128; none is popular.
    # This one: 68 and 80 %.
    "local-512": Router(48, 512, 10, 2_420_000, topic=0.7, topics=32, drift=1.0, memory=0.97),
    # Published of Qwen3-30B: 45 % of a token's experts are used by the next one, 80 % by the next
    # eight. This one: 45 and 80 %.
    "local-128": Router(48, 128, 8, 2_650_000, 0.2, 0.7, drift=1.7, memory=0.96),
    # The opposite: LRU finds 8 to 18 %, those used most 46 %. This one, with a tenth of the experts
    # in slots: 8 and 47 %.
    "skewed-256": Router(43, 256, 6, 6_300_000, skew=2.5, tired=3.0, rest=0.9),
    # Some of both.
    "mixed-288": Router(42, 288, 8, 8_260_000, 0.8, 0.7, topics=16, drift=1.2, memory=0.96),
}


def synthetic_trace(
    name: str, n_tokens: int, seed: int = 0, router: Router | None = None
) -> RoutingTrace:
    """A trace of generated tokens by a router, or that of the name; its sequences are topics."""
    router, random = router or ROUTERS[name], np.random.default_rng(seed)
    shape = (router.n_layers, router.n_expert)

    def normal() -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        return random.standard_normal(shape, np.float32)

    popular = np.float32(router.skew) * normal()
    likings = [np.float32(router.topic) * normal() for _ in range(router.topics)]
    drift, tired = np.float32(router.drift) * normal(), np.zeros(shape, np.float32)
    fresh = np.float32(router.drift * (1.0 - router.memory**2) ** 0.5)
    rows = np.arange(router.n_layers)[:, None]
    choices = np.empty((n_tokens, router.n_layers, router.n_used), np.int32)
    sequences = np.empty(n_tokens, np.int32)
    topic, sequence = 0, -1
    for token in range(n_tokens):
        if token % router.topic_tokens == 0:
            topic, sequence = int(random.integers(router.topics)), sequence + 1
        if router.drift:
            drift = np.float32(router.memory) * drift + fresh * normal()
        logits = popular + likings[topic] + drift + normal() - tired
        used = np.argpartition(logits, -router.n_used, axis=1)[:, -router.n_used :]
        choices[token], sequences[token] = used, sequence
        if router.tired:
            tired *= np.float32(router.rest)
            tired[rows, used] += np.float32(router.tired)
    return RoutingTrace(
        name,
        (router.n_expert,) * router.n_layers,
        (router.expert_bytes,) * router.n_layers,
        choices,
        np.ones(n_tokens, np.int32),
        np.full(n_tokens, Phase.GENERATED, np.uint8),
        sequences,
    )
