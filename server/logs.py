"""The server's log: levels and forms of llama-server's flags on Python's logging."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from runtime.errors import ConfigError
from server.flags import Given

# -lv N: 0 and 1 errors, 2 warnings, 3 decisions, above that everything
LEVELS = (logging.ERROR, logging.ERROR, logging.WARNING, logging.INFO)
PACKAGES = ("runtime", "server", "ops", "profiles")


class JsonLines(logging.Formatter):
    """One JSON object a line; newlines in messages cannot forge further lines."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


class PlainLines(logging.Formatter):
    """A line each: control characters in messages are escaped, tracebacks stay readable."""

    def __init__(self, *, prefix: bool, timestamps: bool) -> None:
        super().__init__()
        self._prefix = prefix
        self._timestamps = timestamps

    def format(self, record: logging.LogRecord) -> str:
        parts = []
        if self._timestamps:
            clock = time.strftime("%H:%M:%S", time.localtime(record.created))
            parts.append(f"{clock}.{int(record.msecs):03d}")
        if self._prefix or record.levelno >= logging.WARNING:
            parts.append(f"{record.levelname.lower()}: {record.name}:")
        parts.append("".join(c if c.isprintable() else repr(c)[1:-1] for c in record.getMessage()))
        if record.exc_info:
            parts.append("\n" + self.formatException(record.exc_info))
        return " ".join(parts)


def set_up(given: Mapping[str, Given]) -> None:
    """Attach handlers to our packages' loggers.  Raises: ConfigError for an unusable --log-file."""
    verbosity = _value(given, "verbosity", 3)
    verbose = bool(_value(given, "verbose", False)) or (
        isinstance(verbosity, int) and verbosity > 3
    )
    level = logging.DEBUG if verbose else LEVELS[max(int(str(verbosity)), 0)]
    handlers: list[logging.Handler] = []
    if not _value(given, "log_disable", False):
        handlers.append(logging.StreamHandler(sys.stderr))
    if "log_file" in given:
        path = Path(str(given["log_file"].value))
        try:
            handlers.append(logging.FileHandler(path, encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{given['log_file'].source} {path}: {error.strerror}") from error
    formatter: logging.Formatter = PlainLines(
        prefix=bool(_value(given, "log_prefix", False)),
        timestamps=bool(_value(given, "log_timestamps", False)),
    )
    if _value(given, "log_jsonl", False):
        formatter = JsonLines()
    for handler in handlers or [logging.NullHandler()]:
        handler.setFormatter(formatter)
        for name in PACKAGES:
            logging.getLogger(name).addHandler(handler)
    for name in PACKAGES:
        logging.getLogger(name).setLevel(level)
        logging.getLogger(name).propagate = False


def _value(given: Mapping[str, Given], key: str, default: object) -> object:
    return given[key].value if key in given else default
