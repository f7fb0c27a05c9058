"""Synthetic files of real shapes open as the models they imitate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.synthetic import MODELS, write_model
from runtime.models import open_model
from runtime.models.spec import MoeSpec


def test_a_synthetic_file_is_a_model(tmp_path: Path) -> None:
    shape = replace(
        MODELS["qwen3-30b-a3b"], n_embd=256, n_ff=256, n_vocab=512, n_expert=4, n_used=2
    )
    for name in ("first", "second"):
        write_model(tmp_path / name, shape, n_layers=8, skew=0.5)
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()
    with open_model(tmp_path / "first") as model:
        blocks = [layer.feed_forward for layer in model.spec.layers]
        assert [block.n_expert for block in blocks if isinstance(block, MoeSpec)] == [4] * 8
        formats = {model.weights[f"blk.{i}.ffn_down_exps.weight"].format.name for i in range(8)}
        assert formats == {"Q4_K", "Q6_K"}
        for name in ("blk.0.attn_q.weight", "blk.0.ffn_down_exps.weight"):
            values = model.weights[name].to_f32()
            assert abs(float(values.std()) * np.sqrt(values.shape[-1]) - 1) < 0.2
