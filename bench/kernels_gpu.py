"""GPU kernels that read weights: microseconds and GB/s by format at real shapes, beside bare reads.

    python -m bench kernels_gpu --formats Q4_K,Q6_K --out bench/results/kernels_gpu.json

A kernel's launches follow each other in a graph as in a step, each with other weights, out of a
pool that no cache holds; a bare read of as many bytes, in the same run, is what it is compared
with. Every run of the graph is in the file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median

from bench.kernel_bed import Bed, Work
from bench.kernel_work import dense_gemm, experts, single_linear
from bench.machine import machine
from bench.read_rates import GPUReads
from ops.gpu.row_launch import BLOCK_FORMATS, GPU_FORMATS, is_float
from ops.quants import FORMATS, BlockFormat
from runtime.cuda.device import Device
from runtime.cuda.driver import open_driver

EXPERTS = ((2048, 768), (4096, 1536))
"""(values a row of gate and up, their rows): Qwen3-30B-A3B, Qwen3-235B-A22B."""

MATRICES = ((2048, 5120), (4096, 2048), (2048, 151936))
"""(values a row, rows): joined qkv and the attention output of Qwen3-30B-A3B, its output matrix."""

ROUTER = (2048, 128)
"""The same of a router, of numbers."""

EXPERT_TOKENS = (1, 8)
GEMM_SLOTS = (8, 512)
KERNELS = ("experts", "linear", "gemm")


@dataclass(frozen=True)
class Row:
    """A kernel's figures.

    us        of one launch, or pair: the median of `runs`, each run's mean over its launches
    n_bytes   weights that it multiplies; read_us: of a bare read of as many
    """

    kernel: str
    format: str
    shape: str
    vectors: int
    n_bytes: int
    us: float
    gb_per_s: float
    read_us: float
    share_of_read: float
    runs: list[float]

    def __str__(self) -> str:
        return (
            f"{self.kernel:11} {self.format:8} {self.shape:12} {self.vectors:4} vectors "
            f"{self.us:8.2f} us {self.gb_per_s:6.0f} GB/s {100 * self.share_of_read:4.0f} %"
        )


def main(argv: list[str]) -> int:
    """Measure what the arguments ask for and print one line a kernel, format and shape."""
    parser = argparse.ArgumentParser(prog="python -m bench kernels_gpu", description=__doc__)
    parser.add_argument("--formats", default=",".join(GPU_FORMATS), help="names, comma-separated")
    parser.add_argument("--kernels", default=",".join(KERNELS), help="of " + ",".join(KERNELS))
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    options = parser.parse_args(argv)
    formats = [FORMATS[name] for name in options.formats.split(",")]
    with ExitStack() as resources:
        device = resources.enter_context(Device(open_driver()))
        reads = resources.enter_context(GPUReads(device))
        kernels = options.kernels.split(",")
        rows = list(measure(device, reads, formats, kernels, options.repeats))
        gpu = device.info.name
        driver = device.driver.version
    if options.out:
        settings = {key: str(value) for key, value in vars(options).items()}
        report = {
            "machine": {**machine(), "gpu": gpu, "driver": driver},
            "settings": settings,
            "rows": [asdict(row) for row in rows],
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def measure(
    device: Device,
    reads: GPUReads,
    formats: Sequence[BlockFormat],
    kernels: Sequence[str],
    repeats: int,
) -> Iterator[Row]:
    """Rows of every format, printed as they come."""
    for fmt in formats:
        for kernel in kernels:
            for make in _works(kernel, fmt):
                with Bed(device, repeats) as bed:
                    row = _row(kernel, fmt, make(bed), bed, reads)
                print(row, flush=True)
                yield row


def _works(kernel: str, fmt: BlockFormat) -> Iterator[Callable[[Bed], Work]]:
    """What makes the kernel's work, for each shape that the format can have."""
    shapes = [ROUTER] if is_float(fmt) else MATRICES
    if kernel == "experts" and fmt.name in BLOCK_FORMATS:
        for n, n_ff in EXPERTS:
            for n_tokens in EXPERT_TOKENS:
                yield partial(experts, fmt=fmt, n=n, n_ff=n_ff, n_tokens=n_tokens)
    elif kernel == "linear":
        for n, n_rows in shapes:
            yield partial(single_linear, fmt=fmt, n=n, n_rows=n_rows)
    elif kernel == "gemm" and fmt.name in BLOCK_FORMATS:
        for n, n_rows in MATRICES[:2]:
            for n_slots in GEMM_SLOTS:
                yield partial(dense_gemm, fmt=fmt, n=n, n_rows=n_rows, n_slots=n_slots)


def _row(kernel: str, fmt: BlockFormat, work: Work, bed: Bed, reads: GPUReads) -> Row:
    runs = bed.microseconds(work)
    us, read_us = median(runs), reads.microseconds(work.n_bytes)
    return Row(
        kernel,
        fmt.name,
        work.shape,
        work.n_vectors,
        work.n_bytes,
        round(us, 3),
        round(work.n_bytes / us / 1e3, 1),
        round(read_us, 3),
        round(read_us / us, 3),
        [round(run, 3) for run in runs],
    )
