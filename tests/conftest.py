"""Fixtures of all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def no_usage_profile() -> Iterator[None]:
    """Tests neither read nor write the user's own counts of experts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLAMA_MOE_CACHE_PROFILE", "0")
        yield
