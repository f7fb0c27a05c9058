"""The team's side of the exchange: posted misses become answers with the contract's bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ops import exchange
from ops.cpu.formats import KERNEL_FORMATS
from ops.cpu.program import aligned
from ops.cpu.team import Team, acquire_team
from ops.exchange import ExchangeLayout, sequence
from ops.quants import FORMATS
from runtime.experts.serve_program import ServeMemory, ServeProgram, record_bytes
from tests.support.moe_layers import MoeLayers
from tests.support.serve_chunks import FORECAST, GATE_UP, serve_record, trouble, undone

EPOCH = 41
N_EXPERT, N_USED = 6, 3
FORECAST_STRIDE = 48
Bytes = NDArray[np.uint8]
Serving = Callable[..., "Served"]


@pytest.fixture
def team() -> Iterator[Team]:
    with acquire_team(2) as shared:
        yield shared


@pytest.fixture
def serving(team: Team) -> Iterator[Serving]:
    """Makes `Served` of the team; their programs are closed behind the test."""
    with ExitStack() as programs:

        def make(*sizes: int, **options: Any) -> Served:
            served = Served(team, *sizes, **options)
            programs.callback(served.program.close)
            return served

        yield make


class Served:
    """Layers, all on the CPU, the memory of an exchange, and the program that answers in it."""

    def __init__(
        self,
        team: Team,
        n_tokens: int = 1,
        *,
        n_layers: int = 1,
        formats: tuple[str, str] = ("Q4_K", "Q4_K"),
        sizes: tuple[int, int] = (256, 256),
    ) -> None:
        self.layers, self.team = MoeLayers(), team
        layers = self.layers
        for _ in range(n_layers):
            layers.add(*formats, sizes, N_EXPERT, N_USED)
        widths = [record_bytes(layers.weights, spec) for spec in layers.specs]
        rows = max(spec.down.n_out for spec in layers.specs)
        self.layout = ExchangeLayout(
            n_tokens * N_USED, n_tokens, max(widths), rows, FORECAST_STRIDE * n_tokens
        )
        self.memory = aligned(self.layout.n_bytes, np.uint8, 256)
        self.done = aligned(1, np.uint32)
        self.shared = ServeMemory(
            layers.weights, layers.specs, self.layout, self.memory.ctypes.data, team.n_threads
        )
        self.serve = ServeProgram(self.shared, self.done.ctypes.data)
        self.program = self.serve.program

    def run(self, epoch: int = EPOCH, *, is_last: bool = False) -> None:
        """A step from its beginning to its end; is_last: the GPU has done all layers by then."""
        if is_last:
            self.done[0] = epoch
        self.serve.begin(epoch)
        self.team.run(self.program)

    def post(self, layer: int, records: Bytes, misses: NDArray[np.uint32], epoch: int) -> None:
        """What the GPU does: misses u32[n], slot | expert << 16."""
        memory, number = self.memory, sequence(epoch, len(self.layers.specs), layer)
        memory[exchange.MISSES :][: misses.nbytes] = misses.view(np.uint8)
        memory[self.layout.records_offset :][: records.size] = records.reshape(-1)
        header = np.array([len(misses), len(records)], np.uint32)
        memory[exchange.N_MISSES :][:8] = header.view(np.uint8)
        memory[exchange.POSTED :][:4].view(np.uint32)[0] = number

    def answers(self, layer: int, n_misses: int) -> tuple[NDArray[np.float32], set[int]]:
        """f32[n_misses, n_rows] and the numbers that the words carry."""
        n_rows = self.layers.specs[layer].down.n_out
        words = self.memory[self.layout.answers_offset :].view(np.uint32)[: 2 * n_misses * n_rows]
        pairs = words.reshape(n_misses, n_rows, 2)
        return pairs[..., 0].copy().view(np.float32), set(pairs[..., 1].reshape(-1).tolist())


def random_misses(rng: np.random.Generator, n_tokens: int, share: float) -> NDArray[np.uint32]:
    """Some slots of a step whose tokens each use N_USED different experts."""
    choices = np.array([rng.permutation(N_EXPERT)[:N_USED] for _ in range(n_tokens)])
    slots = np.flatnonzero(rng.random(n_tokens * N_USED) < share)
    slots = slots if len(slots) else np.array([n_tokens * N_USED - 1])
    return (slots | choices.reshape(-1)[slots] << 16).astype(np.uint32)


FORMATS_SERVED = [name for name in KERNEL_FORMATS if name in FORMATS]


@pytest.mark.parametrize("name", FORMATS_SERVED)
@pytest.mark.parametrize("n_tokens", [1, 31])
def test_answers_have_the_bits_of_the_contract(name: str, n_tokens: int, serving: Serving) -> None:
    rng = np.random.default_rng(n_tokens)
    served = serving(n_tokens, formats=(name, name), sizes=(256, 512))
    layers = served.layers
    x = rng.normal(size=(n_tokens, 256)).astype(np.float32)
    misses = random_misses(rng, n_tokens, 0.5)
    served.post(0, layers.records(0, x), misses, EPOCH)
    served.run()
    answers, numbers = served.answers(0, len(misses))
    assert numbers == {sequence(EPOCH, 1, 0)}
    for answer, miss in zip(answers, misses, strict=True):
        token, expert = int(miss & 0xFFFF) // N_USED, int(miss >> 16)
        expected = layers.expected(0, x[token : token + 1], expert)[0]
        assert np.array_equal(answer.view(np.uint32), expected.view(np.uint32))


def test_a_step_that_is_repeated_is_computed_anew(serving: Serving) -> None:
    rng = np.random.default_rng(8)
    served = serving()
    layers = served.layers
    misses = np.array([0 | 4 << 16], np.uint32)
    for _ in range(2):
        x = rng.normal(size=(1, 256)).astype(np.float32)
        served.post(0, layers.records(0, x), misses, EPOCH)
        served.run()
        expected = layers.expected(0, x, 4)
        assert np.array_equal(served.answers(0, 1)[0].view(np.uint32), expected.view(np.uint32))


def test_layers_without_misses_are_passed_over(team: Team, serving: Serving) -> None:
    rng = np.random.default_rng(5)
    served = serving(2, n_layers=4, formats=("Q4_K", "Q8_0"))
    layers = served.layers
    x = rng.normal(size=(2, 256)).astype(np.float32)
    misses = random_misses(rng, 2, 0.7)
    served.post(2, layers.records(2, x), misses, 7)
    served.done[0] = 6
    served.serve.begin(7)
    team.submit(served.program)
    while len(served.answers(2, len(misses))[1]) != 1 or served.memory[128:136].max() == 0:
        assert served.program.running  # layer 3 may still be posted
    served.done[0] = 7
    served.program.wait()
    answers, numbers = served.answers(2, len(misses))
    assert numbers == {sequence(7, 4, 2)}
    token, expert = int(misses[0] & 0xFFFF) // N_USED, int(misses[0] >> 16)
    assert np.array_equal(answers[0], layers.expected(2, x[token : token + 1], expert)[0])


@pytest.mark.parametrize("epoch", [1, (1 << 32) - 1])
def test_numbers_go_on_where_they_wrap(epoch: int, team: Team, serving: Serving) -> None:
    served = serving(formats=("Q8_0", "Q8_0"), sizes=(64, 64))
    layers = served.layers
    before = (epoch - 1) % (1 << 32)
    for word in (exchange.POSTED, exchange.FORESEEN):
        served.memory[word:][:4].view(np.uint32)[0] = sequence(before, 1, 0)
    served.done[0] = before
    served.serve.begin(epoch)
    team.submit(served.program)
    x = np.ones((1, 64), np.float32)
    served.post(0, layers.records(0, x), np.array([2 | 4 << 16], np.uint32), epoch)
    served.program.wait()
    assert np.array_equal(served.answers(0, 1)[0][0], layers.expected(0, x, 4)[0])


def test_a_step_that_is_given_up_ends(team: Team, serving: Serving) -> None:
    served = serving(formats=("Q8_0", "Q8_0"), sizes=(64, 64))
    served.serve.begin(3)
    team.submit(served.program)
    assert served.program.running
    served.serve.abort()
    served.program.wait()


@pytest.mark.parametrize("by", ["the GPU", "the host"])
def test_nobody_waits_for_a_chunk_of_a_step_that_is_given_up(
    by: str, team: Team, serving: Serving
) -> None:
    """One of gate and up is missing; the other step in flight counts for nothing."""
    served = serving()
    layers = served.layers
    program = served.program
    x = np.ones((1, 256), np.float32)
    misses = np.array([0 | 4 << 16, 1 | 2 << 16], np.uint32)
    failed = served.memory[exchange.FAILED :][:16].view(np.uint32).reshape(2, 2)
    failed[(EPOCH + 1) % 2, 0] = exchange.failed_number(EPOCH + 1)
    a = serve_record(int(program._jobs["args"][program.names.index("0.serve")]))
    with trouble([served.serve], 0, GATE_UP, undone):
        served.post(0, layers.records(0, x), misses, EPOCH)
        served.serve.begin(EPOCH)
        team.submit(program)
        while not 0 < a["n_gate_up"] == served.shared.finished[:2].sum() + 1:
            pass
        assert program.running
        if by == "the GPU":
            failed[EPOCH % 2, 0] = exchange.failed_number(EPOCH)
        else:
            served.serve.abort()
        program.wait()
    assert 0 in served.answers(0, 2)[1]  # some words were never written

    served.post(0, layers.records(0, x), misses, EPOCH + 2)
    served.run(EPOCH + 2)
    expected = [layers.expected(0, x, expert)[0] for expert in (4, 2)]
    assert np.array_equal(served.answers(0, 2)[0], expected)


def test_a_forecast_that_nobody_looks_at_harms_nothing(serving: Serving) -> None:
    served = serving(n_layers=2)
    layers = served.layers
    served.shared.missing[:] = 0
    forecast_of(served, [[0, 9, 8, 7, 6, 5]])
    x = np.ones((1, 256), np.float32)
    served.post(0, layers.records(0, x), np.array([5 << 16], np.uint32), EPOCH)
    with trouble([served.serve], 0, FORECAST, undone) as met:
        served.run(is_last=True)
    assert met.n_met == 1
    assert served.shared.listed[0] == 0
    assert np.array_equal(served.answers(0, 1)[0][0], layers.expected(0, x, 5)[0])


def forecast_of(served: Served, rows: list[list[float]]) -> None:
    """The forecasts that come with the next post, a row for each token."""
    values = np.zeros((len(rows), FORECAST_STRIDE // 4), np.float32)
    values[:, :N_EXPERT] = rows
    place = served.memory[served.layout.forecasts_offset :][: values.nbytes]
    place[:] = values.reshape(-1).view(np.uint8)
    served.memory[exchange.FORECAST :][:4].view(np.uint32)[0] = FORECAST_STRIDE


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([[0, 9, 8, 7, 6, 5]], [2, 3]),
        ([[9, 0, 0, 8, 7, 1], [0, 9, 8, 7, 0, 0]], [3, 2]),
        ([[9, 8, 0, 0, 0, 7]], [5]),
        ([[9, 8, 0, 0, 7, 0]], []),
    ],
)
def test_a_forecast_names_what_the_cpu_would_have_to_compute(
    rows: list[list[float]], expected: list[int], team: Team, serving: Serving
) -> None:
    """Three experts a token are chosen; 0, 1 and 4 of the next layer are on the GPU."""
    served = serving(2, n_layers=2)
    layers = served.layers
    served.shared.missing[1] = [1, 1, 0, 0, 1, 0]
    x = np.ones((len(rows), 256), np.float32)
    forecast_of(served, rows)
    served.post(0, layers.records(0, x), np.array([1 | 5 << 16], np.uint32), EPOCH)
    served.run(is_last=True)
    n_listed = int(served.shared.listed[0])
    assert served.shared.listed[1 : 1 + n_listed].tolist() == expected
    fetches = served.program.names.index("1.fetch_ahead")
    assert served.program.n_chunks[fetches] == (team.n_threads if expected else 0)


@pytest.mark.parametrize("foreseen", [0, 1, 2])
def test_a_forecast_without_misses_is_taken_while_it_is_the_last_one(
    foreseen: int, team: Team, serving: Serving
) -> None:
    """Of layer 0, or a later one that passed meanwhile."""
    served = serving(n_layers=3)
    served.shared.missing[:] = 0
    forecast_of(served, [[0, 9, 8, 7, 6, 5]])
    served.memory[exchange.N_TOKENS :][:4].view(np.uint32)[0] = 1
    served.memory[exchange.FORESEEN :][:4].view(np.uint32)[0] = sequence(EPOCH, 3, foreseen)
    served.run(is_last=True)
    names, chunks = served.program.names, served.program.n_chunks
    fetched = [chunks[names.index(f"{layer}.fetch_ahead")] for layer in (1, 2)]
    assert fetched == [team.n_threads * (foreseen == layer) for layer in (0, 1)]
    assert served.shared.listed[0] == (3 if foreseen < 2 else 0)


def test_a_forecast_that_is_torn_harms_nothing(serving: Serving) -> None:
    served = serving(n_layers=2)
    layers = served.layers
    served.shared.missing[:] = 0
    forecast_of(served, [[np.nan, np.nan, np.nan, 1, np.nan, np.inf]])
    x = np.ones((1, 256), np.float32)
    served.post(0, layers.records(0, x), np.array([5 << 16], np.uint32), EPOCH)
    served.run(is_last=True)
    assert np.array_equal(served.answers(0, 1)[0][0], layers.expected(0, x, 5)[0])


def test_without_a_forecast_nothing_is_fetched_ahead(serving: Serving) -> None:
    served = serving(n_layers=2)
    layers = served.layers
    served.shared.missing[:] = 0
    served.post(0, layers.records(0, np.ones((1, 256), np.float32)), np.array([5 << 16]), EPOCH)
    served.run(is_last=True)
    assert served.shared.listed[0] == 0


def test_a_late_worker_fetches_nothing_once_the_gpu_has_posted(serving: Serving) -> None:
    """What the second layer misses is posted before the first one's program begins."""
    served = serving(n_layers=2)
    layers = served.layers
    served.shared.missing[:] = 0
    x = np.ones((1, 256), np.float32)
    forecast_of(served, [[1, 2, 3, 4, 5, 6]])
    served.post(1, layers.records(1, x), np.array([5 << 16], np.uint32), EPOCH)
    served.run()
    assert served.shared.listed[0] == 0
    assert np.array_equal(served.answers(1, 1)[0][0], layers.expected(1, x, 5)[0])
