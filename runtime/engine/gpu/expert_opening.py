"""Who holds a model's routed experts: the GPUs all of them where they fit, else some."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from runtime.engine.gpu.expert_plan import ExpertPlan, Holding
from runtime.engine.gpu.gpu_plan import GPUPlan, holds_all, plan_experts
from runtime.engine.gpu.settings import GPUSettings
from runtime.engine.gpu.share_opening import ShareOpening
from runtime.errors import OutOfDeviceMemory
from runtime.models.model import Model
from runtime.models.spec import MoeSpec
from runtime.notices import Reason
from runtime.progress import Progress

if TYPE_CHECKING:
    from runtime.cuda.device import Device
    from runtime.experts.cache import ExpertCache
    from runtime.experts.host_experts import HostExperts, HostPart
    from runtime.experts.policy import Policy
    from runtime.experts.usage import LifetimeUsage

    MakePolicy = Callable[[ExpertCache], Policy]

logger = logging.getLogger(__name__)

PIN_WAIT_SECONDS = 0.05
"""What the start waits for pinning: small models' experts are pinned then, others meanwhile."""


def hold_experts(
    model: Model,
    planned: GPUPlan,
    shares: Sequence[ShareOpening],
    usage: LifetimeUsage | None,
    progress: Progress,
    resources: ExitStack,
) -> list[ShareOpening]:
    """Give every GPU the experts that are planned for it, or fewer where memory is short; returns
    those GPUs that do not hold all of theirs.

    usage: of the model's experts; None: it has none
    Raises: ConfigError for variables that name no policy; OutOfDeviceMemory, CudaError.
    """
    for share in shares:
        share.shrink()
    missing = [share for share in shares if not (_fits(share) and _hold_all(share))]
    if missing and usage is not None:
        known = _known(usage, shares, resources)
        chosen = [known[shares.index(share)] for share in missing]
        _hold_some(model, planned, shares, missing, chosen, progress, resources)
    return missing


def _fits(share: ShareOpening) -> bool:
    """Whether all of its experts are to be there, and still fit."""
    no_experts = not share.model.spec.n_expert_max
    room = share.planned.expert_bytes <= share.expert_room
    return holds_all(share.planned) and (no_experts or room)


def _hold_all(share: ShareOpening) -> bool:
    """Whether all of its experts found room after all."""
    try:
        share.hold(None)
    except OutOfDeviceMemory as error:
        if not share.model.spec.n_expert_max:
            raise
        share.planned.settings.notices.add(
            Reason.SHRUNK, f"{share.device.info.name} holds only some experts: {error}"
        )
        share.shrink()
        share.expert_room = min(share.expert_room, share.planned.expert_bytes - 1)
        return False
    return True


def moe_blocks(shares: Sequence[ShareOpening]) -> list[MoeSpec]:
    """The MoE layers of these GPUs."""
    return [block for share in shares for _, block in share.model.spec.moe_layers]


def _known(
    usage: LifetimeUsage, shares: Sequence[ShareOpening], resources: ExitStack
) -> list[tuple[MakePolicy, NDArray[np.uint64]]]:
    """Of each GPU's MoE layers: policies that begin with what is known of the model's use, which is
    kept; and how early its experts are wanted.

    `resources` saves it at the end, after the caches are closed.
    """
    from runtime.experts.usage_keeper import UsageKeeper

    given = dict(shares[0].planned.settings.moe_cache)
    keeper = UsageKeeper(usage, given=given)
    resources.callback(keeper.close)
    logger.info("the first experts on the GPU: by %s", usage.source)
    ends = accumulate(len(moe_blocks([share])) for share in shares)
    spans = [slice(*edges) for edges in pairwise((0, *ends))]
    return [(keeper.policy(layers), usage.heat[layers]) for layers in spans]


def _hold_some(
    model: Model,
    planned: GPUPlan,
    shares: Sequence[ShareOpening],
    missing: Sequence[ShareOpening],
    known: Sequence[tuple[MakePolicy, NDArray[np.uint64]]],
    progress: Progress,
    resources: ExitStack,
) -> None:
    from runtime.experts.host_experts import HostExperts

    host = HostExperts(model.weights, moe_blocks(missing))
    resources.callback(host.close)
    counts = [len(moe_blocks([share])) for share in missing]
    parts = [host.part(slice(*edges)) for edges in pairwise((0, *accumulate(counts)))]
    pins = planned.settings.load_mode == "pin"
    experts = _plan_of(model, planned, shares, pinned=pins)
    if pins and any(experts[shares.index(share)].moves for share in missing):
        uses = np.concatenate([uses for _, uses in known])
        _pin(host, missing[0].device, planned.settings, uses, progress)
        if not host.pins_all:
            experts = _plan_of(model, planned, shares, pinned=False)
    for share, part, (policy, _) in zip(missing, parts, known, strict=True):
        share.expert_plan = experts[shares.index(share)]
        _hold_cached(share, part, policy)


def _plan_of(
    model: Model, planned: GPUPlan, shares: Sequence[ShareOpening], *, pinned: bool
) -> Sequence[ExpertPlan]:
    """What was planned, or what is left of it where memory is short or experts are not pinned."""
    rooms = [share.expert_room for share in shares]
    if pinned and rooms == [share.planned.expert_room for share in shares]:
        return planned.experts
    return plan_experts(model, planned.shares, rooms, pinned=pinned, known=planned.known)


def _hold_cached(share: ShareOpening, part: HostPart, policy: MakePolicy) -> None:
    """Hold some experts: fewer, where the GPU's memory is fuller than it seemed."""
    from runtime.experts.cache_settings import CacheSettings
    from runtime.experts.cached_experts import CachedExperts
    from runtime.experts.whole_layers import WholeLayers

    plan = share.expert_plan
    settings = CacheSettings(max(plan.slots, default=0), fetches=plan.fetch_bytes > 0)
    make = policy
    if plan.holding is Holding.LAYERS:
        settings = replace(settings, layer_slots=plan.slots, uploads_a_step=0)
        make = lambda cache: WholeLayers(policy(cache))  # noqa: E731
    tell = partial(share.planned.settings.notices.add, Reason.SLOW_UPLOADS)
    while True:
        try:
            experts = CachedExperts(share.device, share.model.spec, part, settings, make, tell)
        except OutOfDeviceMemory as error:
            if settings.slots == 0:
                raise
            settings, share.expert_plan = settings.halved(), share.expert_plan.halved()
            share.planned.settings.notices.add(
                Reason.SHRUNK,
                f"{share.device.info.name} holds {settings.slots} experts a layer at most: {error}",
            )
        else:
            share.hold(experts)
            _tell_still(share)
            return


def _tell_still(share: ShareOpening) -> None:
    """Say so where no expert will move although that was left to us."""
    plan, settings = share.expert_plan, share.planned.settings
    still = not any(plan.slots) or plan.holding is Holding.LAYERS
    if still and settings.moe_expert_cache != 0:
        settings.notices.add(Reason.CACHE_OFF, f"{share.device.info.name}: {plan.reason}")


def _pin(
    host: HostExperts,
    device: Device,
    settings: GPUSettings,
    uses: NDArray[np.uint64],
    progress: Progress,
) -> None:
    """Let GPUs copy from where the experts lie, as soon as they are pinned; see docs/loading.md."""
    progress.start("pinning experts")
    tell = partial(settings.notices.add, Reason.UNPINNED)
    host.pin(device, uses, wait=PIN_WAIT_SECONDS, tell=tell)
