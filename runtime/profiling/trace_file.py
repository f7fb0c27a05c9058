"""TraceFile: steps as Chrome's trace events, for Perfetto, chrome://tracing and `runtime.trace`.

A track for each stream of a GPU, the CPU team, the links and the event loop, and one for the steps
themselves, whose arguments hold their parts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runtime.errors import ConfigError
from runtime.profiling.instrument import Instrument
from runtime.profiling.record import Part, StepRecord, StepSort

MOST_STEPS = 100_000
"""Those after them are counted, not kept: a minute or more, with a few hundred events of each step
that is timed."""

STEPS = "steps"
Event = dict[str, Any]


class TraceFile(Instrument):
    """Keeps the steps, and writes their events when it is closed."""

    def __init__(self, path: Path) -> None:
        """Raises: ConfigError where the file cannot be written."""
        self._path = path
        try:
            with path.open("w", encoding="utf-8"):
                pass
        except OSError as error:
            raise ConfigError(f"GGML_SCHED_PROF = {path}: {error.strerror}") from error
        self._records: list[StepRecord] = []
        self._events: list[Event] = []
        self._tracks: dict[str, int] = {}
        self._n_left_out = 0
        self._since = time.perf_counter()

    def step_ended(self, record: StepRecord) -> None:
        if len(self._records) < MOST_STEPS:
            self._records.append(record)
        else:
            self._n_left_out += 1

    def close(self) -> None:
        """Raises: OSError."""
        for record in self._records:
            self._add_step(record)
        names = [
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": track}}
            for track, tid in self._tracks.items()
        ]
        whole = {
            "displayTimeUnit": "ms",
            "otherData": {"program": "hotexpert", "steps_left_out": self._n_left_out},
            "traceEvents": names + self._events,
        }
        self._path.write_text(json.dumps(whole), encoding="utf-8")

    def _add_step(self, record: StepRecord) -> None:
        arguments: Event = {
            "number": record.number,
            "tokens": record.n_tokens,
            "outputs": record.n_outputs,
            "fresh": record.fresh,
            "parts": {part.value: 1e6 * seconds for part, seconds in record.parts.items()},
        }
        self._add(STEPS, record.sort.value, record.began, record.seconds, arguments)
        for span in record.spans:
            if span.began < self._since:  # copies that ended before anybody looked
                continue
            self._add(span.track, span.name, span.began, span.seconds)

    def _add(
        self, track: str, name: str, began: float, seconds: float, arguments: Event | None = None
    ) -> None:
        tid = self._tracks.setdefault(track, len(self._tracks) + 1)
        event = {"ph": "X", "name": name, "pid": 1, "tid": tid, "ts": 1e6 * began}
        event["dur"] = 1e6 * seconds
        if arguments is not None:
            event["args"] = arguments
        self._events.append(event)


def records_in(path: Path) -> Iterator[StepRecord]:
    """The steps of a trace, without their spans.  Raises: ConfigError for any other file."""
    for event, arguments in _steps(path):
        try:
            began = event["ts"] / 1e6
            yield StepRecord(
                number=arguments["number"],
                sort=StepSort(event["name"]),
                n_tokens=arguments["tokens"],
                n_outputs=arguments["outputs"],
                began=began,
                ended=began + event["dur"] / 1e6,
                parts={Part(name): us / 1e6 for name, us in arguments["parts"].items()},
                fresh=arguments["fresh"],
            )
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}: a step of the trace is not whole: {error!r}") from error


def track_seconds(path: Path) -> dict[str, dict[str, float]]:
    """Seconds of each name on each track.  Raises: ConfigError."""
    events = _events(path)
    tracks = {
        event.get("tid"): str(event["args"]["name"])
        for event in events
        if event.get("ph") == "M" and event.get("name") == "thread_name"
    }
    totals: dict[str, dict[str, float]] = {}
    for event in events:
        if event.get("ph") == "X":
            names = totals.setdefault(tracks.get(event.get("tid"), "?"), {})
            name = str(event.get("name"))
            names[name] = names.get(name, 0.0) + float(event.get("dur", 0)) / 1e6
    return totals


def _steps(path: Path) -> Iterator[tuple[Event, Event]]:
    for event in _events(path):
        arguments = event.get("args")
        if event.get("ph") == "X" and isinstance(arguments, dict) and "parts" in arguments:
            yield event, arguments


def _events(path: Path) -> list[Event]:
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not a trace: {error}") from error
    events = whole.get("traceEvents") if isinstance(whole, dict) else None
    if not isinstance(events, list):
        raise ConfigError(f"{path} is not a trace: it has no traceEvents")
    return [event for event in events if isinstance(event, dict)]
