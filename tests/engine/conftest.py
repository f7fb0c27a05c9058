"""Fixtures of the engine's tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.support.fake_gpu import device, fake

__all__ = ["device", "fake", "no_task_is_left"]


@pytest.fixture
async def no_task_is_left() -> AsyncIterator[None]:
    """Every task a test starts has ended with it."""
    before = asyncio.all_tasks()
    yield
    left = {task for task in asyncio.all_tasks() - before if task is not asyncio.current_task()}
    assert not left, left
