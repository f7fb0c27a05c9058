"""`python -m bench gpus` measures one GPU and all, and sees whether they say the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import gpus
from runtime.cuda import driver
from runtime.cuda.driver import initialized
from tests.engine.test_gpu_two import gpus as fake_gpus
from tests.support.block_models import BLOCK_MODELS

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def test_a_result_names_what_was_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_MOE_CACHE_PROFILE", "0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(driver, "open_driver", lambda: initialized(fake_gpus(), "13.4.4"))
    monkeypatch.setattr(gpus, "N_STAMPED", 1)
    monkeypatch.setattr(gpus, "SPLITS", {"all": "layer"})  # one is the same, and interpreting slow
    path = BLOCK_MODELS["qwen3moe"]("Q8_0", 2).write(tmp_path / "model.gguf")
    out = tmp_path / "result.json"
    arguments = [str(path), "--tokens", "2", "--warm", "0", "--out", str(out)]
    assert gpus.main(arguments) == 0
    result = json.loads(out.read_text())
    assert result["same_bits"]
    (both,) = result["rows"]
    assert both["gpus"] == "Fake GPU 0, Fake GPU 1"
    assert both["direct_hand_over"] and len(both["slots"]) == 2
    assert len(both["step_us"]) == 2 and len(both["answers"][0]["token_us"]) == 1


@pytest.mark.parametrize("what", ["logits", "ids"])
def test_a_difference_is_told(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {name: "" for name in gpus.PRINTED} | {"logits": "a", "ids": ["b"]}
    rows = iter([row, {**row, what: "c"}])

    async def measure(*_: Any) -> dict[str, Any]:
        return next(rows)

    monkeypatch.setattr(gpus, "measure", measure)
    assert gpus.main(["model.gguf"]) == 1
