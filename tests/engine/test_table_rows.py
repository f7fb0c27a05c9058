"""Rows that the team gathers are those of the definition, for known and for chosen tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ops.cpu.gather_rows import TOKENS_A_CHUNK
from ops.cpu.team import Team, acquire_team
from ops.gathering import HEARTBEAT, READY, ROWS
from ops.gpu.step_io import RING
from runtime.cuda.device import Device
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
