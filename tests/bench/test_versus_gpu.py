"""Ours beside llama.cpp on a GPU: what fits in as much memory, and what is reckoned of it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from bench.versus_gpu import Layers, on_cpu, point, theirs

WHOLE = Layers(file=4, moe=4, whole=4, experts=32, output_bytes=0)
ROW = {"slots": 16, "hit_rate": 0.9, "read_gb_per_s": {"gpu": 1000.0}}
SPEEDS = {"whole_model_tokens_per_second": 50.0, "whole_model_prompt_tokens_per_second": 500.0}
LLAMA_BENCH = f"""#!{sys.executable}
import json, sys
layers = sys.argv[sys.argv.index("-ncmoe") + 1].split(",")
tests = [(int(n), n_prompt) for n in layers for n_prompt in (0, 9)]
print(json.dumps([{{"n_cpu_moe": n, "n_prompt": p, "avg_ts": n + p}} for n, p in tests]))
"""


@pytest.mark.parametrize(("slots", "expected"), [(0, 4), (15, 3), (16, 2), (32, 0)])
def test_layers_whose_experts_have_no_room_in_as_much_memory(slots: int, expected: int) -> None:
    assert on_cpu(ROW | {"slots": slots}, WHOLE) == expected


def test_a_first_dense_layer_counts_for_ncmoe_but_holds_no_experts() -> None:
    layers = Layers(file=5, moe=4, whole=5, experts=32, output_bytes=0)
    assert on_cpu(ROW, layers) == 3  # layers 0, 1 and 2: two of them have experts


def test_ratios_are_those_of_the_rounds_pairs() -> None:
    row = ROW | SPEEDS
    rounds = [
        {"ours": [row], "theirs": [{"decode": 25.0, "prompt": 100.0}]},
        {"ours": [row], "theirs": [{"decode": 10.0, "prompt": 250.0}]},
    ]
    found = point(rounds, 0, WHOLE)
    assert found["decode"] == {"ours": [50.0, 50.0], "llama_cpp": [25.0, 10.0], "ratio": 3.5}
    assert found["prompt"]["ratio"] == 3.5


def test_points_with_room_for_as_many_layers_share_a_run(tmp_path: Path) -> None:
    program = tmp_path / "llama-bench"
    program.write_text(LLAMA_BENCH)
    program.chmod(0o755)
    args = argparse.Namespace(llama_bench=str(program), prompt=9, tokens=4, threads=None)
    found = theirs(Path("model.gguf"), [3, 1, 3], args)
    assert [row["on_cpu"] for row in found] == [3, 1, 3]
    assert [(row["decode"], row["prompt"]) for row in found] == [(3, 12), (1, 10), (3, 12)]


def test_a_whole_model_is_reckoned_from_some_layers() -> None:
    # 4 of 8 layers: 1 ms of output matrix, 2 ms a layer on the CPU, 0.5 ms on the GPU; 4 of 8 fit
    layers = Layers(file=4, moe=4, whole=8, experts=32, output_bytes=1_000_000_000)
    theirs = [{"decode": 1e3 / 3.0, "prompt": 400.0}, {"decode": 1e3 / 9.0, "prompt": 100.0}]
    found = point([{"ours": [ROW | SPEEDS], "theirs": theirs}], 0, layers)
    assert found["decode"]["llama_cpp"] == [pytest.approx(1e3 / (1 + 4 * 2 + 4 * 0.5), abs=0.01)]
    assert found["prompt"]["llama_cpp"] == [
        pytest.approx(1 / (2 * (0.5 / 400 + 0.5 / 100)), abs=0.01)
    ]
