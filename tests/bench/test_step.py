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
from runtime.engine.gpu import gpu_plan, shared_parts
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


def test_parts_of_a_step_have_no_host_time_of_their_own() -> None:
    kernels = [step.KernelRow("qkv", "linear_q4_k", "dense", 2, 30.0, 60_000_000, 20.0)]
    row = step.breakdown("prompt 9", 99.0, 32.0, 9, kernels, 3)
    assert (row["parts"], row["overlapped_us"]) == (3, -2) and "host_us" not in row
    assert "the last of 3 parts" in step.table(row, kernels)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """A machine with a fake GPU, and few measurements."""
    fake = FakeDriver(memory_bytes=1 << 30)
    monkeypatch.setattr(driver, "open_driver", lambda: initialized(fake, "13.4.4"))
    monkeypatch.setattr(read_rates, "POOL_BYTES", 1 << 20)
    for name in ("N_TIMES", "N_READS"):
        monkeypatch.setattr(read_rates, name, 1)
    for name in ("N_LAUNCHES", "N_WARM"):
        monkeypatch.setattr(step, name, 1)
    return fake


def test_a_prompt_that_no_graph_takes_whole(
    fake: FakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of models with wide latent heads: the kernels are those of the last part."""
    for module in (shared_parts, gpu_plan):
        monkeypatch.setattr(module, "most_tokens", lambda *_: 4)
    path, out = tmp_path / "model.gguf", tmp_path / "out.json"
    write_model(path, small("olmoe"), 1, 0.5)
    arguments = ["--batches", "", "--prompts", "6", "--repeats", "1", "--out", str(out)]
    assert step.main([str(path), *arguments]) == 0
    (row,) = json.loads(out.read_text())["steps"]
    assert (row["step"], row["parts"]) == ("prompt 6", 2) and row["kernels"]
    assert fake.live == {}


def test_a_step_is_taken_apart(
    fake: FakeDriver, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every kernel that can run alone is timed; bytes are those of the file's matrices."""
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
        assert sizes["route"] == weights["blk.0.ffn_gate_inp.weight"].n_bytes
        experts = [
            weights[f"blk.0.ffn_{part}_exps.weight"].n_bytes for part in ("gate", "up", "down")
        ]
        read = [sizes.get(f"experts.{name}", 0) for name in ("gate_up", "down", "ffn")]
        assert sum(read) == 8 * sum(experts) // 16
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
