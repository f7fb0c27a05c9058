"""What share of its uses of experts a plan expects the GPUs to serve."""

from __future__ import annotations

from runtime.engine.gpu.expert_plan import Holding, expected_hits, moe_layers_of
from runtime.engine.gpu.gpu_plan import GPUPlan


def expected_hit_rate(plan: GPUPlan) -> float | None:
    """0 to 1, over the layers of the GPUs that do not hold all of theirs; None: all do."""
    hits = total = 0.0
    first = 0
    for share, experts in zip(plan.shares, plan.experts, strict=True):
        model = share.share.model
        blocks = [block for _, block in model.spec.moe_layers]
        layers = moe_layers_of(model.weights, blocks)
        known = None if plan.known is None else plan.known.part(slice(first, first + len(blocks)))
        first += len(blocks)
        if experts.holding is Holding.ALL or not experts.slots:
            continue
        expected = expected_hits(layers, experts.slots, known)
        if experts.holding is Holding.LAYERS:
            both = zip(experts.slots, layers, strict=True)
            expected = [n / layer.experts.n_expert for n, layer in both]
        hits += sum(layer.n_used * hit for layer, hit in zip(layers, expected, strict=True))
        total += sum(layer.n_used for layer in layers)
    return hits / total if total else None
