"""Looking for a GPU: a missing driver is one typed sentence, and import needs none."""

from __future__ import annotations

from enum import IntEnum

import pytest

from runtime.cuda.driver import checked, device_names
from runtime.errors import DeviceUnavailable


class Code(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_NO_DEVICE = 100


def test_checked_unwraps_or_names_the_call_and_code() -> None:
    assert checked("cuInit", (Code.CUDA_SUCCESS, 3)) == 3
    assert checked("f", (Code.CUDA_SUCCESS, 3, 4)) == (3, 4)
    with pytest.raises(DeviceUnavailable, match=r"cuDeviceGet.*CUDA_ERROR_NO_DEVICE \(100\)"):
        checked("cuDeviceGet", (Code.CUDA_ERROR_NO_DEVICE,))


def test_looking_for_devices_answers_names_or_one_sentence() -> None:
    try:
        names = device_names()
    except DeviceUnavailable as error:
        assert "\n" not in str(error)
    else:
        assert all(names)
