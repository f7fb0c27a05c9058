"""What the variable GGML_SCHED_PROF asks for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from runtime.config import environment
from runtime.errors import ConfigError
from runtime.experts.totals import ExpertTotals
from runtime.profiling.instrument import Instrument
from runtime.profiling.summary import SchedProf
from runtime.profiling.trace_file import TraceFile

logger = logging.getLogger(__name__)

VARIABLE = "GGML_SCHED_PROF"
OFF, LINES, NVTX = "0", ("1", "2"), "nvtx"
SUFFIX = ".json"


def instruments_from_environment(totals: Callable[[], ExpertTotals | None]) -> list[Instrument]:
    """1 (or 2): lines in the log; FILE.json: a trace; nvtx: ranges; several with commas between.

    totals: reads what became of the experts.

    Raises: ConfigError for anything else, a file that cannot be written, or NVTX without nvtx.
    """
    made: list[Instrument] = []
    for word in (environment(VARIABLE) or OFF).split(","):
        if word in LINES:
            # A warning, so that it is seen whatever the log is set to: it was asked for.
            made.append(SchedProf(logger.warning, totals))
        elif word == NVTX:
            from runtime.profiling.nvtx_ranges import NvtxRanges

            made.append(NvtxRanges())
        elif word.endswith(SUFFIX):
            made.append(TraceFile(Path(word)))
        elif word != OFF:
            raise ConfigError(f"{VARIABLE} = {word}: use 1, a file that ends in {SUFFIX}, or nvtx")
    return made
