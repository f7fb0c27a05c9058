"""Who holds a model's routed experts: the GPUs all of them where they fit, else some."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from runtime.engine.gpu.experts import moe_layers
from runtime.engine.gpu.settings import GPUSettings
from runtime.engine.gpu.share_opening import ShareOpening
from runtime.errors import OutOfDeviceMemory
from runtime.models.model import Model
from runtime.models.spec import MoeSpec
from runtime.progress import Progress

if TYPE_CHECKING:
    from runtime.cuda.device import Device
    from runtime.experts.cache import ExpertCache
    from runtime.experts.cached_experts import CacheSettings
    from runtime.experts.host_experts import HostExperts, HostPart
    from runtime.experts.policy import Policy

    MakePolicy = Callable[[ExpertCache], Policy]

logger = logging.getLogger(__name__)

FETCH_SHARE = 0.34
"""Of the VRAM that is left for experts, what those that prompts fetch may take."""


def hold_experts(
    model: Model,
    shares: Sequence[ShareOpening],
    settings: GPUSettings,
    progress: Progress,
    resources: ExitStack,
) -> list[ShareOpening]:
    """Give every GPU its experts; returns those that do not hold all of theirs.

    Raises: ConfigError for variables that name no policy; OutOfDeviceMemory, CudaError.
    """
    for share in shares:
        share.shrink()
    missing = [share for share in shares if not (share.holds_all and _hold_all(share))]
    if missing:
        policies = _policies(model, shares, resources)
        chosen = [policies[shares.index(share)] for share in missing]
        _hold_some(model, missing, chosen, settings, progress, resources)
    return missing


def _hold_all(share: ShareOpening) -> bool:
    """Whether all of its experts found room after all."""
    try:
        share.hold(None)
    except OutOfDeviceMemory as error:
        if not share.model.spec.n_expert_max:
            raise
        logger.warning("%s holds only some experts: %s", share.device.info.name, error)
        share.shrink()
        return False
    return True


def moe_blocks(shares: Sequence[ShareOpening]) -> list[MoeSpec]:
    """The MoE layers of these GPUs."""
    return [block for share in shares for _, block in moe_layers(share.model.spec)]


def _policies(
    model: Model, shares: Sequence[ShareOpening], resources: ExitStack
) -> list[MakePolicy]:
    """Of each GPU's MoE layers: they begin with the model's lifetime use, which is kept.

    `resources` saves it at the end, after the caches are closed.
    """
    from runtime.experts.usage import lifetime_usage
    from runtime.experts.usage_keeper import UsageKeeper

    usage = lifetime_usage(model)
    keeper = UsageKeeper(usage)
    resources.callback(keeper.close)
    logger.info("the first experts on the GPU: by %s", usage.source)
    ends = accumulate(len(moe_blocks([share])) for share in shares)
    return [keeper.policy(slice(*edges)) for edges in pairwise((0, *ends))]


def _hold_some(
    model: Model,
    shares: Sequence[ShareOpening],
    policies: Sequence[MakePolicy],
    settings: GPUSettings,
    progress: Progress,
    resources: ExitStack,
) -> None:
    from runtime.experts.cached_experts import CacheSettings, slots_that_fit
    from runtime.experts.fetched_experts import FETCHED_TOKENS, fetch_bytes
    from runtime.experts.host_experts import HostExperts

    wanted = settings.moe_expert_cache
    host = HostExperts(model.weights, moe_blocks(shares))
    resources.callback(host.close)
    counts = [len(moe_blocks([share])) for share in shares]
    parts = [host.part(slice(*edges)) for edges in pairwise((0, *accumulate(counts)))]
    both = list(zip(shares, parts, strict=True))
    fetches = settings.max_step_tokens >= FETCHED_TOKENS and all(
        fetch_bytes(part.layers) <= FETCH_SHARE * share.expert_room for share, part in both
    )
    if fetches or any(
        wanted and slots_that_fit(part.layers, share.expert_room) > 0 for share, part in both
    ):
        _pin(host, shares[0].device, progress)
    fetches = fetches and host.pinned
    for (share, part), policy in zip(both, policies, strict=True):
        fetch = fetch_bytes(part.layers) if fetches else 0
        slots = slots_that_fit(part.layers, max(share.expert_room - fetch, 0))
        if wanted != -1:
            slots = min(slots, wanted)
        _hold_cached(share, part, CacheSettings(slots, fetches=fetches), policy)


def _hold_cached(
    share: ShareOpening, part: HostPart, settings: CacheSettings, policy: MakePolicy
) -> None:
    """Hold some experts: fewer, where the GPU's memory is fuller than it seemed."""
    from runtime.experts.cached_experts import CachedExperts

    while True:
        try:
            experts = CachedExperts(share.device, share.model.spec, part, settings, policy)
        except OutOfDeviceMemory as error:
            if settings.slots == 0:
                raise
            fewer = settings.slots // 2
            name = share.device.info.name
            logger.warning("%s holds %d experts a layer at most: %s", name, fewer, error)
            settings = replace(settings, slots=fewer)
        else:
            share.hold(experts)
            return


def _pin(host: HostExperts, device: Device, progress: Progress) -> None:
    """Let GPUs copy from where the experts lie; without that nothing is swapped."""
    progress.start("pinning experts", host.n_bytes >> 20, "MiB")
    host.pin(device, lambda n_bytes: progress.advance(n_bytes >> 20))
    if host.why_not_pinned:
        logger.warning("the experts on the GPU stay what they are: %s", host.why_not_pinned)
