"""Short steps of an executor for long contexts: their kernels are loaded, too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.synthetic import write_model
from runtime.engine.step import StepKind
from runtime.models import open_model
from tests.bench.test_shapes import small
from tests.engine.test_gpu_executor import executor_of
from tests.support.cpu_steps import step_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("name", ["glm-5.3-flash", "qwen3.8-flash-next"])
async def test_attention_that_chooses_keys_reads_all_of_a_short_text(
    name: str, tmp_path: Path
) -> None:
    """Below its limit it is dense, by other kernels than beyond it, and those beyond have more
    threads the more there is to choose from."""
    write_model(tmp_path / "model.gguf", replace(small(name), top_k=2048), 4, 0.5)
    with open_model(tmp_path / "model.gguf") as model:
        async with executor_of(model, tmp_path, n_ctx=40960, max_sequences=1) as executor:
            step = step_of(
                executor,
                StepKind.DECODE,
                [(0, np.array([5], np.int32), 0)],
                texts={0: np.array([5])},
            )
            for position in (0, 2300, 8500, 40000):
                shape = executor._parts.shapes.of(
                    replace(step, positions=step.positions + position)
                )
                names = {p.kernel.entry for p, _ in executor._parts.steps.launches(shape)}
                assert ("index_select" in names) == (position > 2048)
