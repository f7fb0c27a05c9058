"""The fingerprint of a model: the same for the same file, another one for other weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from runtime.models import open_model
from runtime.models.fingerprint import SAMPLE_BYTES, fingerprint
from tests.support.gguf_writer import Tensor, f32_tensor
from tests.support.tiny_model import TinyModel
from tests.support.tiny_models import TINY_MODELS


def trained(tensor: Tensor, part: slice) -> Tensor:
    """With other values in `part` of its slowest dimension."""
    values = np.frombuffer(tensor.data, np.float32).reshape(*reversed(tensor.shape)).copy()
    values[part] *= np.float32(1.01)
    return replace(f32_tensor(tensor.name, values), shape=tensor.shape)


def fingerprint_of(model: TinyModel, folder: Path) -> str:
    with open_model(model.write(folder / "model.gguf")) as opened:
        return fingerprint(opened)


def test_any_tensor_and_number_counts(tmp_path: Path) -> None:
    model = TINY_MODELS["olmoe"]()
    known = {fingerprint_of(model, tmp_path)}
    assert fingerprint_of(TINY_MODELS["olmoe"](), tmp_path) in known
    for index, tensor in enumerate(model.tensors):
        model.tensors[index] = trained(tensor, slice(None))
        known.add(fingerprint_of(model, tmp_path))
        model.tensors[index] = tensor
    model.set(rope__freq_base=5e5)
    known.add(fingerprint_of(model, tmp_path))
    assert len(known) == len(model.tensors) + 2


def test_a_quarter_of_the_experts_of_each_layer_is_enough(tmp_path: Path) -> None:
    """Samples lie at different places, so experts that are the same ones everywhere are met."""
    model = TINY_MODELS["olmoe"]()
    plain = fingerprint_of(model, tmp_path)
    for expert in range(0, 8, 2):
        changed = TINY_MODELS["olmoe"]()
        for index, tensor in enumerate(changed.tensors):
            if "_exps" in tensor.name:
                assert len(tensor.data) > 4 * SAMPLE_BYTES
                changed.tensors[index] = trained(tensor, slice(expert, expert + 2))
        assert fingerprint_of(changed, tmp_path) != plain, expert
