"""`python -m bench regress`: another revision beside the working tree."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from bench import regress, regress_inputs

FAKE = """
import asyncio, contextlib, types
SPEED, FIRST = {speed}, {first}
EngineConfig = SamplingParams = lambda **settings: types.SimpleNamespace(**settings)
class Engine:
    model = types.SimpleNamespace(n_vocab=1000)
    async def generate(self, prompt, params, reuse_prefix):
        for i in range(params.max_tokens):
            for _ in range(SPEED):
                await asyncio.sleep(0)
            yield types.SimpleNamespace(id=FIRST + i)
@contextlib.asynccontextmanager
async def open_engine(config):
    assert config.device == "cpu"
    yield Engine()
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with two commits and a working tree; each has other tokens or another speed."""
    root = tmp_path / "tree"
    root.mkdir()
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]

    def git(*arguments: str) -> None:
        subprocess.run(["git", *who, *arguments], cwd=root, check=True, capture_output=True)

    git("init", "-q")
    for speed, first, tag in ((300, 1, "first"), (300, 2, None)):
        (root / "runtime.py").write_text(FAKE.format(speed=speed, first=first))
        git("add", ".")
        git("commit", "-qm", "change")
        if tag:
            git("tag", tag)
    (root / "runtime.py").write_text(FAKE.format(speed=3, first=2))
    return root


def test_a_change_of_speed_and_of_text_is_seen(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    common = ["--root", str(tree), "--rounds", "1", "--out", str(out)]
    assert regress.main([*common, "--against", "HEAD"]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert {row["input"] for row in rows} == set(regress_inputs.INPUTS)
    assert all(row["same_text"] for row in rows)
    decode = next(row for row in rows if row["input"] == "decode 64")
    assert decode["ratio"] > 2
    assert "same text" in capsys.readouterr().out

    assert regress.main(common) == 1, "the last tag had another text"
    assert json.loads(out.read_text())["against"] == "first"
    assert "OTHER TEXT" in capsys.readouterr().out


def test_without_tags_the_last_commit_counts(tree: Path) -> None:
    subprocess.run(["git", "tag", "-d", "first"], cwd=tree, check=True, capture_output=True)
    assert regress.last_revision(tree) == "HEAD"


def test_a_revision_that_is_not_there_is_an_error(tree: Path, tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        regress.unpack(tree, "nowhere", tmp_path)
