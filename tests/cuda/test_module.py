"""Loading kernels: the assembler's words, and a cache that can only help."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from runtime.cuda.device import Device
from runtime.cuda.driver import Driver
from runtime.cuda.graph import Launch
from runtime.cuda.memory import DeviceBuffer
from runtime.cuda.module import CubinCache, Module
from runtime.cuda.stream import Stream
from runtime.errors import CudaError, EngineBug, PtxCompileError
from tests.cuda.conftest import FILL, pack
from tests.support.fake_driver import FakeDriver


def test_text_that_is_no_ptx_is_refused_with_the_assemblers_log(device: Device) -> None:
    with pytest.raises(PtxCompileError, match=r"kernel wrong: error\s") as caught:
        Module(device, "mov.u32 %r1, 0;\n", "wrong")
    assert caught.value.kernel == "wrong"


@pytest.mark.gpu
@pytest.mark.parametrize("driver", ["gpu"], indirect=True)
def test_the_log_names_the_line(device: Device) -> None:
    with pytest.raises(PtxCompileError, match=r"line 15.*xyz"):
        Module(device, FILL.replace("mov.u32 %block", "xyz.u32 %block"), "fill")


def test_an_entry_that_is_not_there(device: Device) -> None:
    with Module(device, FILL, "fill") as module, pytest.raises(CudaError, match="NOT_FOUND"):
        module.function("empty")


def test_a_function_ends_with_its_module(device: Device) -> None:
    with Module(device, FILL, "fill") as module:
        function = module.function("fill")
        assert function.handle is not None
    with pytest.raises(EngineBug, match="after it was closed"):
        _ = function.handle


def test_assembled_code_is_kept_and_used(device: Device, tmp_path: Path) -> None:
    cache = CubinCache(tmp_path / "cubins")
    Module(device, FILL, "fill", cache).close()
    (file,) = cache.directory.iterdir()
    assert device.info.architecture in file.name
    assert str(device.driver.version) in file.name
    kept = file.read_bytes()
    with Module(device, "// other words\n" + FILL, "fill", cache) as module:
        module.function("fill")
    assert list(cache.directory.iterdir()) == [file]
    assert file.read_bytes() == kept
    assert cache.reason == ""


def test_kept_code_is_not_assembled_again(
    fake: FakeDriver, fake_driver: Driver, tmp_path: Path
) -> None:
    with Device(fake_driver) as device:
        for _ in range(2):
            Module(device, FILL, "fill", CubinCache(tmp_path)).close()
        assert fake.calls["cuLinkComplete"] == 1
        fake_driver.version = 13010
        Module(device, FILL, "fill", CubinCache(tmp_path)).close()
        assert fake.calls["cuLinkComplete"] == 2


@pytest.mark.parametrize("damage", [b"", b"short", None])
def test_a_damaged_file_is_assembled_anew(
    device: Device, tmp_path: Path, damage: bytes | None
) -> None:
    cache = CubinCache(tmp_path)
    Module(device, FILL, "fill", cache).close()
    (file,) = tmp_path.iterdir()
    kept = file.read_bytes()
    file.write_bytes(kept[:-1] + b"\1" if damage is None else damage)
    Module(device, FILL, "fill", cache).close()
    assert file.read_bytes() == kept


def test_whole_code_that_the_driver_refuses_is_assembled_anew(
    fake_driver: Driver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = CubinCache(tmp_path)
    with Device(fake_driver) as device, caplog.at_level(logging.DEBUG):
        Module(device, FILL, "fill", cache).close()
        (file,) = tmp_path.iterdir()
        cache.put(file.stem, b"for another driver")
        Module(device, FILL, "fill", cache).close()
        assert "assembled anew" in caplog.text


def test_a_folder_that_cannot_be_written_is_a_reason(device: Device, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = CubinCache(tmp_path / "file" / "cubins")
    with Module(device, FILL, "fill", cache) as module:
        module.function("fill")
    assert "Not a directory" in cache.reason


def test_declared_shared_memory_counts_towards_what_needs_no_word(device: Device) -> None:
    """8 KiB declared and 44 asked for are more than the 48 that every function may have."""
    declares = FILL.replace("{\n", "{\n    .shared .align 16 .b8 values[8192];\n", 1)
    with (
        Module(device, declares, "fill") as module,
        Stream(device) as stream,
        DeviceBuffer(device, 256) as buffer,
    ):
        function = module.function("fill")
        arguments = pack(buffer.address, 5, 64)
        launch = Launch(function, (1, 1, 1), 64, arguments, shared_bytes=44 << 10)
        with pytest.raises(CudaError, match="INVALID_VALUE"):
            launch.enqueue(stream)
        function.allow_shared_bytes(44 << 10)
        function.allow_shared_bytes(1 << 10)  # takes nothing back
        launch.enqueue(stream)
        stream.synchronize()


def test_a_text_whose_recipe_is_known_is_not_made_again(device: Device, tmp_path: Path) -> None:
    cache = CubinCache(tmp_path)
    made: list[str] = []

    def make() -> str:
        made.append(FILL)
        return FILL

    for recipe, n_made in (("one", 1), ("one", 1), ("another", 2), ("another", 2)):
        with Module(device, make, "fill", cache, recipe=recipe) as module:
            assert module.function("fill").entry == "fill"
        assert len(made) == n_made, recipe
    for file in cache.directory.iterdir():
        file.write_bytes(b"cut short")
    Module(device, make, "fill", cache, recipe="one").close()
    assert len(made) == 3
