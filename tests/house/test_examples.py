"""Every example, and the README's own program, runs on the bundled model."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> str:
    """What `python ARGUMENTS` prints, run in the repository."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "HOME": str(Path.home())},
        capture_output=True,
        text=True,
        check=True,
        timeout=110,
    ).stdout


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/*.py")), ids=lambda p: p.name)
def test_examples_run(path: Path) -> None:
    assert len(run(str(path)).split()) >= 4


def test_the_chat_example_answers_as_the_model_card_says() -> None:
    assert run("examples/chat.py") == "The capital of France is Paris.\n"


def test_the_readme_s_program_runs() -> None:
    (program,) = re.findall(r"```python\n(.+?)```", (ROOT / "README.md").read_text(), re.S)
    assert run("-c", program).strip()
