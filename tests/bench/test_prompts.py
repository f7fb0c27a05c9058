"""`python -m bench prompts` over the fake driver."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path

import pytest

from bench import prompts
from bench.synthetic import write_model
from runtime.cuda import driver
from runtime.cuda.driver import initialized
from runtime.engine import placement
from runtime.models import open_model
from tests.bench.test_exchange import untested
from tests.bench.test_shapes import small
from tests.support.fake_driver import FakeDriver

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def test_the_bound_is_that_of_the_bytes_that_cross_the_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeDriver(memory_bytes=1 << 30)
    fake.host = partial(time.sleep, 0)
    monkeypatch.setattr(driver, "open_driver", lambda: initialized(fake, "13.4.4"))
    monkeypatch.setattr(placement, "gpu_proposals", untested)
    monkeypatch.setattr(prompts, "link_bytes_per_second", lambda _: 1e9)
    path, out = tmp_path / "model.gguf", tmp_path / "out.json"
    write_model(path, small("olmoe"), 1, 0.5)
    arguments = ["--tokens", "3", "--chunk", "2", "--caches=-1,12", "--repeats", "1"]
    assert prompts.main([str(path), *arguments, "--out", str(out)]) == 0
    whole, few = json.loads(out.read_text())["rows"]
    assert whole["share"] is None and len(whole["seconds"]) == 2
    with open_model(path) as model:
        names = [name for name in model.file.tensors if name.endswith("_exps.weight")]
        n_bytes = sum(model.weights[name].n_bytes for name in names)
    assert few["bytes_a_chunk"] == 4 * n_bytes // 16
    assert few["link_tokens_per_second"] == pytest.approx(3e9 / (2 * few["bytes_a_chunk"]))
    assert few["share"] == pytest.approx(few["tokens_per_second"] / few["link_tokens_per_second"])
    assert "12 a layer on the GPU" in capsys.readouterr().out
    assert fake.live == {}
