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
from tests.support.cases.case import Array, Case, Outcome
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


def run(shape: Shape, machine: Machine) -> Outcome:
    """Launch it over an exchange in which the answers wait."""
    rng = np.random.default_rng(shape.n_rows)
    launch = MailboxLaunch(
        shape.most_tokens * shape.n_used, shape.most_tokens, shape.record_bytes, shape.n_rows
    )
    layout = ExchangeLayout(
        launch.n_slots, launch.n_tokens, shape.record_bytes, shape.n_rows, shape.forecast_bytes
    )
    n_slots = shape.n_tokens * shape.n_used
    missing = list(range(0, n_slots, shape.every)) if shape.every else []
    table = rng.integers(1, 1 << 40, (launch.n_slots, 4), np.uint64)
    table[missing] = 0
    choices = rng.integers(0, 1 << 16, launch.n_slots).astype(np.int32)
    records = rng.integers(0, 256, (launch.n_tokens, shape.record_bytes)).astype(np.uint8)
    forecast = rng.integers(0, 256, shape.forecast_bytes).astype(np.uint8)
    answers = rng.normal(size=(len(missing), shape.n_rows)).astype(np.float32)
    y = np.full((launch.n_slots, shape.n_rows), np.float32(7.5))
    order = rng.permutation(n_slots).astype(np.int32)
    number = sequence(shape.epoch, N_LAYERS, LAYER)
    shared = _exchange(layout, number, None if shape.silent else answers)
    state = np.zeros(4, np.uint32)
    state[2 + shape.failed % 2] = failed_number(shape.failed)
    places = {
        "epoch": machine.place(np.array([shape.epoch], np.uint32), writable=False),
        "counts": machine.place(
            np.array([shape.n_tokens, 9, 9, shape.ahead], np.uint32), writable=False
        ),
        "experts": machine.place(table, writable=False),
        "choices": machine.place(choices, writable=False),
        "records": machine.place(records, writable=False),
        "y": machine.place(y),
        "slots": machine.place(order, writable=False) if shape.sorted else 0,
        "exchange": machine.place(shared),
        "state": machine.place(state.copy()),
    }
    at = machine.place(forecast, writable=False) if len(forecast) else 0
    sizes = launch.sizes(layout, Forecast(at, FORECAST_STRIDE, len(forecast)))
    if shape.n_publishers:
        sizes["publishers"] = shape.n_publishers
    machine.launch(
        mailbox(),
        (shape.n_blocks,) if shape.n_blocks else launch.grid,
        {**places, **sizes, "patience": PATIENCE_NS, "layer": LAYER, "n_layers": N_LAYERS},
        shared_bytes=launch.shared_bytes,
    )
    result = [
        machine.read(places["y"], np.uint8, y.nbytes),
        machine.read(places["exchange"], np.uint8, layout.n_bytes),
        machine.read(places["state"], np.uint8, STATE_BYTES),
    ]
    runs = shape.failed != shape.epoch and not (shape.ahead and shape.failed == shape.epoch - 1)
    if runs and (missing or len(forecast)):
        _store(shared, exchange.N_TOKENS, shape.n_tokens)
        _store(shared, exchange.FORECAST, FORECAST_STRIDE)
        _store(shared, exchange.FORESEEN, number - 1 if missing else number)
        shared[layout.forecasts_offset :][: len(forecast)] = forecast
    if runs and missing:
        _post(shared, layout, missing, choices, records[: shape.n_tokens])
        _store(shared, exchange.POSTED, number)
        if shape.silent:
            place = exchange.FAILED + 8 * (shape.epoch % 2)
            _store(shared, place, failed_number(shape.epoch))
            _store(shared, place + 4, LAYER)
            state[2 + shape.epoch % 2] = failed_number(shape.epoch)
        else:
            rows = order[missing].tolist() if shape.sorted else missing
            y = mailbox_reference(y, rows, answers)
    # The list goes out in units of four: what lies behind its end does not matter.
    behind = slice(exchange.MISSES + 4 * len(missing), layout.records_offset)
    result[1][behind] = shared[behind]
    expected = [y.reshape(-1).view(np.uint8), shared, state.view(np.uint8)]
    return Outcome(np.concatenate(result), np.concatenate(expected))


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
