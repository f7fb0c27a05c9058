"""`python -m bench NAME ...`: run one benchmark; without a name, list them."""

from __future__ import annotations

import importlib
import sys

BENCHMARKS = {
    "agree": "logits of CPU and GPU compared, whatever is cached",
    "batches": "time per token of decode steps by their number of sequences, 1 to 512",
    "cache_calls": "what the cache of experts costs Python between and beside steps",
    "exchange": "what handing missed experts to the CPU costs a layer",
    "first_request": "the first request after a restart, with a profile and without",
    "gpus": "one GPU beside all of the machine: speed, hits of each, the same bits",
    "hybrid": "models larger than the GPU: speed, hits, the share of what is possible",
    "kernels": "GB/s of every matrix kernel beside this machine's plain read speed",
    "kernels_gpu": "us and GB/s of every GPU kernel that reads weights, by format",
    "moe": "engines side by side: a 1500-token reply, a 12,000-token prompt",
    "profiling": "what GGML_SCHED_PROF costs, and what it says",
    "prompts": "prompts with experts on the GPU, and with them crossing the link",
    "regress": "speed and text of the working tree beside the last tag",
    "routing": "policies of the expert cache on recorded routing: hits, bytes, predicted ms",
    "server_start": "seconds from a server's process start until it is ready, and has answered",
    "soak": "mixed requests for minutes: wrong tokens, growth of memory",
    "step": "where a step's time goes on the GPU, by kernel, beside bare reads",
    "streamed": "prompts of models larger than the GPU, as their plan has it, beside the link",
    "streams": "prompt and decode speed through the engine, of one and several streams",
    "synthetic": "write a GGUF file of a real model's shape with random weights",
    "versus": "prompt and decode speed beside llama.cpp's llama-bench, interleaved",
    "versus_gpu": "models on a GPU beside llama.cpp, as many of the experts in its memory",
}


def main() -> int:
    """Run the benchmark named first on the command line with the arguments that follow."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in BENCHMARKS:
        for known, what in BENCHMARKS.items():
            print(f"python -m bench {known:13} {what}")
        return 0 if not name else 2
    return int(importlib.import_module(f"bench.{name}").main(sys.argv[2:]))


if __name__ == "__main__":
    sys.exit(main())
