"""Name and version of this build, as answers, /props and --version report them."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def _build_info() -> str:
    try:
        return f"hotexpert-{version('hotexpert')}"
    except PackageNotFoundError:
        return "hotexpert-source"


# Read once, at import: looking it up touches the disk.
BUILD_INFO = _build_info()
