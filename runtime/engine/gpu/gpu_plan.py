"""GPUPlan: which GPUs compute a model, which layers, and all that they will hold.  Pure.

The same computation stands behind `hotexpert plan` and the real opening, which then follows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from ops.gpu.kv_layout import PAGE_TOKENS
from runtime.engine.executor import ExecutorLimits
from runtime.engine.gpu.devices import layers_of_each
from runtime.engine.gpu.expert_plan import (
    ExpertPlan,
    MoeLayer,
    all_experts,
    moe_layers_of,
    some_experts,
)
from runtime.engine.gpu.latent_launches import most_tokens
from runtime.engine.gpu.memory_launches import memory_bytes
from runtime.engine.gpu.settings import GPUSettings
from runtime.engine.gpu.share import shares_of
from runtime.engine.gpu.share_plan import SharePlan, usable_bytes
from runtime.engine.gpu.step_shape import LARGEST_BATCH, StepShapes
from runtime.engine.machine import GPUFacts
from runtime.errors import DeviceUnavailable
from runtime.experts.known_use import KnownUse
from runtime.models.model import Model


@dataclass(frozen=True, eq=False)
class GPUPlan:
    """settings   the chosen ones of those that were proposed
    shares     of each GPU that is used, in the order of their layers
    experts    of each of them
    reason     why these GPUs
    known      of the model's experts, from earlier runs
    """

    settings: GPUSettings
    limits: ExecutorLimits
    shares: tuple[SharePlan, ...]
    experts: tuple[ExpertPlan, ...]
    reason: str
    known: KnownUse | None = None

    @property
    def whole(self) -> bool:
        """Whether every expert has a place on a GPU."""
        return all(holds_all(share) for share in self.shares)

    @property
    def suits(self) -> bool:
        """Whether activations of long prompts leave as much room to experts, if there are any."""
        activations = sum(share.activation_bytes for share in self.shares)
        room = sum(max(share.expert_room, 0) for share in self.shares)
        return self.whole or self.settings.moe_expert_cache == 0 or room >= activations


def plan_gpus(
    model: Model,
    proposed: Sequence[GPUSettings],
    gpus: Sequence[GPUFacts],
    known: KnownUse | None = None,
) -> GPUPlan:
    """The plan for the first of the settings that suit these GPUs' memory, else that fit it.

    known: of the model's experts, from earlier runs
    Raises: DeviceUnavailable where none does: why the last one does not; ConfigError.
    """
    fitting: GPUPlan | None = None
    refused = DeviceUnavailable("no settings were proposed")
    for settings in proposed:
        try:
            plan = _plan(model, settings, gpus, known)
        except DeviceUnavailable as error:
            refused = error
            continue
        if plan.suits:
            return plan
        fitting = fitting or plan
    if fitting is None:
        raise refused
    return fitting


def holds_all(share: SharePlan) -> bool:
    """Whether all experts of a share are to be on its GPU."""
    wanted, n_expert = share.settings.moe_expert_cache, share.share.model.spec.n_expert_max
    fits = share.expert_bytes <= share.expert_room
    return n_expert == 0 or (fits and (wanted == -1 or wanted >= n_expert))


def moe_parts(model: Model, shares: Sequence[SharePlan]) -> list[list[MoeLayer]]:
    """The MoE layers of each share."""
    return [
        moe_layers_of(model.weights, [block for _, block in share.share.model.spec.moe_layers])
        for share in shares
    ]


def _plan(
    model: Model, settings: GPUSettings, gpus: Sequence[GPUFacts], known: KnownUse | None
) -> GPUPlan:
    if len(gpus) > 1 and settings.split is None and settings.tensor_split is None:
        alone = _on_one(model, settings, gpus)
        if alone is not None:
            return alone
    if len(gpus) == 1:
        reason = "there is one" if settings.split is not False else "asked for"
    elif settings.split or settings.tensor_split is not None:
        reason = "asked for"
    else:
        reason = "no single one holds the whole model"
    return _on(model, settings, gpus, reason, known)


def _on_one(model: Model, settings: GPUSettings, gpus: Sequence[GPUFacts]) -> GPUPlan | None:
    """On a GPU that holds the whole model: main_gpu if it does, else the one with most room."""

    def preference(gpu: GPUFacts) -> tuple[bool, int]:
        is_main = gpu.info.index == settings.main_gpu
        return not is_main, -usable_bytes(gpu.free_bytes, settings)

    for gpu in sorted(gpus, key=preference):
        try:
            plan = _on(model, settings, [gpu], "it holds the whole model: no hand-over in a step")
        except DeviceUnavailable:
            continue
        if plan.whole:
            return plan
    return None


def _on(
    model: Model,
    settings: GPUSettings,
    gpus: Sequence[GPUFacts],
    reason: str,
    known: KnownUse | None = None,
) -> GPUPlan:
    """Raises: DeviceUnavailable, ConfigError."""
    spec = model.spec
    limits = ExecutorLimits(
        n_vocab=spec.n_vocab,
        n_pages=-(-settings.n_ctx // PAGE_TOKENS),
        page_tokens=PAGE_TOKENS,
        max_step_tokens=settings.max_step_tokens,
        max_sequences=settings.max_sequences,
    )
    counts = layers_of_each(model, settings, gpus, limits.n_pages)
    shares = tuple(
        SharePlan(share, gpu, settings, limits)
        for share, gpu in zip(shares_of(model, counts), gpus, strict=True)
    )
    _check_share(shares)
    slots = [n for share in shares if (n := share.n_state_slots())]
    if slots:
        for share in shares:
            share.hold_states(min(slots))
        limits = replace(limits, n_state_slots=min(slots), n_previous=spec.n_previous)
    shapes = StepShapes(limits, most_tokens(spec, LARGEST_BATCH)).biggest()
    gathered = [memory_bytes(share.share.model) for share in shares]
    for index, share in enumerate(shares):
        share.measure(
            shapes,
            neighbours=(index > 0, index < len(shares) - 1),
            has_states=limits.n_state_slots > 0,
            memories=(sum(gathered), sum(gathered[:index])),
        )
    experts = plan_experts(model, shares, pinned=settings.load_mode == "pin", known=known)
    return GPUPlan(settings, limits, shares, experts, reason, known)


def _check_share(shares: Sequence[SharePlan]) -> None:
    """Raises: DeviceUnavailable where keys and values take more than they may."""
    share = shares[0].settings.kv_share
    kv_bytes = sum(one.pages.n_bytes for one in shares)
    if share is not None and kv_bytes > share * sum(one.usable_bytes for one in shares):
        raise DeviceUnavailable(f"keys and values take more than {share:.0%} of the memory")


def plan_experts(
    model: Model,
    shares: Sequence[SharePlan],
    rooms: Sequence[int] | None = None,
    *,
    pinned: bool = True,
    known: KnownUse | None = None,
) -> tuple[ExpertPlan, ...]:
    """Of every share.

    rooms   bytes left for experts, where that is less than planned; their GPUs then hold some
    pinned  the GPUs can copy experts from host memory
    known   of all MoE layers' experts
    """
    parts = moe_parts(model, shares)
    left = [share.expert_room for share in shares] if rooms is None else list(rooms)
    spans = [slice(*edges) for edges in pairwise((0, *accumulate(len(part) for part in parts)))]
    missing = [
        index
        for index, share in enumerate(shares)
        if not (holds_all(share) and share.expert_bytes <= left[index])
    ]
    some = some_experts(
        [parts[index] for index in missing],
        [left[index] for index in missing],
        shares[0].settings,
        pinned=pinned,
        known=[None if known is None else known.part(spans[index]) for index in missing],
    )
    plans = {index: plan for index, plan in zip(missing, some, strict=True)}
    return tuple(
        plans.get(index) or all_experts(parts[index], share.expert_bytes)
        for index, share in enumerate(shares)
    )
