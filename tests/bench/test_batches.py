"""`python -m bench batches` over the fake driver."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import batches
from bench.synthetic import write_model
from runtime.cuda import driver
from runtime.cuda.driver import initialized
from runtime.engine.gpu import step_shape
from tests.bench.test_shapes import small
from tests.support.fake_driver import FakeDriver

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def test_steps_of_several_sizes_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last one is performed in two parts, and the GPU chooses its tokens too."""
    fake = FakeDriver(memory_bytes=1 << 30)
    monkeypatch.setattr(driver, "open_driver", lambda: initialized(fake, "13.4.4"))
    monkeypatch.setattr(step_shape, "LARGEST_DECODE", 2)
    monkeypatch.setattr(batches, "FIRST_POSITION", 2)
    path, out = tmp_path / "model.gguf", tmp_path / "out.json"
    write_model(path, small("olmoe"), 1, 0.5)
    batches.main([str(path), "--batches", "1,3", "--repeats", "1", "--out", str(out)])
    result = json.loads(out.read_text())
    assert [row["batch"] for row in result["rows"]] == [1, 3]
    for row in result["rows"]:
        assert row["chosen_on_the_gpu"] and len(row["all_us"]) == 3
        assert row["us_a_token"] == pytest.approx(row["us"] / row["batch"])
    assert result["largest_ratio"] == max(row["ratio"] for row in result["rows"])
    assert "   3 sequences:" in capsys.readouterr().out
    assert fake.live == {}
