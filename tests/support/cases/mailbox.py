"""The mailbox against its reference: the answers lie in the exchange before the launch.

The result of a case is all that the kernel may write: y, its state and the whole exchange.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from ops import exchange
from ops.exchange import ExchangeLayout, failed_number, sequence
from ops.gpu.mailbox import STATE_BYTES, Forecast, MailboxLaunch, mailbox, mailbox_reference
from tests.support.cases.case import Array, Case, Outcome, given
from tests.support.machines import Machine

EPOCH, N_LAYERS, LAYER = 0xF012_3456, 48, 17
UNTOUCHED = 0x5A
PATIENCE_NS = 131072
FORECAST_STRIDE = 272


@dataclass(frozen=True)
class Shape:
    """n_tokens of a graph for `most_tokens`; every `every`th slot misses, 0: none.

    failed the last step that failed before
    silent no answer comes
    sorted the rows of y have another order than the slots
    ahead  the step was launched before the one before had ended
    epoch  of the step
    forecast_bytes  of what is handed over besides
    """

    n_tokens: int
    most_tokens: int
    n_used: int
    n_rows: int
    record_bytes: int
    every: int
    failed: int = EPOCH - 1
    silent: bool = False
    sorted: bool = False
    n_blocks: int = 0
    n_publishers: int = 0
    ahead: bool = False
    forecast_bytes: int = 0
    epoch: int = EPOCH


SMALL = {
    "one token": Shape(1, 1, 8, 96, 320, 3, forecast_bytes=80),
    "no miss": Shape(2, 4, 3, 32, 64, 0),
    "no miss, a forecast": Shape(2, 4, 3, 32, 64, 0, n_blocks=2, forecast_bytes=5120),
    "a forecast of a failed step": Shape(2, 4, 3, 32, 64, 0, failed=EPOCH, forecast_bytes=80),
    "a failed step": Shape(2, 4, 3, 32, 64, 1, failed=EPOCH),
    "an odd one": Shape(2, 4, 3, 32, 64, 1, failed=EPOCH + 1, epoch=EPOCH + 1),
    "behind a failed step": Shape(2, 4, 3, 32, 64, 1, ahead=True),
    "an odd one behind": Shape(2, 4, 3, 32, 64, 1, failed=EPOCH, epoch=EPOCH + 1, ahead=True),
    "the first number of all": Shape(1, 1, 3, 32, 64, 1, failed=2**32 - 2, epoch=0, ahead=True),
    "ahead": Shape(1, 1, 3, 32, 64, 1, failed=EPOCH - 2, ahead=True),
    "several blocks": Shape(3, 4, 2, 1300, 9024, 2, sorted=True, n_blocks=3, n_publishers=2),
    "a long forecast": Shape(3, 3, 2, 2, 64, 2, forecast_bytes=5120),
    "slots for two scans": Shape(31, 31, 20, 2, 64, 7),
    "in vain": Shape(2, 2, 3, 1400, 64, 1, silent=True, n_blocks=2, n_publishers=1),
    "in vain, odd": Shape(1, 1, 3, 32, 64, 1, failed=EPOCH, silent=True, epoch=EPOCH + 1),
}

LARGE = {
    "one token, 2048": Shape(1, 1, 8, 2048, 2304, 8, forecast_bytes=512),
    "31 tokens, 4096": Shape(31, 31, 8, 4096, 4608, 2),
}


class Handing:
    """One launch: what it is given, and what it changes: y, its state and the whole exchange."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        rng = np.random.default_rng(shape.n_rows)
        n_bytes, n_rows, n_slots = shape.record_bytes, shape.n_rows, shape.n_tokens * shape.n_used
        most = shape.most_tokens
        self.launch = launch = MailboxLaunch(most * shape.n_used, most, n_bytes, n_rows)
        self.layout = ExchangeLayout(launch.n_slots, most, n_bytes, n_rows, shape.forecast_bytes)
        self.missing = list(range(0, n_slots, shape.every)) if shape.every else []
        self.table = rng.integers(1, 1 << 40, (launch.n_slots, 4), np.uint64)
        self.table[self.missing] = 0
        self.choices = rng.integers(0, 1 << 16, launch.n_slots).astype(np.int32)
        self.records = rng.integers(0, 256, (most, n_bytes)).astype(np.uint8)
        self.forecast = rng.integers(0, 256, shape.forecast_bytes).astype(np.uint8)
        self.answers = rng.normal(size=(len(self.missing), n_rows)).astype(np.float32)
        self.y = np.full((launch.n_slots, n_rows), np.float32(7.5))
        self.order = rng.permutation(n_slots).astype(np.int32)
        self.number = sequence(shape.epoch, N_LAYERS, LAYER)
        answers = None if shape.silent else self.answers
        self.exchange = _exchange(self.layout, self.number, answers)
        self.state = np.zeros(4, np.uint32)
        self.state[2 + shape.failed % 2] = failed_number(shape.failed)

    def arguments(self, m: Machine) -> dict[str, float]:
        """Without the places of what it changes."""
        shape, n_bytes = self.shape, len(self.forecast)
        forecast = Forecast(given(m, self.forecast, n_bytes), FORECAST_STRIDE, n_bytes)
        publishers = {"publishers": shape.n_publishers} if shape.n_publishers else {}
        return {
            "epoch": given(m, np.array([shape.epoch], np.uint32)),
            "counts": given(m, np.array([shape.n_tokens, 9, 9, shape.ahead], np.uint32)),
            "experts": given(m, self.table),
            "choices": given(m, self.choices),
            "records": given(m, self.records),
            "slots": given(m, self.order, shape.sorted),
            **self.launch.sizes(self.layout, forecast),
            **publishers,
            "patience": PATIENCE_NS,
            "layer": LAYER,
            "n_layers": N_LAYERS,
        }

    def perform(self) -> None:
        """What the kernel does."""
        shape, shared, missing = self.shape, self.exchange, self.missing
        if shape.failed == shape.epoch or (shape.ahead and shape.failed == shape.epoch - 1):
            return
        if missing or len(self.forecast):
            _store(shared, exchange.N_TOKENS, shape.n_tokens)
            _store(shared, exchange.FORECAST, FORECAST_STRIDE)
            _store(shared, exchange.FORESEEN, self.number - 1 if missing else self.number)
            shared[self.layout.forecasts_offset :][: len(self.forecast)] = self.forecast
        if not missing:
            return
        _post(shared, self.layout, missing, self.choices, self.records[: shape.n_tokens])
        _store(shared, exchange.POSTED, self.number)
        if shape.silent:
            place = exchange.FAILED + 8 * (shape.epoch % 2)
            _store(shared, place, failed_number(shape.epoch))
            _store(shared, place + 4, LAYER)
            self.state[2 + shape.epoch % 2] = failed_number(shape.epoch)
        else:
            rows = self.order[missing].tolist() if shape.sorted else missing
            self.y = mailbox_reference(self.y, rows, self.answers)


def run(shape: Shape, m: Machine) -> Outcome:
    """Launch it over an exchange in which the answers wait."""
    handing = Handing(shape)
    launch = handing.launch
    changed = {"y": handing.y, "exchange": handing.exchange, "state": handing.state}
    places = {name: m.place(array.copy()) for name, array in changed.items()}
    m.launch(
        mailbox(),
        (shape.n_blocks,) if shape.n_blocks else launch.grid,
        handing.arguments(m) | places,
        shared_bytes=launch.shared_bytes,
    )
    sizes = {"y": handing.y.nbytes, "exchange": handing.layout.n_bytes, "state": STATE_BYTES}
    result = {name: m.read(at, np.uint8, sizes[name]) for name, at in places.items()}
    handing.perform()
    # The list goes out in units of four: what lies behind its end does not matter.
    behind = slice(exchange.MISSES + 4 * len(handing.missing), handing.layout.records_offset)
    result["exchange"][behind] = handing.exchange[behind]
    expected = [
        handing.y.reshape(-1).view(np.uint8),
        handing.exchange,
        handing.state.view(np.uint8),
    ]
    return Outcome(np.concatenate(list(result.values())), np.concatenate(expected))


def _exchange(layout: ExchangeLayout, number: int, answers: Array | None) -> Array:
    """The memory as the CPU leaves it; stale words carry the number of an earlier layer."""
    memory = np.full(layout.n_bytes, UNTOUCHED, np.uint8)
    memory[exchange.HEARTBEAT :][:8] = 1
    _store(memory, exchange.SERVED, number)
    words = memory[layout.answers_offset :].view(np.uint32)
    words[1::2] = number - 1
    if answers is not None:
        filled = words[: 2 * answers.size].reshape(-1, 2)
        filled[:, 0] = answers.reshape(-1).view(np.uint32)
        filled[:, 1] = number
    return memory


def _post(
    memory: Array, layout: ExchangeLayout, missing: list[int], choices: Array, records: Array
) -> None:
    """What the kernel hands over."""
    _store(memory, exchange.N_MISSES, len(missing))
    pairs = np.array(missing, np.uint32) | choices[missing].astype(np.uint32) << 16
    memory[exchange.MISSES :][: pairs.nbytes] = pairs.view(np.uint8)
    memory[layout.records_offset :][: records.size] = records.reshape(-1)


def _store(memory: Array, at: int, value: int) -> None:
    """A u32 word."""
    memory[at:][:4] = np.array([value], np.uint32).view(np.uint8)


def cases() -> Iterator[Case]:
    """Small exchanges for the interpreter; real sizes for a GPU."""
    for shapes, large in ((SMALL, False), (LARGE, True)):
        for name, shape in shapes.items():
            yield Case(name, mailbox(), partial(run, shape), large)
