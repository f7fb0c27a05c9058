"""Numba's contexts are there before two threads can want them at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

MADE = """
import importlib, sys
from numba.core.registry import cpu_target
assert "_toplevel_target_context" not in vars(cpu_target), "made by Numba itself"
importlib.import_module(sys.argv[1])
assert "_toplevel_target_context" in vars(cpu_target)
"""


@pytest.mark.parametrize(
    "module", ["contexts", "isa", "job", "memory", "matmul", "sigbus", "clock"]
)
def test_a_module_that_compiles_makes_the_contexts_first(module: str) -> None:
    subprocess.run([sys.executable, "-c", MADE, f"ops.cpu.{module}"], check=True, timeout=60)
