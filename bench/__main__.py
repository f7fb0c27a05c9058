"""`python -m bench NAME ...`: run one benchmark; without a name, list them."""

from __future__ import annotations

import importlib
import sys

BENCHMARKS = {
    "kernels": "GB/s of every matrix kernel beside this machine's plain read speed",
    "routing": "policies of the expert cache on recorded routing: hits, bytes, predicted ms",
    "streams": "prompt and decode speed through the engine, of one and several streams",
    "synthetic": "write a GGUF file of a real model's shape with random weights",
    "versus": "prompt and decode speed beside llama.cpp's llama-bench, interleaved",
}


def main() -> int:
    """Run the benchmark named first on the command line with the arguments that follow."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in BENCHMARKS:
        for known, what in BENCHMARKS.items():
            print(f"python -m bench {known:10} {what}")
        return 0 if not name else 2
    return int(importlib.import_module(f"bench.{name}").main(sys.argv[2:]))


if __name__ == "__main__":
    sys.exit(main())
