"""Summaries and trace files: the same figures, whichever way they come."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from runtime.commands import main
from runtime.errors import ConfigError
from runtime.experts.totals import ExpertTotals, LinkTotals
from runtime.profiling.environment import VARIABLE, instruments_from_environment
from runtime.profiling.record import Part, Span, StepRecord, StepSort, StepTimes
from runtime.profiling.summary import Accounts, SchedProf
from runtime.profiling.trace_file import TraceFile, records_in, track_seconds


def record(number: int, ms: float = 4.0, *, timed: bool = True, fresh: bool = False) -> StepRecord:
    """A decode step of two sequences that began at `number` seconds from the far future on."""
    began = 1e7 + number
    span = Span("GPU 0", Part.DENSE, began + 1e-3, ms / 4e3)
    parts = {Part.DENSE: ms / 4e3, Part.MISSES: ms / 2e3, Part.HOST: ms / 4e3}
    return StepRecord(
        number=number,
        sort=StepSort.DECODE,
        n_tokens=2,
        n_outputs=2,
        began=began,
        ended=began + ms / 1e3,
        parts=parts if timed else {},
        launches=(StepTimes(began, spans=lambda: [span]),) if timed else (),
        fresh=fresh,
    )


def prompt(number: int) -> StepRecord:
    began = 1e7 + number
    parts = {Part.DENSE: 0.5, Part.UPLOADS: 0.5}
    return StepRecord(number, StepSort.PROMPT, 500, 1, began, began + 1, parts)


STEPS = [
    prompt(0),
    record(1, 3.0, timed=False),
    record(2, 100.0, fresh=True),
    record(3, 4.0),
    record(4, 6.0),
]


def printed_parts(line: str) -> tuple[float, float]:
    """The timed milliseconds that a line names, and the sum of the parts behind them."""
    whole, parts = re.search(r"timed, ([\d.]+) ms: (.*)", line).groups()  # type: ignore[union-attr]
    return float(whole), sum(float(n) for n in re.findall(r" (-?[\d.]+)(?:,|$)", parts))


def test_the_printed_parts_are_the_printed_time() -> None:
    prompts, decoded = Accounts.of(STEPS).lines()
    assert "500 prompt tokens in 1 steps, 2000.0 ms a 1000 prompt tokens" in prompts
    assert "8 decode tokens in 4 steps, 28.250 ms a step; 2 timed, 5.000 ms" in decoded
    assert "dense 1.250, misses 2.500, host 1.250" in decoded
    for line in (prompts, decoded):
        whole, total = printed_parts(line)
        assert total == pytest.approx(whole, rel=0.03)


def test_lines_come_every_so_many_decode_steps_and_at_the_end() -> None:
    lines: list[str] = []
    instrument = SchedProf(lines.append, every=2)
    for step in STEPS:
        instrument.step_ended(step)
    assert len(lines) == 3 and all(line.startswith("sched-prof: ") for line in lines)
    instrument.step_ended(record(5))
    instrument.close()
    assert "2 decode tokens in 1 steps" in lines[-1]
    instrument.close()
    assert len(lines) == 4


def test_lines_tell_what_became_of_the_experts_since_the_last_one() -> None:
    readings = [
        ExpertTotals(hits=1000, links=(LinkTotals("cuda:0", 10**9),)),
        ExpertTotals(
            hits=1150,
            cpu=40,
            in_place=10,
            swaps=3,
            cpu_bytes=80_000_000,
            cpu_seconds=0.004,
            wait_seconds=0.002,
            links=(LinkTotals("cuda:0", 10**9 + 6_000_000, 20_000_000),),
        ),
    ]
    lines: list[str] = []
    instrument = SchedProf(lines.append, lambda: readings.pop(0), every=2)
    instrument.step_ended(record(0))
    instrument.step_ended(record(1))
    assert lines[1] == (
        "sched-prof: experts: 75.0 % hits; misses a step 25.0 (CPU 20.0, in place 5.0, fetched "
        "0.0); MB a step: CPU 40.0, link 10.0; 3 swaps, 6.0 MB; CPU team a step: busy 2.000 ms, "
        "waiting 1.000 ms"
    )


def test_a_trace_gives_the_same_summary(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path / "run.json")
    for step in STEPS:
        trace.step_ended(step)
    trace.close()
    read = Accounts.of(records_in(tmp_path / "run.json"))
    assert read.lines() == Accounts.of(STEPS).lines()
    tracks = track_seconds(tmp_path / "run.json")
    assert tracks["GPU 0"] == {"dense": pytest.approx(0.0275)}
    assert set(tracks) == {"steps", "GPU 0"}


def test_a_trace_is_chromes(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path / "run.json")
    trace.step_ended(STEPS[3])
    trace.close()
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert sorted(names.values()) == ["GPU 0", "steps"]
    step, span = (e for e in events if e["ph"] == "X")
    assert (names[step["tid"]], step["name"]) == ("steps", "decode")
    assert (names[span["tid"]], span["name"]) == ("GPU 0", "dense")
    assert (step["dur"], span["dur"]) == (pytest.approx(4e3), pytest.approx(1e3))
    assert span["ts"] == pytest.approx(step["ts"] + 1e3)


def test_the_command_shows_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = TraceFile(tmp_path / "run.json")
    for step in STEPS:
        trace.step_ended(step)
    trace.close()
    assert main(["trace", str(tmp_path / "run.json")]) == 0
    shown = capsys.readouterr().out
    assert "8 decode tokens in 4 steps" in shown
    assert re.search(r"misses +2\.500 ms +50\.0 %", shown)
    assert "GPU 0: dense 27.500 ms" in shown


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("no json", "is not a trace"),
        ("[]", "has no traceEvents"),
        ('{"traceEvents": [{"ph": "X", "args": {"parts": {}}}]}', "is not whole"),
        (
            '{"traceEvents": [{"ph": "X", "name": "decode", "ts": 1, "dur": 1, "args": {"parts": '
            '{"coffee": 1}, "number": 1, "tokens": 1, "outputs": 1, "fresh": false}}]}',
            "is not whole",
        ),
    ],
)
def test_a_file_that_is_no_trace_is_one_line(
    content: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.json").write_text(content)
    assert main(["trace", str(tmp_path / "x.json")]) == 1
    assert said in capsys.readouterr().err
    assert main(["trace", str(tmp_path / "missing.json")]) == 1


@pytest.mark.parametrize(("value", "n"), [("", 0), ("0", 0), ("1", 1), ("2", 1)])
def test_the_variable(value: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, value)
    assert len(instruments_from_environment(lambda: None)) == n


def test_the_variable_may_ask_for_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, f"1,{tmp_path / 'run.json'}")
    made = instruments_from_environment(lambda: None)
    assert [type(instrument) for instrument in made] == [SchedProf, TraceFile]


@pytest.mark.parametrize("value", ["yes", "3", "/nowhere/at/all/run.json"])
def test_a_wrong_value_is_an_error_that_names_it(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(ConfigError, match=re.escape(value)):
        instruments_from_environment(lambda: None)
