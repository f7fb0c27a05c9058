"""The wheel and the sdist hold everything needed, and work outside the repository."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist, the wheel built from the sdist."""
    out = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(out), str(ROOT)],
        check=True, capture_output=True, timeout=300,
    )  # fmt: skip
    return out


@pytest.mark.timeout(320)
def test_the_wheel_works_outside_the_repository(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps",
         "--target", str(tmp_path), str(wheel)],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    code = (
        "import runtime, runtime.config, pathlib;"
        "print(pathlib.Path(runtime.__file__).parent);"
        "assert runtime.config.BUNDLED_MODEL.stat().st_size > 30_000_000;"
        "print(runtime.load_tokenizer(runtime.config.BUNDLED_MODEL).encode('Hello'))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)},
        check=True, capture_output=True, text=True, timeout=60,
    ).stdout  # fmt: skip
    assert str(tmp_path) in out


def test_the_sdist_carries_the_licence_and_the_model_card(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = [name.split("/", 1)[1] for name in archive.getnames() if "/" in name]
    for wanted in ("LICENSE", "README.md", "runtime/data/tiny-olmoe.MODEL_CARD.md"):
        assert wanted in names
