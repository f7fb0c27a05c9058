"""The folder where things are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """`.cache/hotexpert` in the user's home; nothing is created.

    A user without a home, as a container's often is, gets a place that cannot be: whatever wants to
    keep something there finds that out as it does where a home cannot be written.
    """
    try:
        home = Path.home()
    except RuntimeError:
        home = Path(os.devnull) / "no home folder"
    return home / ".cache" / "hotexpert"
