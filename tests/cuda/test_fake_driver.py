"""The fake has the real bindings' names, parameters and constants."""

from __future__ import annotations

import inspect
from enum import IntEnum

import pytest

from tests.support.cuda_constants import ENUMS
from tests.support.fake_driver import ALLOCATING, NO_CONTEXT, FakeDriver

driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
FUNCTIONS = [name[1:] for name in dir(FakeDriver) if name.startswith("_cu")]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_take_what_the_real_ones_take(name: str) -> None:
    real = list(inspect.signature(getattr(driver, name)).parameters)
    assert list(inspect.signature(getattr(FakeDriver(), f"_{name}")).parameters) == real


@pytest.mark.parametrize("enum", ENUMS, ids=lambda enum: enum.__name__)
def test_constants_are_the_real_ones(enum: type[IntEnum]) -> None:
    real = getattr(driver, enum.__name__)
    for member in enum:
        assert int(getattr(real, member.name)) == int(member), member.name


def test_flags_and_structures_exist() -> None:
    for name in (n for n in dir(FakeDriver) if n.startswith("CU_MEMHOSTREGISTER")):
        assert getattr(driver, name) == getattr(FakeDriver, name)
    config, attribute = driver.CUlaunchConfig(), driver.CUlaunchAttribute()
    for name in vars(FakeDriver.CUlaunchConfig()):
        assert hasattr(config, name)
    assert hasattr(attribute.value, "programmaticStreamSerializationAllowed")
    for kind in ("CUmemcpyAttributes", "CUgraphEdgeData"):
        for name in vars(getattr(FakeDriver, kind)()):
            assert hasattr(getattr(driver, kind)(), name)
    assert int(driver.CUdeviceptr(7)) == FakeDriver.CUdeviceptr(7)


def test_the_lists_name_functions() -> None:
    assert set(FUNCTIONS) >= ALLOCATING | NO_CONTEXT
