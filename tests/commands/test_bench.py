"""hotexpert bench: what it runs, and llama-bench's table and keys."""

from __future__ import annotations

import argparse
import csv
import io
import json

import pytest

from runtime.commands import main
from runtime.commands.bench_matrix import Setup, Test, numbers
from runtime.commands.bench_report import KEYS, Report, Result

FAKE = ["bench", "--device", "fake", "-r", "2"]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("512", [512]),
        ("1,2,4", [1, 2, 4]),
        ("1-3", [1, 2, 3]),
        ("2-9+3", [2, 5, 8]),
        ("1-8*2", [1, 2, 4, 8]),
        ("0,4-5", [0, 4, 5]),
    ],
)
def test_numbers(text: str, values: list[int]) -> None:
    assert numbers(text) == values


@pytest.mark.parametrize("text", ["", "x", "3-1", "1-4*1", "0-4*2", "1-9+0", "1-999999999", "-1"])
def test_no_numbers(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        numbers(text)


@pytest.mark.parametrize(
    ("test", "name"),
    [
        (Test(512, 0, 0), "pp512"),
        (Test(0, 128, 0), "tg128"),
        (Test(512, 128, 0), "pp512+tg128"),
        (Test(512, 0, 4096), "pp512 @ d4096"),
    ],
)
def test_names(test: Test, name: str) -> None:
    assert test.name == name


def result(samples_ns: list[int]) -> Result:
    setup = Setup(None, None, 512, "f16", "f16")
    facts = {
        "build_commit": "1",
        "cpu_info": "cpu",
        "gpu_info": "",
        "backends": "CPU",
        "model_filename": "m.gguf",
        "model_type": "olmoe Q4_K - Medium",
        "model_size": 3 * 2**29,
        "model_n_params": 6_919_000_000,
        "n_threads": 2,
    }
    return Result(setup, Test(0, 100, 8), facts, samples_ns, "2026-01-01T00:00:00Z")


def test_table() -> None:
    shown: list[str] = []
    columns = ("model", "size", "params", "backend", "threads", "test", "t/s")
    report = Report("md", shown.append, columns)
    report.begin()
    report.add(result([10**9, 2 * 10**9]))
    report.end()
    head, rule, row = "".join(shown).splitlines()
    assert [cell.strip() for cell in head.strip("|").split("|")] == list(columns)
    assert rule.count(":") == 5
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        "olmoe Q4_K - Medium", "1.50 GiB", "6.92 B", "CPU", "2", "tg100 @ d8", "75.00 ± 35.36",
    ]  # fmt: skip
    assert len(head) == len(rule) == len(row)


def test_json_has_the_keys_and_figures_of_llama_bench() -> None:
    shown: list[str] = []
    report = Report("json", shown.append, ())
    report.begin()
    for _ in range(2):
        report.add(result([10**9, 2 * 10**9]))
    report.end()
    rows = json.loads("".join(shown))
    assert len(rows) == 2
    assert list(rows[0]) == [*KEYS, "samples_ns", "samples_ts"]
    assert rows[0]["avg_ns"] == 1_500_000_000 and rows[0]["stddev_ns"] == 707106781
    assert rows[0]["avg_ts"] == 75.0 and rows[0]["stddev_ts"] == pytest.approx(35.355339)
    assert rows[0]["samples_ts"] == [100.0, 50.0]


def test_every_combination_runs(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["-p", "3,40", "-n", "2", "-pg", "4,2", "-d", "0,8", "-b", "16,32", "-o", "jsonl"]
    assert main([*FAKE, *words]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    shapes = [(r["n_batch"], r["n_depth"], r["n_prompt"], r["n_gen"]) for r in rows]
    assert shapes == [
        (batch, depth, *test)
        for batch in (16, 32)
        for depth in (0, 8)
        for test in ((3, 0), (40, 0), (0, 2), (4, 2))
    ]
    assert all(len(row["samples_ns"]) == 2 for row in rows)


def test_csv(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FAKE, "-p", "4", "-n", "0", "-o", "csv"]) == 0
    rows = list(csv.reader(io.StringIO(capsys.readouterr().out)))
    assert rows[0] == list(KEYS) and len(rows) == 2
    assert rows[1][KEYS.index("n_prompt")] == "4"


def test_chosen_columns_appear(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FAKE, "-pg", "4,2", "-b", "8", "-ctk", "f32"]) == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert "n_batch" in head and "type_k" in head and "type_v" not in head
    assert [row.split("|")[-3].strip() for row in rows] == ["pp4+tg2"]
