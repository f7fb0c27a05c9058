"""The gate: every failure of the driver is one typed sentence that says what to do."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from runtime.cuda.driver import Driver, device_name, device_names, initialized
from runtime.errors import CudaError, DeviceLost, DeviceUnavailable, OutOfDeviceMemory
from tests.support.cuda_constants import CUresult
from tests.support.fake_driver import FakeDriver


def test_results_come_unwrapped(fake_driver: Driver) -> None:
    assert fake_driver.call("cuInit", 0) == ()
    assert fake_driver.call("cuDeviceGet", 0) == 0
    assert device_name(fake_driver, 0) == "Fake GPU 0"


def test_an_error_names_call_code_and_reason(fake_driver: Driver) -> None:
    with pytest.raises(CudaError) as caught:
        fake_driver.call("cuDeviceGet", 7)
    assert caught.value.call == "cuDeviceGet"
    assert caught.value.code == "CUDA_ERROR_INVALID_DEVICE"
    assert caught.value.explanation == "words for CUDA_ERROR_INVALID_DEVICE"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("CUDA_ERROR_OUT_OF_MEMORY", OutOfDeviceMemory),
        ("CUDA_ERROR_ECC_UNCORRECTABLE", DeviceLost),
        ("CUDA_ERROR_INVALID_HANDLE", CudaError),
    ],
)
def test_codes_that_a_caller_acts_on_have_their_class(
    fake: FakeDriver, fake_driver: Driver, code: str, kind: type[CudaError]
) -> None:
    fake.fail["cuInit"] = CUresult[code]
    with pytest.raises(CudaError) as caught:
        fake_driver.call("cuInit", 0)
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("version", "bindings", "needed"),
    [
        (12090, "13.4.4", "needs 13.0, driver 580 or newer"),
        (11080, "12.9.1", "needs 12.0, driver 525 or newer"),
        (11080, "11.8.0", "needs 12.0, driver 525 or newer"),
        (13000, "14.0.0", "needs 14.0"),
    ],
)
def test_a_driver_that_is_too_old_is_told_what_it_lacks(
    version: int, bindings: str, needed: str
) -> None:
    fake = FakeDriver(version=version)
    with pytest.raises(DeviceUnavailable) as caught:
        initialized(fake, bindings)
    assert str(caught.value).endswith(needed)
    assert f"CUDA {version // 1000}.{version % 1000 // 10}" in str(caught.value)
    assert fake.calls["cuInit"] == 0


@pytest.mark.parametrize(("version", "bindings"), [(13000, "13.4.4"), (13000, "12.6.0")])
def test_a_driver_that_is_new_enough_is_opened(version: int, bindings: str) -> None:
    assert initialized(FakeDriver(version=version), bindings).version == version


def test_no_libcuda_is_one_sentence() -> None:
    def no_libcuda() -> None:
        raise RuntimeError("cannot be found")

    with pytest.raises(DeviceUnavailable, match="no NVIDIA driver"):
        initialized(SimpleNamespace(cuDriverGetVersion=no_libcuda), "13.4.4")


def test_a_function_the_driver_lacks_asks_for_an_update(fake: FakeDriver) -> None:
    def missing(*args: object) -> None:
        raise RuntimeError('Function "cuGraphInstantiate" not found')

    fake.__dict__["cuGraphInstantiate"] = missing
    with pytest.raises(DeviceUnavailable, match=r"CUDA 13\.0.*lacks cuGraphInstantiate"):
        initialized(fake, "13.4.4").call("cuGraphInstantiate", 0, 0)


def test_no_gpu_and_a_broken_installation_say_what_to_do() -> None:
    fake = FakeDriver()
    fake.n_devices = 0
    with pytest.raises(DeviceUnavailable, match="CUDA_VISIBLE_DEVICES"):
        initialized(fake, "13.4.4")
    fake.fail["cuInit"] = CUresult["CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"]
    with pytest.raises(DeviceUnavailable, match="reboot"):
        initialized(fake, "13.4.4")


def test_looking_for_devices_answers_names_or_one_sentence() -> None:
    try:
        names = device_names()
    except DeviceUnavailable as error:
        assert "\n" not in str(error)
    else:
        assert all(names)


def test_the_package_imports_without_bindings() -> None:
    code = (
        "import sys; sys.modules['cuda'] = None\n"
        "import runtime.cuda.graph, runtime.cuda.memory, runtime.cuda.completion\n"
        "from runtime.cuda.driver import open_driver\n"
        "from runtime.errors import DeviceUnavailable\n"
        "try: open_driver()\n"
        "except DeviceUnavailable as error: print(error)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.startswith("cuda-python is not usable here")
