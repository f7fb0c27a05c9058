"""The `hotexpert` program: help, exit codes, one-line errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from runtime.commands import COMMANDS, main
from runtime.commands.options import CommandParser, add_model_options, engine_config
from tests.support.measure import seconds_of_children


def run_program(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "runtime.commands", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_help_is_quick_and_names_every_command() -> None:
    begun = seconds_of_children()
    done = run_program("--help")
    assert seconds_of_children() - begun < 0.3
    assert done.returncode == 0
    assert all(name in done.stdout for name in COMMANDS)


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from runtime.commands import main; main(['bench', '--help']); "
        "print([m for m in ('numpy', 'numba', 'aiohttp', 'tokenizers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


OTHER_WORDS = {"serve", "profile", "trace"}
"""Commands that have a parser of their own, actions, or no model."""


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in OTHER_WORDS])
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    assert f"hotexpert {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "usage"),
        (["frobnicate"], "'frobnicate'"),
        (["bench", "--frobnicate"], "--frobnicate"),
        (["run", "--top-k", "many"], "--top-k"),
        (["run", "--tem", "1"], "--tem"),
        (["bench", "-p", "5-1"], "5-1"),
        (["bench", "-ctk", "q5_1"], "q5_1"),
        (["logits", "--tokens", "1,x", "--out", "x"], "--tokens"),
        (["logits", "--out", "x"], "--tokens"),
        (["perplexity", "-f", "x", "-c", "0"], "-c"),
        (["run", "-l", "15"], "-l"),
        (["inspect", "--vram", "much"], "--vram"),
        (["bench", "a,b", "-m", "c"], "a,b and -m c"),
        (["bench", "a,"], "the file's name is empty"),
        (["profile", "show", ""], "the file's name is empty"),
        (["profile", "forget", "-m", ""], "the file's name is empty"),
        (["logits", "--tokens", "1,2", "--split", "9", "--out", "x"], "--split"),
    ],
)
def test_wrong_usage(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    shown = capsys.readouterr()
    assert said in shown.out + shown.err
    assert len(shown.err.splitlines()) <= 1


NEEDED = {
    "perplexity": ["-f", __file__],
    "logits": ["--tokens", "1", "--out", "x.npz"],
    "routing": ["-f", __file__, "--out", "x.trace"],
}


OTHER_WORDS = {"serve", "profile", "trace"}
"""Commands that have a parser of their own, actions, or no model."""


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in OTHER_WORDS])
@pytest.mark.parametrize(
    ("model", "code", "said"),
    [
        (["a.gguf"], 1, "a.gguf"),
        (["-m", "a.gguf"], 1, "a.gguf"),
        (["--model", "a.gguf"], 1, "a.gguf"),
        (["a.gguf", "-m", "a.gguf"], 1, "a.gguf"),
        (["a.gguf", "-m", "b.gguf"], 2, "-m"),
        (["-m", "b.gguf", "a.gguf"], 2, "-m"),
        ([""], 2, "MODEL: the file's name is empty"),
        (["-m", ""], 2, "-m/--model: the file's name is empty"),
    ],
)
@pytest.mark.usefixtures("empty_folder")
def test_a_model_is_named_either_way(
    name: str, model: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in ([*model, *NEEDED.get(name, [])], [*NEEDED.get(name, []), *model]):
        assert main([name, *words]) == code
        shown = capsys.readouterr().err
        assert said in shown.splitlines()[-1] and "DEMONSTRATION" not in shown


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["inspect", "missing.gguf"], "missing.gguf"),
        (["run", "-m", "missing.gguf", "-p", "x"], "missing.gguf"),
        (["run", "--device", "fake", "--raw"], "--raw"),
        (["run", "--device", "fake", "-p", "x", "-st", "--temp", "nan"], "temperature"),
        (["run", "--device", "fake", "-p", "x" * 99, "-st", "-c", "16"], "prompt"),
        (["run", "--device", "fake", "-f", "missing.txt"], "missing.txt"),
        (["perplexity", "--device", "fake", "-f", "missing.txt"], "missing.txt"),
        (["logits", "--device", "fake", "--tokens", "99999", "--out", "x.npz"], "99999"),
        (["logits", "--device", "fake", "--tokens", "1", "--out", "no/where/x.npz"], "no/where"),
        (["bench", "--device", "fake", "-p", "0", "-n", "0"], "nothing to measure"),
    ],
)
def test_errors_are_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 1
    lines = capsys.readouterr().err.splitlines()
    assert said in lines[-1] and lines[-1].startswith("hotexpert ")
    assert not any("Traceback" in line for line in lines)


def test_a_broken_model_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + b"\xff" * 60)
    done = run_program("inspect", str(path))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "broken.gguf" in done.stderr


def test_a_full_disk_behind_the_output_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", "from runtime.commands import main; main(['inspect'])"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert "hotexpert inspect: " in done.stderr
    assert "No space left" in done.stderr
    assert "Traceback" not in done.stderr


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("hotexpert ")


def test_serve_hands_its_words_to_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def serve(words: list[str], **_named: str) -> int:
        seen.append(words)
        return 0

    monkeypatch.setattr("runtime.server.main", serve)
    assert main(["serve", "--port", "1", "--whatever"]) == 0
    assert seen == [["--port", "1", "--whatever"]]


@pytest.mark.parametrize(
    ("words", "mode"),
    [([], "mmap"), (["-lm", "pin"], "pin"), (["--mlock"], "pin"), (["--no-mmap"], "pin"),
     (["-lm", "pin", "--mmap"], "mmap")],
)  # fmt: skip
def test_commands_map_unless_they_are_asked_to_pin(words: list[str], mode: str) -> None:
    parser = CommandParser()
    add_model_options(parser)
    assert engine_config(parser.parse_args(["a.gguf", *words])).load_mode == mode
