"""Fixtures of the experts' tests: a fake GPU, and two layers of experts to put on it."""

from __future__ import annotations

import pytest

from tests.support.fake_gpu import device, fake
from tests.support.moe_layers import MoeLayers

__all__ = ["device", "fake", "layers"]


@pytest.fixture
def layers() -> MoeLayers:
    made = MoeLayers()
    made.add("Q4_K", "Q6_K", (256, 256), 8, 2)
    made.add("Q8_0", "Q8_0", (64, 96), 6, 2)
    return made
