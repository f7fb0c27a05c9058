"""`python -m bench step`: names, bytes and whole runs over the fake driver."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import read_rates, step
from bench.launch_bytes import launch_bytes
from bench.synthetic import write_model
from runtime.cuda import driver
from runtime.cuda.driver import initialized
from runtime.engine.gpu.launch_plan import PlannedLaunch
from runtime.models import open_model
from tests.bench.test_shapes import small
from tests.support.fake_driver import FakeDriver

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("experts.gate_up", "experts"), ("experts.group", "router"), ("route", "router"),
        ("attention_output", "dense"), ("qkv", "dense"), ("attention_join", "attention"),
        ("mixer_norm_streams_down", "streams"), ("delta_net", "recurrent"), ("logits", "output"),
        ("dense.gate_up", "dense"), ("gate_narrow", "recurrent"), ("key_up.q8_32", "attention"),
    ],
)  # fmt: skip
def test_every_launch_belongs_to_a_part(name: str, part: str) -> None:
    assert step.part_of(name) == part
    assert step.short_name(f"12.{name}") == name == step.short_name(name)


def test_a_breakdown_adds_up() -> None:
    kernels = [
        step.KernelRow("qkv", "linear_q4_k", "dense", 2, 30.0, 60_000_000, 20.0),
        step.KernelRow("logits", "linear_q6_k", "output", 1, 10.0, 0, 0.0),
    ]
    row = step.breakdown("decode 1", 55.0, 32.0, 9, kernels)
    assert (row["overlapped_us"], row["host_us"], row["read_us"]) == (8, 23, 20)
    assert row["parts_us"] == {"dense": 30, "output": 10}
    text = step.table(row, kernels)
    assert "2000 GB/s   67 %" in text and "host 23" in text
    assert step.breakdown("decode 1", 55.0, None, 9, kernels)["wait_us"] == 15


def test_a_step_is_taken_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every kernel that can run alone is timed; bytes are those of the file's matrices."""
    fake = FakeDriver(memory_bytes=1 << 30)
    monkeypatch.setattr(driver, "open_driver", lambda: initialized(fake, "13.4.4"))
    monkeypatch.setattr(read_rates, "POOL_BYTES", 1 << 20)
    for name in ("N_TIMES", "N_READS"):
        monkeypatch.setattr(read_rates, name, 1)
    for name in ("N_LAUNCHES", "N_WARM"):
        monkeypatch.setattr(step, name, 1)
    path, out = tmp_path / "model.gguf", tmp_path / "out.json"
    write_model(path, small("olmoe"), 1, 0.5)
    arguments = ["--position", "3", "--repeats", "1", "--out", str(out)]
    assert step.main([str(path), *arguments]) == 0
    (row,) = json.loads(out.read_text())["steps"]
    sizes = {kernel["name"]: kernel["n_bytes"] for kernel in row["kernels"]}
    with open_model(path) as model:
        weights = model.weights
        qkv = sum(weights[f"blk.0.attn_{part}.weight"].n_bytes for part in "qkv")
        assert sizes["logits"] == weights["output.weight"].n_bytes
        assert sizes["router"] == weights["blk.0.ffn_gate_inp.weight"].n_bytes
        each = weights["blk.0.ffn_gate_exps.weight"].n_bytes // 16
        assert sizes["experts.gate_up"] == 2 * 8 * each
        in_file = {k["entry"]: k["n_bytes"] for k in row["kernels"] if k["name"] == "qkv"}
        assert in_file["linear_q4_k"] == qkv
    assert {"embed", "heads", "attention", "route"} <= set(sizes)
    assert not {"refresh", "report"} & set(sizes)
    assert {"dense", "router", "hits", "logits"} <= set(row["in_graph_us"])
    assert "== decode 1: us wall" in capsys.readouterr().out
    assert fake.live == {}


def test_launches_of_unknown_kernels_have_no_bytes() -> None:
    class Shape:
        n_tokens = n_sequences = 1

    launch = PlannedLaunch("x", type("K", (), {"entry": "norm"})(), (1,), {}, 0, False, False)
    assert launch_bytes(launch, Shape(), 0, lambda *_: b"") == 0  # type: ignore[arg-type]
