"""How a whole model would be held on a smaller GPU, for runs of some of its layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

from bench.synthetic import sketch_of
from bench.synthetic.gguf_file import write_file
from bench.synthetic.models import Shape
from runtime.config import EngineConfig
from runtime.engine.gpu.gpu_plan import plan_gpus
from runtime.engine.machine import described_gpus
from runtime.engine.proposals import gpu_proposals
from runtime.models import open_model

GPU = "H200"
"""Whose kernels are meant, with less memory."""


@dataclass(frozen=True)
class Held:
    """What the engine's plan for the whole model says.

    slots         experts of a layer that the GPU holds, on average
    n_batch       tokens of a prompt chunk
    fetch_bytes   that prompts' experts take besides
    """

    slots: int
    n_batch: int
    fetch_bytes: int
    holding: str


def held(shape: Shape, limit: float, n_ctx: int, n_batch: int | None = None) -> Held:
    """Of a GPU with `limit` GiB and one sequence of n_ctx tokens.

    The plan asks the file for sizes alone, so one without a weight in it will do.
    Raises: DeviceUnavailable where the model does not fit at all.
    """
    sketch = sketch_of(shape, shape.n_layers)
    holes = [replace(part, hole=True) for part in sketch.parts]
    with TemporaryDirectory(prefix="whole-model-") as folder:
        path = Path(folder) / "model.gguf"
        write_file(path, sketch.keys, holes, seed=0)
        config = EngineConfig(model=path, device="cuda", n_ctx=n_ctx, n_parallel=1, n_batch=n_batch)
        proposals = gpu_proposals(config, n_ctx)
        with open_model(path) as model:
            gpus = described_gpus(f"{GPU}:{limit}GiB")
            plan = plan_gpus(model, [proposal.settings for proposal in proposals], gpus)
    (experts,) = plan.experts
    return Held(
        round(mean(experts.slots)) if experts.slots else 0,
        plan.settings.max_step_tokens,
        experts.fetch_bytes,
        str(experts.holding),
    )
