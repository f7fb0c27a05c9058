"""Fixtures of all tests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

MANY_TESTS = 2000
"""A run of so many is the whole suite, or most of it."""


@pytest.fixture(autouse=True, scope="session")
def no_usage_profile() -> Iterator[None]:
    """Tests neither read nor write the user's own counts of experts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLAMA_MOE_CACHE_PROFILE", "0")
        yield


@pytest.fixture(autouse=True, scope="session")
def kernels_compiled_beside_the_tests(request: pytest.FixtureRequest) -> Iterator[None]:
    """Before a long run, a process of its own begins with what later tests would wait for.

    Where several processes run tests, they leave no core to it.
    """
    if len(request.session.items) < MANY_TESTS or hasattr(request.config, "workerinput"):
        yield
        return
    command = [sys.executable, "-m", "tests.support.compile_products"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as child:
        yield
        child.kill()
