"""The interface that launches of every kind of mixer have, and which kind has which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from runtime.engine.gpu.attention_launches import AttentionLaunches
from runtime.engine.gpu.delta_net_launches import DeltaNetLaunches
from runtime.engine.gpu.indexer_launches import IndexerLaunches
from runtime.engine.gpu.kv import GPUPages
from runtime.engine.gpu.latent_launches import LatentLaunches
from runtime.engine.gpu.plan_parts import DeviceRows, PlanParts
from runtime.errors import EngineBug
from runtime.models.delta_net import DeltaNetSpec
from runtime.models.latent_attention import LatentAttentionSpec
from runtime.models.spec import AttentionSpec, Mixer


class MixerLaunches(Protocol):
    """The launches of one kind of mixer; layers alike share their places."""

    def prepare(self, mixer: Any, x: DeviceRows) -> None:
        """Ask x, the normalised rows, for the forms that the first products need."""
        ...

    def add(self, layer: int, mixer: Any, x: DeviceRows) -> Mapping[str, int]:
        """Add the layer's launches; what the next norm adds to the residual stream."""
        ...


class MixerPlanner:
    """One plan's launches of mixers, by the kind of the mixer."""

    def __init__(self, parts: PlanParts, pages: GPUPages) -> None:
        indexers = IndexerLaunches(parts)
        self._kinds: dict[type, MixerLaunches] = {
            AttentionSpec: AttentionLaunches(parts, pages, indexers),
            LatentAttentionSpec: LatentLaunches(parts, pages, indexers),
        }
        if parts.states is not None:
            self._kinds[DeltaNetSpec] = DeltaNetLaunches(parts, parts.states)

    def of(self, mixer: Mixer) -> MixerLaunches:
        """Those of the mixer's kind.  Raises: EngineBug: `support` let pass what has none."""
        kind = self._kinds.get(type(mixer))
        if kind is None:
            raise EngineBug(f"there are no launches for {type(mixer).__name__}")
        return kind
