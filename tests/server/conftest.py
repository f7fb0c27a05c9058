"""Fixtures of the server's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from blockbuster import blockbuster_ctx

from tests.server.serving import Served, serving


@pytest.fixture(autouse=True)
def nothing_blocks_the_loop() -> Iterator[None]:
    """A blocking call made by the server or the engine on the loop's thread fails the test."""
    with blockbuster_ctx(scanned_modules=["server", "runtime"]):
        yield


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Served]:
    async with serving(metrics=True) as running:
        yield running
