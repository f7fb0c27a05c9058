"""The cache against a model of a GPU that reads slots: random sequences, and what must never be."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest

from runtime.errors import EngineBug
from runtime.experts.cache import NO_ROWS, NO_SLOT, NO_VICTIM, Expert, ExpertCache, LayerShape, Rows

LAYERS = [LayerShape(6, 0), LayerShape(4, 1), LayerShape(6, 0)]
CLASSES = [0, 1, 0, 0, 1, 0]


def cell_of(layer: int, expert: int) -> int:
    return 6 * layer + expert


def expert_of(cell: int) -> Expert:
    return divmod(cell, 6)


def replace(cache: ExpertCache, expert: Expert, victim: Expert | None) -> None:
    leaving = NO_VICTIM if victim is None else cell_of(*victim)
    assert not len(cache.swap(Rows.of([[cell_of(*expert), leaving]]), 0))


class Gpu:
    """Slots with what lies in them, and the tables that steps in flight read."""

    def __init__(self, cache: ExpertCache) -> None:
        self.cache = cache
        self.content: list[Expert | None] = [None] * cache.n_slots
        self.table: dict[Expert, int] = {}
        self.in_flight: deque[dict[Expert, int]] = deque()
        self.copying: list[list[int]] = []
        self.arrived: list[list[int]] = []

    def begin(self, most: int) -> None:
        for cell, slot in self.cache.begin_step(Rows.of(self.arrived), most).values.tolist():
            if slot == NO_SLOT:
                del self.table[expert_of(cell)]
            else:
                self.table[expert_of(cell)] = slot
        self.arrived.clear()
        self.in_flight.append(dict(self.table))

    def end(self) -> None:
        table = self.in_flight.popleft()
        for expert, slot in table.items():
            assert self.content[slot] == expert, "a step read a slot that held something else"
        self.cache.end_step()

    def start(self, most: int) -> None:
        for cell, slot in self.cache.swap(NO_ROWS, most).values.tolist():
            for table in self.in_flight:
                assert slot not in table.values(), "a slot is overwritten while read"
            assert CLASSES[slot] == LAYERS[expert_of(cell)[0]].size_class
            self.content[slot] = None
            self.copying.append([cell, slot])

    def finish(self) -> None:
        cell, slot = self.copying.pop(0)
        self.content[slot] = expert_of(cell)
        self.arrived.append([cell, slot])

    def check(self) -> None:
        slots = self.cache.slot_of[self.cache.slot_of != NO_SLOT].tolist()
        slots += [slot for _, slot in self.copying + self.arrived]
        assert len(slots) == len(set(slots)), "two experts have one slot"
        assert not (self.cache.coming & self.cache.resident).any()


def absent(cache: ExpertCache, generator: random.Random) -> Expert | None:
    taken = cache.resident | cache.coming
    everyone = [(i, e) for i, shape in enumerate(LAYERS) for e in range(shape.n_expert)]
    free = [expert for expert in everyone if not taken[expert]]
    return generator.choice(free) if free else None


def propose(cache: ExpertCache, generator: random.Random) -> None:
    expert = absent(cache, generator)
    if expert is None:
        return
    size_class = LAYERS[expert[0]].size_class
    if cache.n_free[size_class] and generator.random() < 0.5:
        replace(cache, expert, None)
        return
    layers = [i for i, shape in enumerate(LAYERS) if shape.size_class == size_class]
    victims = [(i, e) for i in layers for e in np.flatnonzero(cache.resident[i]).tolist()]
    if victims:
        replace(cache, expert, generator.choice(victims))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("most_in_flight", [1, 3])
def test_no_step_ever_reads_a_slot_in_change(seed: int, most_in_flight: int) -> None:
    generator = random.Random(seed)
    cache = ExpertCache(LAYERS, CLASSES)
    gpu = Gpu(cache)
    for layer, expert in [(0, 0), (1, 0), (2, 5)]:
        upload = cache.fill(layer, expert)
        assert upload is not None
        gpu.content[upload.slot], gpu.table[layer, expert] = (layer, expert), upload.slot
    n_arrived = 0
    for _ in range(600):
        action = generator.choice(["begin", "end", "start", "finish", "propose"])
        if action == "begin" and len(gpu.in_flight) < most_in_flight:
            gpu.begin(generator.choice([1, 2, 8]))
        elif action == "end" and gpu.in_flight:
            gpu.end()
        elif action == "start":
            gpu.start(generator.choice([1, 4]))
        elif action == "finish" and gpu.copying:
            gpu.finish()
            n_arrived += 1
        elif action == "propose":
            propose(cache, generator)
        gpu.check()
    assert n_arrived > 30
    while gpu.in_flight:
        gpu.end()


def test_what_cannot_be_is_refused() -> None:
    cache = ExpertCache(LAYERS, CLASSES)
    assert cache.fill(0, 1) is not None
    with pytest.raises(EngineBug, match="has a slot"):
        replace(cache, (0, 1), None)
    with pytest.raises(EngineBug, match="of another size, or of none"):
        replace(cache, (1, 0), (0, 1))  # of another size
    with pytest.raises(EngineBug, match="of another size, or of none"):
        replace(cache, (2, 0), (0, 0))  # in no slot
    replace(cache, (1, 0), None)
    replace(cache, (1, 1), None)
    with pytest.raises(EngineBug, match="no free slot"):
        replace(cache, (1, 2), None)
    assert cache.fill(1, 3) is None
