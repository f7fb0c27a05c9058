"""Runs snippets through the interpreter and the assembler, and on a GPU too where one exists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from numpy.typing import NDArray

from tests.support.ptx.assemble import assemble, can_assemble
from tests.support.ptx.device import Device, find_device
from tests.support.ptx.snippet import Snippet, same

Evaluate = Callable[..., NDArray[Any]]


@pytest.fixture(scope="session")
def device() -> Device | None:
    return find_device()


@pytest.fixture(scope="session")
def assembler() -> bool:
    return can_assemble()


@pytest.fixture
def evaluate(device: Device | None, assembler: bool) -> Evaluate:
    """evaluate(code, out, a=(type, values), ...) -> one result a thread.

    NVIDIA's assembler has to take the text too. Where a GPU exists its bits must be the same;
    `relative` is the difference allowed instead. `target` is the least architecture.
    """

    def run(
        code: str, out: str, *, relative: float = 0, target: str = "sm_80", **inputs: Any
    ) -> NDArray[Any]:
        snippet = Snippet(code, out, inputs, target)
        result = snippet.interpret()
        if assembler:
            assemble(snippet.text, target)
        if device is not None:
            same(result, device.evaluate(snippet), relative)
        return result

    return run
