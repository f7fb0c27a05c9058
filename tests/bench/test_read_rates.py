"""Bare reads: the kernel touches every byte that it should, and the GPU's time is taken for it."""

from __future__ import annotations

import numpy as np
import pytest

from bench import read_rates
from bench.read_rates import CHUNK_BYTES, GPUReads, host_bytes_per_second, read_text
from runtime.cuda.device import Device
from runtime.cuda.driver import initialized
from tests.support import ptx as interpreter
from tests.support.fake_driver import FakeDriver

MAGIC = 0x5EED0BAD


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("word", [0, 1, 4099, 8191, 2 * 8192 + 77, 3 * 8192 - 1])
def test_the_kernel_reads_every_word(word: int, overlapped: bool) -> None:
    """Only where it reads the one word that is not 0 does it store anything."""
    memory = interpreter.Memory()
    data = np.zeros(3 * CHUNK_BYTES // 4, np.uint32)
    data[word] = MAGIC
    out = np.zeros(64, np.uint32)
    address, result = memory.place(data), memory.place(out)
    kernel = interpreter.load(read_text(overlapped))["read"]
    kernel.launch(memory, (2, 1, 1), (256, 1, 1), [address, 3, result])
    assert memory.read(result, np.uint32, 1)[0] == MAGIC


def test_times_are_of_the_size_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_rates, "N_READS", 2)
    monkeypatch.setattr(read_rates, "N_TIMES", 1)
    monkeypatch.setattr(read_rates, "graph_microseconds", lambda *_: 20.0)
    with (
        Device(initialized(FakeDriver(memory_bytes=1 << 28), "13.4.4")) as device,
        GPUReads(device, pool_bytes=1 << 20) as reads,
    ):
        assert reads.microseconds(CHUNK_BYTES) == 10
        assert reads.microseconds(CHUNK_BYTES * 3 // 2) == pytest.approx(10 * 1.5 / 2)
        assert reads.bytes_per_second() == pytest.approx((1 << 20) * 1e5)


def test_the_host_reads_all_pieces() -> None:
    pieces = [np.zeros(10_000_000, np.uint8), np.zeros(1000, np.uint8)]
    assert 1e8 < host_bytes_per_second(pieces, 2) < 1e13
