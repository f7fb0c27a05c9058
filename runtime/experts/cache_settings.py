"""CacheSettings: how many experts a GPU's cache holds, and how it behaves."""

from __future__ import annotations

from dataclasses import dataclass, replace

from runtime.experts.host_experts import LayerExperts

UPLOADS_A_STEP = 24
"""At most, see `UploadBudget`: each brings two changes of the table."""


@dataclass(frozen=True)
class CacheSettings:
    """How the cache behaves.

    slots           experts a layer that the GPU holds
    uploads_a_step  experts that may set out while a step runs; 0: what is there first stays
    fetches         prompts fetch what the GPU does not hold: the host's experts are pinned
    zero_copy       share of the experts without a slot that the GPU reads in place over the link,
                    0 to 1, if they are pinned; the CPU computes the others
    in_place_every  each so many'th of a token's misses of a layer is read in place besides, at
                    least 2; 0: none. Of few tokens only, and if they are pinned
    layer_slots     of each layer, instead of `slots`
    """

    slots: int
    uploads_a_step: int = UPLOADS_A_STEP
    fetches: bool = False
    zero_copy: float = 0.0
    in_place_every: int = 0
    layer_slots: tuple[int, ...] | None = None

    def slots_of(self, index: int, layer: LayerExperts) -> int:
        """Slots for the experts of a layer, the index'th."""
        wanted = self.slots if self.layer_slots is None else self.layer_slots[index]
        return min(wanted, layer.n_expert)

    @property
    def words(self) -> str:
        """For the console."""
        if self.layer_slots is None:
            return f"{self.slots} a layer on the GPU"
        return f"the first {sum(self.layer_slots)} on the GPU, layer after layer"

    def halved(self) -> CacheSettings:
        """With half of the slots."""
        layers = self.layer_slots
        half = None if layers is None else tuple(n // 2 for n in layers)
        return replace(self, slots=self.slots // 2, layer_slots=half)
