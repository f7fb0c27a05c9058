"""`python -m runtime.trace FILE` shows what a trace of GGML_SCHED_PROF=FILE.json says."""

from __future__ import annotations

import sys

from runtime.commands import main

if __name__ == "__main__":
    sys.exit(main(["trace", *sys.argv[1:]]))
