"""SharePlan: what one GPU's part of a model takes of its memory.  Pure: nothing is allocated."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.engine.executor import ExecutorLimits
from runtime.engine.gpu.captured_steps import needs_of
from runtime.engine.gpu.experts import expert_bytes
from runtime.engine.gpu.graph_ends import ALONE, GraphEnds
from runtime.engine.gpu.kv import CacheSizes, GPUPages
from runtime.engine.gpu.links import Link, Links
from runtime.engine.gpu.settings import GPUSettings
from runtime.engine.gpu.share import Share
from runtime.engine.gpu.state_slots import GPUStates, StateSizes
from runtime.engine.gpu.step_graph import StepPlanner
from runtime.engine.gpu.step_shape import StepShape
from runtime.engine.gpu.weights import DeviceWeights
from runtime.engine.machine import GPUFacts
from runtime.errors import DeviceUnavailable


def usable_bytes(free_bytes: int, settings: GPUSettings) -> int:
    """Of a GPU's memory that is free."""
    limit = settings.vram_limit
    return free_bytes if limit is None else min(free_bytes, limit)


def runs_overlapped(gpu: GPUFacts) -> bool:
    """Whether kernels start while their predecessors run."""
    return gpu.info.capability >= (9, 0)


class SharePlan:
    """`states` and `measure`, in this order, complete it.

    usable_bytes      of the GPU's memory
    activation_bytes  that the largest step needs
    link_bytes        in which the residual stream of another GPU arrives
    ends              what comes before and behind its layers
    """

    def __init__(
        self, share: Share, gpu: GPUFacts, settings: GPUSettings, limits: ExecutorLimits
    ) -> None:
        """Raises: DeviceUnavailable where what has to be on the GPU is larger than its memory;
        ConfigError for cache types that do not fit the model."""
        self.share, self.gpu, self.settings = share, gpu, settings
        self.usable_bytes = usable_bytes(gpu.free_bytes, settings)
        self.weights = DeviceWeights(
            share.model, gpu.info.block_shared_bytes, embeds=share.embeds, outputs=share.outputs
        )
        sizes = CacheSizes(share.model.spec, settings.cache_type_k, settings.cache_type_v)
        self.pages = GPUPages(sizes, limits.n_pages, gpu.info)
        self.state_sizes = StateSizes(share.model.spec)
        self.states: GPUStates | None = None
        self.ends = ALONE
        self.activation_bytes = self.link_bytes = 0
        self._check(self.weights.n_bytes + self.pages.n_bytes)

    def n_state_slots(self) -> int:
        """Of sequences' states, as many as fit; 0: the layers have none.  Raises: ConfigError."""
        held = self.weights.n_bytes + self.pages.n_bytes + self.settings.reserve_bytes
        settings = self.settings
        return self.state_sizes.slots(
            settings.max_sequences, settings.n_snapshots, self.usable_bytes - held
        )

    def hold_states(self, n_slots: int) -> None:
        """The states of sequences, where the layers have any."""
        if self.state_sizes.slot_bytes:
            self.states = GPUStates(self.state_sizes, n_slots)

    def measure(
        self,
        shapes: Sequence[StepShape],
        *,
        neighbours: tuple[bool, bool],
        has_states: bool,
        memories: tuple[int, int],
    ) -> None:
        """What steps of these shapes need.

        neighbours  whether a GPU comes before this one, and whether one comes behind it
        has_states  of any GPU's layers;  memories: see `GraphEnds`
        Raises: DeviceUnavailable where a block of a kernel does not fit a multiprocessor.
        """
        taking, giving = (Links.PLANNED if there else None for there in neighbours)
        tokens = Links.PLANNED_TOKENS if giving is not None and taking is None else None
        self.ends = GraphEnds(taking, giving, tokens, has_states, memories)
        planner = StepPlanner(
            self.share.model,
            self.weights,
            self.pages,
            states=self.states,
            ends=self.ends,
            overlapped=runs_overlapped(self.gpu),
        )
        needs = needs_of(planner, list(shapes))
        needs.check(self.gpu.info, self.pages.sizes.cache_types)
        self.activation_bytes = needs.room_bytes
        if any(neighbours):
            most = max(shape.n_tokens for shape in shapes)
            self.link_bytes = Link.n_bytes(most * self.share.row_bytes)

    @property
    def state_bytes(self) -> int:
        return 0 if self.states is None else self.states.n_bytes

    @property
    def dense_bytes(self) -> int:
        """Everything but experts and the reserve."""
        parts = (self.weights.n_bytes, self.pages.n_bytes, self.state_bytes)
        return sum(parts) + self.activation_bytes + self.link_bytes

    @property
    def expert_room(self) -> int:
        """What is left for experts."""
        return self.usable_bytes - self.dense_bytes - self.settings.reserve_bytes

    @property
    def expert_bytes(self) -> int:
        """Of all its experts."""
        return expert_bytes(self.share.model)

    def _check(self, needed: int) -> None:
        reserve = self.settings.reserve_bytes
        if needed + reserve > self.usable_bytes:
            raise DeviceUnavailable(
                f"{needed / 2**30:.1f} GiB of dense weights, keys and values and a reserve of "
                f"{reserve >> 20} MiB do not fit the "
                f"{self.usable_bytes / 2**30:.1f} GiB of the GPU that may be used"
            )
