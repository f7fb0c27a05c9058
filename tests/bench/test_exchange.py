"""`python -m bench exchange` over the fake driver."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench import exchange
from bench.synthetic import write_model
from runtime.cuda import driver
from runtime.cuda.driver import initialized
from runtime.engine import placement
from runtime.engine.proposals import Proposal, gpu_proposals
from tests.bench.test_shapes import small
from tests.support.fake_driver import FakeDriver

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def untested(*args: Any) -> list[Proposal]:
    """The settings as they are, without the start-up test of the exchange."""
    return [
        replace(proposal, settings=replace(proposal.settings, exchange_rounds=0))
        for proposal in gpu_proposals(*args)
    ]


def test_every_layer_misses_as_many_as_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeDriver(memory_bytes=1 << 30)
    fake.host = partial(time.sleep, 0)
    monkeypatch.setattr(driver, "open_driver", lambda: initialized(fake, "13.4.4"))
    monkeypatch.setattr(placement, "gpu_proposals", untested)
    monkeypatch.setattr(exchange, "POSITION", 2)
    path, out = tmp_path / "model.gguf", tmp_path / "out.json"
    write_model(path, small("olmoe"), 1, 0.5)
    arguments = ["--misses", "2", "--batches", "1", "--repeats", "1", "--threads", "2"]
    assert exchange.main([str(path), *arguments, "--out", str(out)]) == 0
    none, two = json.loads(out.read_text())["rows"]
    assert (none["misses"], none["missed_slots"]) == (0, 0)
    assert (two["misses"], two["missed_slots"], two["layers"]) == (2, 2, 1)
    assert two["cpu_us"] > 0 and len(two["step_us"]) == 1
    assert {"hits", "misses"} <= set(two["parts_us"])
    assert two["over_us"] == pytest.approx(two["extra_us"] - max(0, two["cpu_us"] - two["hits_us"]))
    assert "misses 2: extra" in capsys.readouterr().out
    assert fake.live == {}
