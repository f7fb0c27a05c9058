"""Both sides of the exchange at once: the mailbox's text, interpreted, against the real team."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from ops import exchange
from ops.cpu.team import Team, acquire_team
from ops.exchange import ExchangeLayout
from ops.gpu.mailbox import STATE_BYTES, MailboxLaunch, mailbox
from runtime.experts.serve_program import ServeMemory, ServeProgram, record_bytes
from tests.support.machines import InterpretedMachine
from tests.support.moe_layers import MoeLayers
from tests.support.ptx.host_memory import HostMemory
from tests.support.serve_chunks import DOWN, GATE_UP, trouble, undone

N_USED, N_EXPERT, N_EMBD = 3, 5, 256
PATIENCE_TICKS = 100_000
SHORT_TICKS = 8_000
F32 = NDArray[np.float32]


@pytest.fixture
def team() -> Iterator[Team]:
    with acquire_team(2) as shared:
        yield shared


@pytest.fixture
def steps(team: Team) -> Iterator[Steps]:
    made = Steps(team, 4)
    yield made
    made.close()


class Steps:
    """Steps of a model of three MoE layers whose experts are all missed or not at all."""

    def __init__(self, team: Team, most_tokens: int) -> None:
        self.layers = MoeLayers()
        self.layers.add("Q4_K", "Q6_K", (N_EMBD, 256), N_EXPERT, N_USED)
        self.layers.add("Q8_0", "Q4_0", (N_EMBD, 96), N_EXPERT, N_USED)
        self.layers.add("Q4_K", "Q4_K", (N_EMBD, 512), N_EXPERT, N_USED)
        specs, weights = self.layers.specs, self.layers.weights
        widths = [record_bytes(weights, spec) for spec in specs]
        self.layout = ExchangeLayout(most_tokens * N_USED, most_tokens, max(widths), N_EMBD)
        self.launches = [
            MailboxLaunch(self.layout.n_slots, most_tokens, width, N_EMBD) for width in widths
        ]
        self.machine = InterpretedMachine(host=lambda: time.sleep(0))
        self.machine.memory = HostMemory()
        self.exchange = self.place(np.zeros(self.layout.n_bytes, np.uint8))
        self.done = self.place(np.zeros(1, np.uint32))
        self.state = self.place(np.zeros(STATE_BYTES // 4, np.uint32))
        self.team = team
        memory = ServeMemory(weights, specs, self.layout, self.exchange, team.n_threads)
        self.serve = ServeProgram(memory, self.done)

    def place(self, array: NDArray[np.generic]) -> int:
        return self.machine.place(array)

    def close(self) -> None:
        """Let the team go, also where a test failed half way."""
        self.serve.abort()
        if self.serve.program.running:
            self.serve.program.wait()
        self.serve.program.close()

    def run(
        self, epoch: int, x: F32, choices: NDArray[np.int32], missing: list[NDArray[np.bool_]],
        patience: int = PATIENCE_TICKS,
    ) -> list[F32]:  # fmt: skip
        """y of every layer; the team has been given its program, or not."""
        results = []
        for layer, launch in enumerate(self.launches):
            table = np.ones((self.layout.n_slots, 4), np.uint64)
            table[np.flatnonzero(missing[layer])] = 0
            y = self.place(np.full((self.layout.n_slots, N_EMBD), np.float32(-1)))
            self.machine.launch(
                mailbox(), launch.grid,
                {
                    "epoch": self.place(np.array([epoch], np.uint32)),
                    "counts": self.place(np.array([len(x), 0, 0, 0], np.uint32)),
                    "experts": self.place(table),
                    "choices": self.place(choices),
                    "records": self.place(self.layers.records(layer, x)),
                    "y": y,
                    "slots": 0, "exchange": self.exchange, "state": self.state,
                    "patience": patience, "layer": layer, "n_layers": len(self.launches),
                    **launch.sizes(self.layout),
                },
                shared_bytes=launch.shared_bytes,
            )  # fmt: skip
            results.append(self.machine.read(y, np.float32, (self.layout.n_slots, N_EMBD)))
        self.machine.memory.write(self.done, np.array([epoch], np.uint32))
        return results


def some_choices(rng: np.random.Generator, n_tokens: int) -> NDArray[np.int32]:
    rows = [rng.permutation(N_EXPERT)[:N_USED] for _ in range(n_tokens)]
    return np.array(rows, np.int32).reshape(-1)


@pytest.mark.parametrize("n_tokens", [1, 3])
def test_missed_experts_come_back_with_the_contract_s_bits(n_tokens: int, steps: Steps) -> None:
    rng = np.random.default_rng(n_tokens)
    for epoch in range(1, 4):
        x = rng.normal(size=(n_tokens, N_EMBD)).astype(np.float32)
        choices = some_choices(rng, n_tokens)
        missing = [rng.random(len(choices)) < share for share in (0.6, 0.0, 0.9)]
        steps.serve.begin(epoch)
        steps.team.submit(steps.serve.program)
        results = steps.run(epoch, x, choices, missing)
        steps.serve.program.wait()
        for layer, result in enumerate(results):
            expected = np.full_like(result, -1)
            for slot in np.flatnonzero(missing[layer]):
                token = slot // N_USED
                expert = int(choices[slot])
                expected[slot] = steps.layers.expected(layer, x[token : token + 1], expert)[0]
            assert np.array_equal(result.view(np.uint32), expected.view(np.uint32)), layer


def test_without_a_team_the_first_layer_gives_up_and_the_others_leave(steps: Steps) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, N_EMBD)).astype(np.float32)
    choices, missing = some_choices(rng, 1), [np.ones(N_USED, np.bool_)] * 3
    steps.run(5, x, choices, missing, SHORT_TICKS)
    failed = steps.machine.read(steps.exchange + exchange.FAILED, np.uint32, 4)
    assert failed.tolist() == [0, 0, 5, 0]
    ticks = steps.machine.read(steps.exchange + exchange.POSTED, np.uint32, 1)
    assert ticks[0] == exchange.sequence(5, 3, 0)  # nothing was posted after that

    # The next step finds everything as it has to be.
    steps.serve.begin(6)
    steps.team.submit(steps.serve.program)
    results = steps.run(6, x, choices, missing)
    steps.serve.program.wait()
    expected = steps.layers.expected(2, x, int(choices[1]))[0]
    assert np.array_equal(results[2][1], expected)


def test_a_beating_heart_keeps_the_gpu_waiting(steps: Steps) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, N_EMBD)).astype(np.float32)
    choices, missing = some_choices(rng, 1), [np.ones(N_USED, np.bool_)] * 3
    word = exchange.HEARTBEAT
    looks = 0

    def slow_host() -> None:
        """Alive for a while, then at work."""
        nonlocal looks
        looks += 1
        steps.machine.memory.write(steps.exchange + word, np.array([looks], np.uint64))
        if looks == 3 * SHORT_TICKS // 8:
            steps.serve.begin(2)
            steps.team.submit(steps.serve.program)

    steps.machine = _with_host(steps.machine, slow_host)
    results = steps.run(2, x, choices, missing, SHORT_TICKS)
    steps.serve.program.wait()
    assert np.array_equal(results[0][1], steps.layers.expected(0, x, int(choices[1]))[0])


def test_nobody_waits_longer_than_the_first_who_gives_up(steps: Steps) -> None:
    """The team goes on, and its heart with it, once some thread of some GPU has given up."""
    x = np.ones((1, N_EMBD), np.float32)
    missing = [np.arange(N_USED) < n for n in (N_USED, 0, 0)]
    looks, number = 0, exchange.failed_number(4)

    def host() -> None:
        nonlocal looks
        looks += 1
        steps.machine.memory.write(
            steps.exchange + exchange.HEARTBEAT, np.array([looks], np.uint64)
        )
        if looks == 3 * SHORT_TICKS // 8:
            mark = np.array([number, 9], np.uint32)
            steps.machine.memory.write(steps.exchange + exchange.FAILED, mark)

    steps.machine = _with_host(steps.machine, host)
    steps.run(4, x, np.arange(N_USED, dtype=np.int32), missing, SHORT_TICKS)
    assert looks < SHORT_TICKS
    failed = steps.machine.read(steps.exchange + exchange.FAILED, np.uint32, 4)
    assert failed.tolist() == [number, 9, 0, 0]  # what the first one waited for


@pytest.mark.parametrize("kind", [GATE_UP, DOWN])
def test_a_chunk_that_nobody_computes_costs_its_step_alone(kind: int, steps: Steps) -> None:
    """Workers wait for one of gate and up without a sign of life, and leave once the GPU has given
    up; after one of down they go on to the next layer, and their sign of life helps no longer."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, N_EMBD)).astype(np.float32)
    choices, missing = some_choices(rng, 1), [np.ones(N_USED, np.bool_)] * 3
    program, usual = steps.serve.program, steps.machine
    with trouble([steps.serve], 0, kind, undone) as met:
        n_beats = 0

        def host() -> None:
            """Alive at least until the chunk was left out, or all the time."""
            nonlocal n_beats
            if not met.n_met or kind == DOWN:
                n_beats += 1
                beat = np.array([n_beats], np.uint64)
                steps.machine.memory.write(steps.exchange + exchange.HEARTBEAT, beat)
            time.sleep(0)

        steps.machine = _with_host(steps.machine, host)
        steps.serve.begin(4)
        steps.team.submit(program)
        steps.run(4, x, choices, missing, SHORT_TICKS)
        program.wait()
        assert met.n_met == 1
    failed = steps.machine.read(steps.exchange + exchange.FAILED, np.uint32, 4)
    assert failed.tolist() == [exchange.failed_number(4), 0, 0, 0]

    steps.machine = usual
    steps.serve.begin(5)
    steps.team.submit(program)
    results = steps.run(5, x, choices, missing)
    program.wait()
    for layer, result in enumerate(results):
        for slot in range(N_USED):
            expected = steps.layers.expected(layer, x, int(choices[slot]))[0]
            assert np.array_equal(result[slot], expected), (layer, slot)


def _with_host(machine: InterpretedMachine, host: object) -> InterpretedMachine:
    other = InterpretedMachine(host=host)  # type: ignore[arg-type]
    other.memory = machine.memory
    return other


def test_sizes_that_no_exchange_has() -> None:
    with pytest.raises(ValueError, match="no exchange"):
        ExchangeLayout(8, 1, 100, 2048)
    with pytest.raises(ValueError, match="no exchange"):
        ExchangeLayout(8, 1, 64, 33)
    with pytest.raises(ValueError, match="no exchange"):
        ExchangeLayout(1 << 17, 1, 64, 32)
