"""Rows that the team gathers are those of the definition, for known and for chosen tokens."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from ops.cpu.gather_rows import GATHER, TOKENS_A_CHUNK, gather_rows
from ops.cpu.job import record
from ops.cpu.program import address_of, aligned
from ops.cpu.team import Team, acquire_team
from ops.gathering import HEARTBEAT, READY, ROWS
from ops.gpu.step_io import RING
from runtime.cuda.device import Device
from runtime.engine.gpu import table_rows
from runtime.engine.gpu.results import Results
from runtime.engine.gpu.table_rows import TableRows
from runtime.errors import EngineBug
from runtime.models import Model, open_model
from tests.support.fake_gpu import device, fake
from tests.support.quantized import q8_0
from tests.support.tiny_recurrent_models import qwen4exp

__all__ = ["device", "fake"]

MOST = 2 * TOKENS_A_CHUNK + 3


@pytest.fixture
def team() -> Iterator[Team]:
    with acquire_team(2) as shared:
        yield shared


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path: Path = tmp_path_factory.mktemp("rows") / "model.gguf"
    with open_model(q8_0(qwen4exp()).write(path)) as model:
        yield model


class Gathering:
    """Rows of a model's table, and what the rest of a step would give them."""

    def __init__(self, model: Model, device: Device, team: Team) -> None:
        self.memory = next(layer.memory for layer in model.spec.layers if layer.memory is not None)
        weight = model.weights[self.memory.table]
        self.table = weight.data.reshape(-1, weight.row_bytes)
        self.results = Results(device, 1, 4, 4)
        self.rows = TableRows(device, team, model, self.results, MOST)

    def chose(self, epoch: int, tokens: list[int]) -> None:
        """Step `epoch` ends, having chosen these."""
        self.results._chosen[epoch % RING].tokens[: len(tokens)] = tokens
        self.results.done[0] = epoch

    def wait(self) -> None:
        while any(own.program.running for own in self.rows._programs):
            pass

    def expected(self, contexts: np.ndarray) -> np.ndarray:
        return self.table[self.memory.rows(contexts)].reshape(len(contexts), -1)

    def found(self, epoch: int, n_tokens: int) -> np.ndarray:
        width = self.table.shape[1] * len(self.memory.sizes)
        token_bytes = -(-width // 16) * 16
        at = ROWS + (epoch & 1) * self.rows._stride
        rows = self.words[at:][: n_tokens * token_bytes]
        return rows.reshape(n_tokens, -1)[:, :width].copy()

    @property
    def words(self) -> np.ndarray:
        return self.rows._buffer.view

    @property
    def ready(self) -> int:
        return int(self.words[READY:][:8].view(np.int64)[0])

    def close(self) -> None:
        self.rows.close()
        self.results.close()


@pytest.mark.parametrize(("epoch", "n_tokens"), [(1, 1), (6, MOST), (7, TOKENS_A_CHUNK)])
def test_rows_are_those_of_the_definition(
    epoch: int, n_tokens: int, model: Model, device: Device, team: Team
) -> None:
    gathering = Gathering(model, device, team)
    rng = np.random.default_rng(n_tokens)
    contexts = rng.integers(0, 96, (n_tokens, gathering.memory.n_gram)).astype(np.int32)
    contexts[rng.random(contexts.shape) < 0.2] = gathering.memory.end_token
    contexts[0, 1:] = -1
    chosen = rng.integers(0, 96, 32)
    gathering.chose(epoch - 1, chosen.tolist())
    asked = contexts.copy()
    rows = np.arange(0, n_tokens, 2)
    asked[rows, 0] = -1 - rows
    contexts[rows, 0] = chosen[rows]
    gathering.rows.begin(epoch, asked)
    gathering.wait()
    assert gathering.ready == epoch
    assert np.array_equal(gathering.found(epoch, n_tokens), gathering.expected(contexts))
    assert gathering.words[HEARTBEAT:][:8].any(), "a sign of life"
    gathering.close()


def test_a_step_waits_for_the_tokens_of_the_one_before(
    model: Model, device: Device, team: Team
) -> None:
    gathering = Gathering(model, device, team)
    known, unknown = np.array([[7, 5, 6]], np.int32), np.array([[-1, 7, 5]], np.int32)
    gathering.rows.begin(1, known)
    gathering.rows.begin(2, unknown)
    while gathering.ready != 1:
        pass
    assert np.array_equal(gathering.found(1, 1), gathering.expected(known))
    with pytest.raises(EngineBug, match="rows of an earlier step"):
        for _ in range(2):
            gathering.rows.begin(3, unknown)
    assert not gathering.rows.ended(2)
    gathering.chose(2, [13])
    gathering.wait()
    assert gathering.rows.ended(2) and gathering.rows.ended(3)
    gathering.chose(1, [11])
    gathering.rows.begin(2, unknown)
    gathering.wait()
    expected = gathering.expected(np.array([[11, 7, 5]], np.int32))
    assert gathering.ready == 2 and np.array_equal(gathering.found(2, 1), expected)
    gathering.rows.begin(9, unknown)
    gathering.close()
    assert gathering.ready == 2, "nobody waits any more"


def test_a_worker_sleeps_until_the_last_waits_end_is_near(model: Model, device: Device) -> None:
    lone = Team(1, None)
    gathering = Gathering(model, device, lone)
    known = np.array([[7, 5, 6]], np.int32)
    for own in gathering.rows._programs:
        own.pace[0] = 1 << 60
    used = time.process_time()
    gathering.rows.begin(2, known)
    time.sleep(0.2)
    assert time.process_time() - used < 0.1, "less than a core"
    assert gathering.ready != 2
    gathering.chose(1, [11])
    gathering.wait()
    assert gathering.ready == 2
    waited, nap = (int(cycles) for cycles in gathering.rows._programs[0].pace)
    assert 0 < nap < waited < 1 << 60
    gathering.close()
    lone.end()


def test_every_row_that_a_slow_disk_is_asked_for_is_a_sign_of_life(
    model: Model, device: Device, team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats = []

    @ctypes.CFUNCTYPE(ctypes.c_int64, *3 * [ctypes.c_int64])
    def slow_madvise(*_: int) -> int:
        beats.append(bytes(gathering.words[HEARTBEAT:][:8]))
        time.sleep(0.005)
        return 0

    address = ctypes.cast(slow_madvise, ctypes.c_void_p).value
    known = table_rows.c_function
    monkeypatch.setattr(
        table_rows, "c_function", lambda name: address if name == "madvise" else known(name)
    )
    gathering = Gathering(model, device, team)
    contexts = np.array([[7, 5, 6], [8, 7, 5]], np.int32)
    gathering.rows.begin(1, contexts)
    gathering.wait()
    assert len(beats) == len(contexts) * len(gathering.memory.sizes)
    assert len(set(beats)) == len(beats)
    gathering.close()


def test_every_row_that_comes_is_a_sign_of_life() -> None:
    """Rows so long that copying one takes a few milliseconds, of a token that has eight."""
    n_heads, row_bytes = 8, 16 << 20
    words, state = aligned(64, np.int64), aligned(8, np.int64)
    table, out = np.ones(row_bytes, np.uint8), mmap.mmap(-1, n_heads * row_bytes)
    state[:] = [1, 0, 0, 0, 0, 0, 1, 0]  # step 1 of one token; the step before has ended
    arrays = [np.array(values, np.int64) for values in ([[7, 5]], [3, 5], n_heads * [1])]
    contexts, multipliers, sizes = arrays[0].astype(np.int32), arrays[1], arrays[2]
    offsets, places = np.zeros(n_heads, np.int64), np.zeros(n_heads, np.int64)
    at = address_of(state)
    args = record(
        GATHER, exchange=address_of(words), done=at + 56, step=at, sched_yield=0, usleep=0,
        pace=at + 24, madvise=0, advice=0, page_bytes=mmap.PAGESIZE, contexts=address_of(contexts),
        width=2, n_tokens=at + 48, chosen=at + 40, chosen_stride=0, ring_mask=0,
        table=address_of(table), row_bytes=row_bytes, multipliers=address_of(multipliers),
        sizes=address_of(sizes), offsets=address_of(offsets), n_heads=n_heads, n_gram=2,
        end_token=0, places=address_of(places), token_bytes=n_heads * row_bytes, out_stride=0,
        out=ctypes.addressof(ctypes.c_char.from_buffer(out)),
    )  # fmt: skip
    job = ctypes.CFUNCTYPE(None, *3 * [ctypes.c_int64])(gather_rows.address)
    beats: list[int] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            beats.append(int(words[HEARTBEAT // 8]))

    with ThreadPoolExecutor(1) as looking:
        looking.submit(look)
        job(address_of(args), 0, 0)
        done.set()
    assert len(set(beats)) > n_heads // 2
