"""What the README promises: its commands are the ones CI runs, its settings exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_ci_runs_the_readme_s_test_command() -> None:
    (command,) = (c for c in re.findall(r"```sh\n(.+?)\n```", README, re.S) if "pytest" in c)
    assert command in (ROOT / ".ci/run").read_text(), f"CI must run what the README says: {command}"


def test_nothing_is_left_to_fill_in() -> None:
    assert "@@" not in README


def test_every_environment_variable_is_documented() -> None:
    documents = README + "".join(p.read_text() for p in (ROOT / "docs").glob("*.md"))
    names = set()
    for package in ("ops", "runtime", "server"):
        for path in (ROOT / package).rglob("*.py"):
            names |= set(re.findall(r'environment\("([A-Z][A-Z0-9_]+)"\)', path.read_text()))
    missing = sorted(name for name in names if name not in documents)
    assert not missing, f"not in README or docs/: {missing}"


def test_every_dependency_has_a_reason() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    block = re.search(r"dependencies = \[(.*?)\]", text, re.S)
    assert block
    names = re.findall(r'"([a-z][a-z0-9-]+)', block.group(1))
    reasons = (ROOT / "docs/dependencies.md").read_text()
    missing = [name for name in names if f"`{name}`" not in reasons]
    assert names and not missing, f"docs/dependencies.md gives no reason for {missing}"
