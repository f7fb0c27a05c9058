"""Serve a model over HTTP; the same as `python -m runtime.server`, which owns the options."""

from __future__ import annotations

from collections.abc import Sequence


def take_over(words: Sequence[str]) -> int:
    """Run the server with `words` as its command line."""
    from runtime.server import main

    return main(list(words), program="hotexpert serve")
