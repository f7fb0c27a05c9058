"""The log's forms."""

from __future__ import annotations

import json
import logging
import sys

from server.logs import JsonLines, PlainLines


def record(message: str, *, level: int = logging.INFO) -> logging.LogRecord:
    return logging.LogRecord("server.x", level, "", 0, "%s", (message,), None)


def test_a_message_stays_on_its_line() -> None:
    plain = PlainLines(prefix=False, timestamps=False)
    assert plain.format(record("a\nready: b\x1b[31m")) == "a\\nready: b\\x1b[31m"
    line = JsonLines().format(record("a\nb"))
    assert "\n" not in line
    assert json.loads(line)["message"] == "a\nb"


def test_warnings_are_marked_and_tracebacks_kept() -> None:
    plain = PlainLines(prefix=False, timestamps=True)
    line = plain.format(record("careful", level=logging.WARNING))
    assert line.endswith("warning: server.x: careful")
    assert line[2] == line[5] == ":"
    failed = record("failed")
    try:
        raise ValueError("the cause")
    except ValueError:
        failed.exc_info = sys.exc_info()
    assert "ValueError: the cause" in plain.format(failed)
    assert "the cause" in json.loads(JsonLines().format(failed))["exception"]
