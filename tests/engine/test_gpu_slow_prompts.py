"""A model whose prompts kernels for single tokens read says so when it is opened."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.engine.gpu.slow_prompts import ATTENTION, RECURRENCE
from runtime.models import open_model
from runtime.notices import Notices, Reason
from tests.engine.test_gpu_executor import executor_of
from tests.support.fake_driver import FakeDriver
from tests.support.stub_kernels import StubKernels
from tests.support.tiny_attention_models import gpt_oss
from tests.support.tiny_model import TinyModel
from tests.support.tiny_recurrent_models import glm5_next, qwen4exp, qwen35


def without_floor() -> TinyModel:
    model = glm5_next(latent=512)
    del model.metadata["glm5-next.kda.gate_lower_bound"]
    return model


def never_choosing() -> TinyModel:
    """No text is long enough for its indexer to leave keys out."""
    model = qwen4exp()
    model.set(attention__indexer__top_k=4096)
    return model


MODELS = {
    "glm": (glm5_next(latent=512), "f16", set()),
    "glm, decays without a floor": (without_floor(), "f16", set()),
    "glm, latents in q8_0": (glm5_next(latent=512), "q8_0", set()),
    "glm, keys in q8_0 alone": (glm5_next(latent=512), "q8_0 f16", {ATTENTION}),
    "gpt-oss": (gpt_oss(), "f16", set()),
    "one decay a head": (qwen35(), "f16", set()),
    "an indexer's lists": (qwen4exp(), "f16", set()),
    "an indexer below its limit": (never_choosing(), "f16", set()),
}


SMALL_BLOCKS = {
    "glm": {RECURRENCE, ATTENTION},
    "gpt-oss": set(),
    "one decay a head": {RECURRENCE},
    "an indexer's lists": {RECURRENCE},
}
"""Of what a GPU with 99 KiB for a block tells its users, as Ada and consumer Blackwell have."""


@pytest.mark.parametrize(
    ("name", "block_kib"), [*((name, 227) for name in MODELS), *((n, 99) for n in SMALL_BLOCKS)]
)
async def test_notices(name: str, block_kib: int, tmp_path: Path) -> None:
    tiny, cache_types, expected = MODELS[name]
    if block_kib == 99:
        expected = SMALL_BLOCKS[name]
    notices = Notices()
    fake = FakeDriver(memory_bytes=1 << 30)
    fake.attributes["MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"] = block_kib << 10
    fake.kernels = StubKernels()
    settings = {
        "cache_type_k": cache_types.split()[0],
        "cache_type_v": cache_types.split()[-1],
        "n_threads": 1,
        "exchange_rounds": 0,
        "notices": notices,
    }
    with open_model(tiny.write(tmp_path / "model.gguf")) as model:
        async with executor_of(model, tmp_path, fake, **settings):
            found = {n.text for n in notices.all if n.reason is Reason.SLOW_PROMPTS}
    assert found == expected
