"""The specs are right: a plain forward pass from them gives the logits that llama.cpp computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from runtime.models import open_model
from runtime.models.spec import AttentionSpec
from tests.support.golden import NAMES, golden_case
from tests.support.reference_model import reference_logits
from tests.support.tiny_models import TINY_MODELS, fused

TOLERANCE = 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_every_position(name: str, tmp_path: Path) -> None:
    case = golden_case(name, tmp_path)
    with open_model(case.path) as model:
        logits = reference_logits(model, case.tokens)
    assert np.abs(logits - case.logits).max() < TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_fused_and_merged_tensors_are_the_same_model(name: str, tmp_path: Path) -> None:
    case = golden_case(name, tmp_path, fused(TINY_MODELS[name]()))
    with open_model(case.path) as model:
        mixer = model.spec.layers[0].mixer
        assert not isinstance(mixer, AttentionSpec) or len(mixer.qkv) == 1
        logits = reference_logits(model, case.tokens[:40])
    assert np.abs(logits - case.logits[:40]).max() < TOLERANCE


@pytest.mark.parametrize(
    "key", ["rope.freq_base", "attention.layer_norm_rms_epsilon", "expert_used_count"]
)
def test_a_wrong_number_moves_the_logits(key: str, tmp_path: Path) -> None:
    """The comparison has teeth."""
    wrong = TINY_MODELS["qwen3moe"]()
    value = wrong.metadata[f"qwen3moe.{key}"]
    wrong.metadata[f"qwen3moe.{key}"] = value - 1 if isinstance(value, int) else value * 2000
    case = golden_case("qwen3moe", tmp_path, wrong)
    with open_model(case.path) as model:
        logits = reference_logits(model, case.tokens[:40])
    assert np.abs(logits - case.logits[:40]).max() > 10 * TOLERANCE
