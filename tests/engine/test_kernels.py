"""What is compiled before the first step is what programs call, for every kind of model."""

from __future__ import annotations

from pathlib import Path

import pytest

from ops.cpu.job import JobKernel
from runtime.engine.cpu_executor import open_cpu_executor
from runtime.engine.kernels import kernels_of
from runtime.models import open_model
from tests.support.tiny_models import TINY_MODELS


@pytest.mark.parametrize("name", TINY_MODELS)
async def test_a_models_kernels_are_those_of_its_programs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: set[str] = set()
    address = JobKernel.address.fget
    assert address is not None

    def recorded(kernel: JobKernel) -> int:
        used.add(kernel.name)
        return int(address(kernel))

    path = TINY_MODELS[name]().write(tmp_path / "model.gguf")
    with open_model(path) as model:
        monkeypatch.setattr(JobKernel, "address", property(recorded))
        executor = open_cpu_executor(
            model, n_ctx=64, max_sequences=2, max_step_tokens=8, n_threads=1
        )
        await executor.close()
        assert {kernel.name for kernel in kernels_of(model)} == used
