"""GB/s of every matrix kernel beside this machine's plain read speed.

The weights are a buffer larger than the caches (or, with a small --megabytes, inside them) that is
walked in pieces; kernels of all formats and instruction sets take turns with a plain read of the
same pieces, so that one noisy minute hits all of them.  One thread.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.machine import machine
from ops.arithmetic import quantize_rows
from ops.cpu.formats import KERNEL_FORMATS
from ops.cpu.isa import runnable_isas
from ops.cpu.matmul import SCRATCH_BYTES, matmul_address
from ops.quants import FORMATS, BlockFormat

C_MATMUL = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 9)
PIECE_BYTES = 1 << 20
PLAIN_EXPONENT = 120
"""An E8M0 scale of 2^-7: products of extreme ones are subnormal, which is slow and never met."""
Bytes = NDArray[np.uint8]


def main(argv: list[str]) -> int:
    """Measure what the arguments ask for and print one line a kernel."""
    parser = argparse.ArgumentParser(prog="python -m bench kernels", description=__doc__)
    parser.add_argument(
        "--formats", default=",".join(KERNEL_FORMATS), help="names, comma-separated"
    )
    parser.add_argument("--isas", default=runnable_isas()[0], help="avx512,avxvnni,avx2,portable")
    parser.add_argument("--tokens", default="1,4,32", help="batch sizes, comma-separated")
    parser.add_argument("--columns", type=int, default=4096, help="weights in a row")
    parser.add_argument("--megabytes", type=int, default=256, help="size of the matrix")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    options = parser.parse_args(argv)
    rows = []
    for name in options.formats.split(","):
        matrix = random_matrix(FORMATS[name], options.columns, options.megabytes << 20)
        kernels: dict[tuple[str, int], Callable[[int], object]] = {
            (isa, n_tokens): kernel(FORMATS[name], isa, matrix, options.columns, n_tokens)
            for isa in options.isas.split(",")
            for n_tokens in map(int, options.tokens.split(","))
        }
        for (isa, n_tokens), speed in measure(matrix, kernels, options.rounds).items():
            row = {"format": name, "isa": isa, "tokens": n_tokens, "gb_per_s": round(speed, 2)}
            rows.append(row)
            print(f"{name:8} {isa:8} {n_tokens:4} tokens {speed:8.2f} GB/s", flush=True)
    if options.out:
        settings = {key: str(value) for key, value in vars(options).items()}
        report = {"machine": machine(), "settings": settings, "rows": rows}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def random_matrix(fmt: BlockFormat, n_columns: int, n_bytes: int) -> Bytes:
    """u8[n_rows, row_bytes]: random blocks with plain scales, about `n_bytes` of them."""
    row_bytes = fmt.row_bytes(n_columns)
    n_rows = max(16, n_bytes // row_bytes)
    rng = np.random.default_rng(0)
    if fmt.activation == "f32":
        sample = rng.normal(size=(16, n_columns)).astype(np.float32)
        if fmt.name == "BF16":
            few = np.ascontiguousarray(sample.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
        else:
            few = sample.astype(fmt.layout).view(np.uint8)
    else:
        few = rng.integers(0, 256, (16, row_bytes), np.uint8)
        fields = few.reshape(-1, fmt.block_bytes).view(fmt.layout)[:, 0]
        for name in fmt.layout.names or ():
            if fmt.layout[name] == np.dtype("<f2"):
                fields[name] = np.float16(0.01)
            elif name == "e":
                fields[name] = PLAIN_EXPONENT
    return np.resize(few, (n_rows, row_bytes))


def kernel(
    fmt: BlockFormat, isa: str, matrix: Bytes, n_columns: int, n_tokens: int
) -> Callable[[int], object]:
    """A function that multiplies one piece of the matrix with `n_tokens` vectors."""
    call = C_MATMUL(matmul_address(fmt.name, isa))
    x = np.random.default_rng(1).normal(size=(n_tokens, n_columns)).astype(np.float32)
    records = [aligned(record) for record in quantize_rows(fmt.activation, x)]
    y = np.zeros((n_tokens, len(matrix)), np.float32)
    scratch = aligned(np.zeros(SCRATCH_BYTES, np.uint8))
    x_ptrs = np.array([record.ctypes.data for record in records], np.int64)
    y_ptrs = y.ctypes.data + y.strides[0] * np.arange(n_tokens, dtype=np.int64)
    row_bytes = matrix.shape[1]
    n_rows = piece_rows(matrix)

    def multiply(piece: int) -> object:
        begin = piece * n_rows
        call(
            matrix.ctypes.data,
            row_bytes,
            begin,
            begin + n_rows,
            n_columns,
            x_ptrs.ctypes.data,
            y_ptrs.ctypes.data,
            n_tokens,
            scratch.ctypes.data,
        )
        return records, y

    return multiply


def measure(
    matrix: Bytes, kernels: dict[tuple[str, int], Callable[[int], object]], rounds: int
) -> dict[tuple[str, int], float]:
    """GB/s of weights for each kernel and the plain read: the fastest quarter's edge."""
    n_rows = piece_rows(matrix)
    n_pieces = len(matrix) // n_rows

    def read(piece: int) -> object:
        return matrix[piece * n_rows : (piece + 1) * n_rows].max()

    contestants = {("read", 0): read, **kernels}
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in contestants}
    piece = 0
    for function in contestants.values():
        function(0)
    for _ in range(rounds):
        for key, function in contestants.items():
            for _ in range(4):
                piece = (piece + 1) % n_pieces
                start = time.perf_counter()
                function(piece)
                seconds[key].append(time.perf_counter() - start)
    n_bytes = n_rows * matrix.shape[1]
    return {key: n_bytes / float(np.quantile(s, 0.25)) / 1e9 for key, s in seconds.items()}


def piece_rows(matrix: Bytes) -> int:
    """Rows of one piece of the matrix."""
    return min(len(matrix), max(16, PIECE_BYTES // matrix.shape[1]))


def aligned(values: Bytes) -> Bytes:
    """A copy that starts on a cache line."""
    buffer = np.empty(values.size + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    copy = buffer[start : start + values.size]
    copy[:] = values
    return copy


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
