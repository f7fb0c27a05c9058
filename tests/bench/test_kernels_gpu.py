"""`bench kernels_gpu`: every kernel runs with the arguments it is given; the file has each run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import kernel_bed, kernel_work, kernels_gpu, read_rates
from bench.kernel_bed import Bed
from bench.kernels_gpu import main, measure
from bench.read_rates import GPUReads
from ops.quants import FORMATS
from runtime.cuda.device import Device
from runtime.cuda.driver import Driver, initialized
from tests.support.fake_driver import FakeDriver


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A fake GPU, and little of everything."""
    monkeypatch.setattr(kernel_bed, "POOL_BYTES", 1 << 20)
    monkeypatch.setattr(kernel_bed, "TURNS", 2)
    monkeypatch.setattr(kernel_bed, "MOST_TURNS", 2)
    monkeypatch.setattr(kernel_work, "N_USED", 2)
    monkeypatch.setattr(kernels_gpu, "EXPERTS", ((256, 256),))
    monkeypatch.setattr(kernels_gpu, "MATRICES", ((256, 16), (512, 16)))
    monkeypatch.setattr(kernels_gpu, "ROUTER", (256, 8))
    monkeypatch.setattr(kernels_gpu, "EXPERT_TOKENS", (1, 2))
    monkeypatch.setattr(kernels_gpu, "GEMM_SLOTS", (3,))
    monkeypatch.setattr(read_rates, "N_READS", 2)
    monkeypatch.setattr(read_rates, "N_TIMES", 1)
    fake = FakeDriver(memory_bytes=1 << 28)
    return initialized(fake, "13.4.4")


def test_every_kernel_runs(driver: Driver, capsys: pytest.CaptureFixture[str]) -> None:
    kernels = ("experts", "linear", "gemm")
    with Device(driver) as device, GPUReads(device, pool_bytes=1 << 20) as reads:
        formats = [FORMATS["Q4_K"], FORMATS["F16"]]
        rows = list(measure(device, reads, formats, kernels, 2))
    assert [(row.kernel, row.format, row.shape, row.vectors) for row in rows] == [
        ("experts", "Q4_K", "256x256", 2),
        ("experts", "Q4_K", "256x256", 4),
        ("linear", "Q4_K", "256x16", 1),
        ("linear", "Q4_K", "512x16", 1),
        ("gemm", "Q4_K", "256x16", 3),
        ("gemm", "Q4_K", "512x16", 3),
        ("linear", "F16", "256x8", 1),
    ]
    assert [len(row.runs) for row in rows] == [2] * 7
    assert rows[2].n_bytes == 16 * 144
    assert rows[0].n_bytes == 2 * 3 * 256 * 144
    assert len(capsys.readouterr().out.splitlines()) == 7


def test_the_file_names_machine_and_settings(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kernels_gpu, "open_driver", lambda: driver)
    monkeypatch.setattr(kernels_gpu, "GPUReads", lambda device: GPUReads(device, 1 << 20))
    out = tmp_path / "rows.json"
    assert main(["--formats", "Q8_0", "--kernels", "linear", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["machine"]["gpu"].startswith("Fake GPU")
    assert report["settings"]["formats"] == "Q8_0"
    assert [row["share_of_read"] > 0 for row in report["rows"]] == [True, True]
    assert len(report["rows"][0]["runs"]) == 11


def test_turns_read_more_than_a_cache_holds() -> None:
    assert Bed.turns(64 << 20) == kernel_bed.TURNS
    assert Bed.turns(2 << 20) == 96
    assert Bed.turns(1000) == kernel_bed.MOST_TURNS
