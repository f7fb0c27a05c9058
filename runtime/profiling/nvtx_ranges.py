"""NvtxRanges: a range for each step on NVIDIA's timelines, where the package nvtx is there."""

from __future__ import annotations

from typing import Any

from runtime.errors import ConfigError
from runtime.profiling.instrument import Instrument
from runtime.profiling.record import StepRecord, StepSort


class NvtxRanges(Instrument):
    """Ranges begin at a step's launch, and end when the host knows its end: they may overlap."""

    def __init__(self) -> None:
        """Raises: ConfigError without the package."""
        try:
            import nvtx
        except ImportError as error:
            raise ConfigError("NVTX ranges need the package nvtx: pip install nvtx") from error
        self._nvtx: Any = nvtx
        self._open: dict[int, Any] = {}

    def step_begins(self, number: int, sort: StepSort, n_tokens: int) -> None:
        message = f"{sort.value} of {n_tokens}"
        self._open[number] = self._nvtx.start_range(message=message, domain="hotexpert")

    def step_ended(self, record: StepRecord) -> None:
        self._end(self._open.pop(record.number, None))

    def close(self) -> None:
        for handle in self._open.values():
            self._end(handle)
        self._open.clear()

    def _end(self, handle: Any) -> None:
        if handle is not None:
            self._nvtx.end_range(handle)
