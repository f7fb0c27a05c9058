"""What the kernels lack: nothing that a model of the tests needs; every layer is the GPU's."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.engine.gpu.support import obstacles
from runtime.engine.step import StepKind
from runtime.models import open_model
from tests.engine.test_gpu_executor import TOKENS, executor_of, step_of
from tests.support.tiny_models import TINY_MODELS

HOST_MEMORIES = ("qwen4exp",)
"""Models with n-gram tables, whose rows the host finds and gathers."""


@pytest.mark.parametrize("name", [name for name in TINY_MODELS if name != "deepseek2_lite"])
async def test_every_layer_is_the_gpus(name: str, tmp_path: Path) -> None:
    """Mixers and feed-forward blocks of all layers are launches; the CPU has no part in a step."""
    with open_model(TINY_MODELS[name]().write(tmp_path / "model.gguf")) as model:
        assert obstacles(model) == []
        async with executor_of(model, tmp_path) as gpu:
            parts = gpu._parts
            shape = parts.shapes.of(step_of(gpu, StepKind.DECODE, [(1, TOKENS[:1], 0)]))
            names = [planned.name for planned, _ in parts.steps.launches(shape)]
            per_layer = Counter(name.split(".")[0] for name in names if "." in name)
            assert all(per_layer[str(i)] >= 6 for i in range(len(model.spec.layers))), per_layer
            assert parts.exchange is None
            assert (parts.memories is not None) == (name in HOST_MEMORIES)


@pytest.mark.parametrize(("n_ff", "lacking"), [(36, []), (37, ["products of 37 values"])])
def test_rows_of_activations_are_aligned(n_ff: int, lacking: list[str], tmp_path: Path) -> None:
    """Weights of floats may have any width; loads of four values from an odd one end a context."""
    with open_model(TINY_MODELS["olmoe"]().write(tmp_path / "model.gguf")) as model:
        layer = model.spec.layers[0]
        block = layer.feed_forward
        block = replace(block, n_ff=n_ff, down=replace(block.down, n_in=n_ff))
        model.spec = replace(model.spec, layers=(replace(layer, feed_forward=block),))
        assert obstacles(model) == lacking
