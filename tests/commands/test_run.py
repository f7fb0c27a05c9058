"""hotexpert run: completion, chat and its commands, Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runtime.commands import main
from runtime.commands.options import logit_bias
from runtime.commands.terminal import LineReader, stoppable

FAKE = ["run", "--device", "fake", "--temp", "0"]


@contextmanager
def typed(text: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Standard input holds `text`."""
    read, write = os.pipe()
    os.write(write, text.encode())
    os.close(write)
    monkeypatch.setattr("runtime.commands.run.LineReader", lambda: LineReader(read))
    yield
    os.close(read)


def completion(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*FAKE, "--raw", *words]) == 0
    return capsys.readouterr().out


def test_completion(capsys: pytest.CaptureFixture[str]) -> None:
    shown = completion(capsys, "-p", "Hello", "-n", "12")
    assert shown.startswith("Hello") and len(shown) == len("Hello") + 12 + 1
    new = completion(capsys, "-p", "Hello", "-n", "12", "--no-display-prompt")
    assert shown == "Hello" + new


def test_a_stop_string_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    whole = completion(capsys, "-p", "Hello", "-n", "12", "--no-display-prompt")
    stop = whole[4]
    short = completion(capsys, "-p", "Hello", "-n", "12", "--no-display-prompt", "-r", stop)
    assert short == whole[: whole.index(stop)] + "\n"


def test_sampling_options_reach_the_sampler(capsys: pytest.CaptureFixture[str]) -> None:
    hot = ["run", "--device", "fake", "--raw", "-p", "a", "-n", "20", "--temp", "5"]
    texts = []
    for seed in ("1", "1", "2"):
        assert main([*hot, "-s", seed]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    forced = completion(capsys, "-p", "a", "-n", "3", "-l", "97+999")
    other = completion(capsys, "-p", "a", "-n", "3")
    assert len(set(forced[1:4])) == 1 and forced != other


def test_timings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FAKE, "--raw", "-p", "a", "-n", "3"]) == 0
    assert "t/s | Generation:" in capsys.readouterr().err
    assert main([*FAKE, "--raw", "-p", "a", "-n", "3", "--no-show-timings"]) == 0
    assert "Generation" not in capsys.readouterr().err


def test_single_turn(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FAKE, "-p", "Hello", "-st", "-n", "8"]) == 0
    plain = capsys.readouterr().out
    assert main([*FAKE, "-p", "Hello", "-st", "-n", "8", "-sys", "Be brief."]) == 0
    told = capsys.readouterr().out
    assert len(plain) == len(told) == 9
    assert plain != told


def test_a_prompt_without_a_terminal_is_one_turn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`while read line; do hotexpert run -p "$line"; done` keeps its lines, and sees failures."""
    with typed("never read\n", monkeypatch):
        assert main([*FAKE, "-p", "Hello", "-n", "4"]) == 0
        assert len(capsys.readouterr().out.splitlines()) == 1
        assert main([*FAKE, "-p", "x" * 300, "-n", "4", "-c", "128"]) == 1
        assert "more than the context of 128" in capsys.readouterr().err


def test_a_closed_standard_input_is_not_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert main(FAKE) == 1
    assert "standard input is closed" in capsys.readouterr().err
    assert main([*FAKE, "-p", "Hello", "-n", "4"]) == 0


def test_chat_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    note = tmp_path / "note.txt"
    note.write_text("remember")
    script = f"""hi
/regen
/clear
hi
/read {note}
and
/read {tmp_path}/missing
/nonsense
two \\
lines
/exit
never
"""
    with typed(script, monkeypatch):
        assert main([*FAKE, "-n", "6"]) == 0
    shown = capsys.readouterr()
    answers = shown.out.splitlines()
    assert len(answers) == 5
    assert answers[0] == answers[1] == answers[2]  # again, and after forgetting: the same
    assert answers[3] not in answers[:3]
    assert "8 characters" in shown.err
    assert "missing: No such file" in shown.err
    assert "unknown command /nonsense" in shown.err


def test_the_end_of_input_ends_a_chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with typed("hello", monkeypatch):
        assert main([*FAKE, "-n", "4"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_failed_answer_does_not_end_a_chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with typed(f"{'x' * 300}\n/clear\nhi\n", monkeypatch):
        assert main([*FAKE, "-n", "4", "-c", "128"]) == 0
    shown = capsys.readouterr()
    assert "more than the context of 128" in shown.err
    assert len(shown.out.split()) == 1 or len(shown.out.strip()) > 0


async def test_ctrl_c_stops_one_answer() -> None:
    started = asyncio.Event()

    async def answer() -> None:
        started.set()
        await asyncio.Event().wait()

    stopping = asyncio.ensure_future(stoppable(answer()))
    await started.wait()
    os.kill(os.getpid(), signal.SIGINT)
    await stopping  # returns, and nothing else was cancelled
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


async def test_a_cancelled_caller_is_not_mistaken_for_ctrl_c() -> None:
    task = asyncio.ensure_future(stoppable(asyncio.Event().wait()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_lines_of_a_regular_file(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"one\r\ntwo\n\nlast")
    with path.open("rb") as file:
        reader = LineReader(file.fileno())
        assert [await reader.line() for _ in range(5)] == ["one", "two", "", "last", None]


def test_logit_bias() -> None:
    assert logit_bias("15043+1") == (15043, 1.0)
    assert logit_bias("15043-1.5") == (15043, -1.5)
    assert logit_bias("7-inf") == (7, float("-inf"))
