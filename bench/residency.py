"""How a model is held where so much of its routed experts has room on a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from runtime.config import EngineConfig
from runtime.engine.gpu.expert_plan import ExpertPlan
from runtime.engine.gpu.gpu_plan import GPUPlan, moe_parts, plan_gpus
from runtime.engine.machine import described_gpus
from runtime.engine.proposals import gpu_proposals
from runtime.models import open_model

GPU = "H200:140GiB"
"""Whose kernels are meant; what it holds is limited."""
ROUNDED_UP = 1 << 20


def limit_of(config: EngineConfig, percent: float) -> float:
    """GiB of a GPU's memory that hold what every token needs and `percent` of the routed experts.

    Raises: ModelError; DeviceUnavailable where not even that fits.
    """
    plan = plan_of(replace(config, moe_expert_cache=1, moe_cache=()))
    (share,) = plan.shares
    (layers,) = moe_parts(share.share.model, [share])
    experts = sum(layer.experts.slot_bytes * layer.experts.n_expert for layer in layers)
    held = share.dense_bytes + share.settings.reserve_bytes + ROUNDED_UP
    return float((held + experts * percent / 100) / 2**30)


def experts_of(config: EngineConfig) -> ExpertPlan:
    """What the engine would hold of the experts, and why.  Raises: as `limit_of`."""
    (experts,) = plan_of(config).experts
    return experts


def plan_of(config: EngineConfig) -> GPUPlan:
    """Raises: as `limit_of`."""
    path = Path(str(config.model))
    with open_model(path) as model:
        proposals = gpu_proposals(config, int(config.n_ctx or 0))
        return plan_gpus(model, [p.settings for p in proposals], described_gpus(GPU))
