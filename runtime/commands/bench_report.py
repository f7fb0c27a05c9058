"""How `hotexpert bench` prints results: llama-bench's columns and keys, to stand side by side."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from runtime.commands.bench_matrix import Setup, Test

Row = dict[str, object]

# llama-bench's keys that have one value here: there is no such choice, or it was made for good.
FIXED: Row = {
    "build_number": 0,
    "cpu_mask": "0x0",
    "cpu_strict": False,
    "poll": 50,
    "n_gpu_layers": 0,
    "n_cpu_moe": 0,
    "split_mode": "none",
    "main_gpu": 0,
    "no_kv_offload": False,
    "flash_attn": 1,
    "devices": "none",
    "tensor_split": "0.00",
    "tensor_buft_overrides": "none",
    "load_mode": "mmap",
    "lazy_mode": "none",
    "embeddings": False,
    "no_op_offload": 0,
    "no_host": False,
    "repack": False,
    "fit_target": 0,
    "fit_min_ctx": 0,
}
KEYS = (
    "build_commit", "build_number", "cpu_info", "gpu_info", "backends", "model_filename",
    "model_type", "model_size", "model_n_params", "n_batch", "n_ubatch", "n_threads", "cpu_mask",
    "cpu_strict", "poll", "type_k", "type_v", "n_gpu_layers", "n_cpu_moe", "split_mode",
    "main_gpu", "no_kv_offload", "flash_attn", "devices", "tensor_split", "tensor_buft_overrides",
    "load_mode", "lazy_mode", "embeddings", "no_op_offload", "no_host", "repack", "fit_target",
    "fit_min_ctx", "n_prompt", "n_gen", "n_depth", "test_time", "avg_ns", "stddev_ns", "avg_ts",
    "stddev_ts",
)  # fmt: skip
COLUMNS = {
    "model": -30,
    "size": 10,
    "params": 10,
    "backend": -10,
    "threads": 7,
    "n_batch": 7,
    "type_k": 6,
    "type_v": 6,
    "test": 15,
    "t/s": 20,
}  # name -> width; negative: aligned left


@dataclass(frozen=True)
class Result:
    """One test's times.  facts: the keys that do not depend on the test."""

    setup: Setup
    test: Test
    facts: Row
    samples_ns: list[int] = field(default_factory=list)
    test_time: str = ""

    @property
    def samples_ts(self) -> list[float]:
        """Tokens per second of each repetition."""
        return [1e9 * self.test.n_tokens / ns for ns in self.samples_ns]

    def row(self) -> Row:
        """llama-bench's keys in its order."""
        values: Row = {
            **FIXED,
            **self.facts,
            "n_batch": self.setup.n_batch,
            "n_ubatch": self.setup.n_batch,
            "type_k": self.setup.cache_type_k,
            "type_v": self.setup.cache_type_v,
            "n_prompt": self.test.n_prompt,
            "n_gen": self.test.n_gen,
            "n_depth": self.test.n_depth,
            "test_time": self.test_time,
            "avg_ns": round(statistics.fmean(self.samples_ns)),
            "stddev_ns": round(deviation(self.samples_ns)),
            "avg_ts": round(statistics.fmean(self.samples_ts), 6),
            "stddev_ts": round(deviation(self.samples_ts), 6),
        }
        return {key: values[key] for key in KEYS}


def deviation(samples: Sequence[float]) -> float:
    return statistics.stdev(samples) if len(samples) > 1 else 0.0


class Report:
    """Prints results as they come: begin(), add() for each, end()."""

    def __init__(self, kind: str, write: Callable[[str], object], columns: Sequence[str]) -> None:
        """kind: md, csv, json or jsonl; columns: of the table."""
        self._kind = kind
        self._write = write
        self._columns = columns
        self._n_results = 0

    def begin(self) -> None:
        if self._kind == "md":
            self._write(line(pad(name, COLUMNS[name]) for name in self._columns))
            self._write(line(rule(COLUMNS[name]) for name in self._columns))
        elif self._kind == "csv":
            self._write(csv_line(KEYS))
        elif self._kind == "json":
            self._write("[\n")

    def add(self, result: Result) -> None:
        samples = {"samples_ns": result.samples_ns, "samples_ts": result.samples_ts}
        if self._kind == "md":
            cells = table_cells(result)
            self._write(line(pad(cells[name], COLUMNS[name]) for name in self._columns))
        elif self._kind == "csv":
            self._write(csv_line(result.row().values()))
        elif self._kind == "jsonl":
            self._write(json.dumps({**result.row(), **samples}) + "\n")
        else:
            text = json.dumps({**result.row(), **samples}, indent=2)
            comma = ",\n" if self._n_results else ""
            self._write(comma + "\n".join("  " + part for part in text.splitlines()))
        self._n_results += 1

    def end(self) -> None:
        if self._kind == "json":
            self._write("\n]\n")


def table_cells(result: Result) -> dict[str, str]:
    row = result.row()
    speed, spread = statistics.fmean(result.samples_ts), deviation(result.samples_ts)
    return {
        "model": str(row["model_type"]),
        "size": size_text(int(str(row["model_size"]))),
        "params": count_text(int(str(row["model_n_params"]))),
        "backend": str(row["backends"]),
        "threads": str(row["n_threads"]),
        "n_batch": str(row["n_batch"]),
        "type_k": str(row["type_k"]),
        "type_v": str(row["type_v"]),
        "test": result.test.name,
        "t/s": f"{speed:.2f} ± {spread:.2f}",
    }


def size_text(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.2f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.2f} MiB"


def count_text(n: int) -> str:
    return f"{n / 1e9:.2f} B" if n >= 1e9 else f"{n / 1e6:.2f} M"


def line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |\n"


def pad(text: str, width: int) -> str:
    return text.ljust(-width) if width < 0 else text.rjust(width)


def rule(width: int) -> str:
    dashes = "-" * (abs(width) - 1)
    return dashes + ("-" if width < 0 else ":")


def csv_line(values: Iterable[object]) -> str:
    text = io.StringIO()
    cells = [int(value) if isinstance(value, bool) else value for value in values]
    csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n").writerow(cells)
    return text.getvalue()
