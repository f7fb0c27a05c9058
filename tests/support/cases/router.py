"""route and group: choices, weights and slots have the bits of `ops.gpu.router`'s references."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ops.gpu.kernel import Kernel
from ops.gpu.router import (
    ROUTE_BLOCKS,
    SIGMOID,
    SOFTMAX_SELECTED,
    Routing,
    group,
    group_reference,
    group_shared_bytes,
    in_place,
    in_place_word,
    route,
    route_block,
    route_reference,
    sigmoid,
)
from ops.quants.block import F32
from tests.support.cases.case import Array, Case, Outcome, given, joined_bytes
from tests.support.machines import Machine

UNTOUCHED = 77
"""What lies where no block writes."""


@dataclass(frozen=True)
class Setting:
    """A router and what it is given.

    gap     values between the logits of two tokens
    shared  there is a shared expert with a gate
    counted the grid has a token more than there are
    every   half of the experts have no address, and some of those are read in place; 0: all have
    late    what the kernel reads is older than its predecessor
    """

    n_expert: int
    routing: Routing
    tokens: int = 6
    gap: int = 0
    biased: bool = False
    shared: bool = False
    table: bool = True
    counted: bool = False
    every: int = 0
    late: bool = False


SMALL = {
    "softmax of 60": Setting(60, Routing(4, renormalise=True), gap=1, shared=True, counted=True),
    "softmax of 128": Setting(128, Routing(8, scale=2.5), table=False),
    "softmax of 60, late": Setting(
        60, Routing(4, renormalise=True), gap=1, shared=True, counted=True, late=True
    ),
    "softmax of 300, more than 8": Setting(300, Routing(10, renormalise=True)),
    "chosen first, of 32": Setting(32, Routing(4, SOFTMAX_SELECTED)),
    "all of 5": Setting(5, Routing(5)),
    "groups": Setting(64, Routing(6, SIGMOID, 8, 3, True, 2.5), biased=True),
    "chosen first, in groups": Setting(264, Routing(6, SOFTMAX_SELECTED, 8, 3), biased=True),
    "softmax in groups": Setting(40, Routing(5, n_groups=4, n_groups_used=2)),
    "some in place": Setting(128, Routing(8, renormalise=True), every=3),
    "chosen first, every other one in place": Setting(32, Routing(4, SOFTMAX_SELECTED), every=2),
    "softmax of 600": Setting(600, Routing(3)),
    "groups of one": Setting(8, Routing(3, SIGMOID, 8, 4), biased=True),
}

LARGE = {
    "softmax of 128, 6 tokens": Setting(128, Routing(8, renormalise=True)),
    "softmax of 128, 31 tokens": Setting(128, Routing(8, renormalise=True), 31, counted=True),
    "softmax of 512": Setting(512, Routing(10, renormalise=True), 31, shared=True),
    "sigmoid of 256": Setting(256, Routing(8, SIGMOID, 8, 4, True, 2.5), 31, biased=True),
    "sigmoid of 384": Setting(384, Routing(8, SIGMOID, 1, 1, True, 2.827), 8, biased=True),
    "chosen first, of 128": Setting(128, Routing(4, SOFTMAX_SELECTED), 4096),
}


class ExpertTable:
    """A layer's rows of addresses; every other expert is read in place, by each `every`th token
    that chooses it, where `every` is not 0."""

    def __init__(self, rng: np.random.Generator, n_expert: int, every: int) -> None:
        self._rows = rng.integers(1, 1 << 60, (n_expert, 4), np.uint64)
        self._host_rows = rng.integers(1, 1 << 60, self._rows.shape, np.uint64)
        self._every = every

    def place(self, machine: Machine) -> int:
        """Its address."""
        if self._every:
            first = given(machine, self._host_rows)
            self._rows[::2, :3] = 0
            for expert in range(0, len(self._rows), 2):
                self._rows[expert, 3] = in_place_word(first + 32 * expert, self._every)
        return given(machine, self._rows)

    def of(self, choices: NDArray[np.int32]) -> NDArray[np.uint64]:
        """u64[n_slots, 4]: the rows of the chosen."""
        flat = choices.reshape(-1)
        rows = self._rows[flat]
        if self._every:
            pulled = in_place(choices % 2 == 0, self._every).reshape(-1)
            rows[pulled, :3] = self._host_rows[flat[pulled], :3]
        return rows


def logits_of(setting: Setting) -> F32:
    """Plain rows, then ties and zeros of both signs, infinities, NaNs, and nothing but NaNs."""
    n = setting.n_expert
    x = (np.random.default_rng(n).normal(size=(setting.tokens, n)) * 3).astype(np.float32)
    x[1] = np.resize(np.array([2, 0.0, -0.0, 2, -1], np.float32), n)
    x[2, n // 2 :] = -np.inf
    x[3, n // 3] = np.nan
    x[4] = np.nan
    x[5, ::2] = np.inf
    return x


def run_route(setting: Setting, kernel: Kernel, machine: Machine) -> Outcome:
    """Choices, weights, addresses and the shared weights, all as bytes; NaNs made alike."""
    logits, routing, n = logits_of(setting), setting.routing, setting.n_expert
    tokens, k = setting.tokens, routing.n_used
    launched = tokens + setting.counted
    rng = np.random.default_rng(1)
    bias = rng.normal(size=n).astype(np.float32) if setting.biased else None
    experts = ExpertTable(rng, n, setting.every)
    joined = np.zeros((tokens, n + setting.gap), np.float32)
    joined[:, :n] = logits
    gates = np.array([[0.5, 9], [-80, 9], [np.inf, 9], [np.nan, 9]], np.float32)
    gates = np.resize(gates, (tokens, 2))
    outs: dict[str, Array] = {
        "choices": np.full((launched, k), UNTOUCHED, np.int32),
        "weights": np.full((launched, k), UNTOUCHED, np.float32),
        "experts": np.full((launched * k, 4), UNTOUCHED, np.uint64),
        "shared_weights": np.full(launched, UNTOUCHED, np.float32),
    }
    places = {name: machine.place(out) for name, out in outs.items()}
    machine.launch(
        kernel,
        (launched,),
        {
            "logits": given(machine, joined),
            "logits_stride": n + setting.gap,
            "count": given(machine, np.array([tokens], np.uint32), setting.counted),
            "bias": given(machine, bias),
            "n_expert": n,
            **asdict(routing),
            "table": experts.place(machine) if setting.table else 0,
            "in_place": int(setting.every > 0),
            "shared_logits": given(machine, gates, setting.shared),
            "shared_stride": 2,
            "late": int(setting.late),
            **places,
        },
    )
    choices, weights = route_reference(logits, routing, bias)
    read = [machine.read(places[name], out.dtype, out.shape) for name, out in outs.items()]
    outs["choices"][:tokens], outs["weights"][:tokens] = choices, weights
    if setting.table:
        outs["experts"][: tokens * k] = experts.of(choices)
        outs["experts"][tokens * k :] = 0
    if setting.shared:
        outs["shared_weights"][:tokens] = sigmoid(gates[:, 0])
    return Outcome(joined_bytes(read), joined_bytes(outs.values()))


def run_group(n_expert: int, tokens: int, k: int, kernel: Kernel, machine: Machine) -> Outcome:
    """Offsets, slots and the tokens of the slots in one array."""
    rng = np.random.default_rng(n_expert)
    skewed = (n_expert * rng.random((tokens, k)) ** 3).astype(np.int32)
    choices = np.minimum(skewed, n_expert - 2)
    offsets = machine.place(np.zeros(n_expert + 1, np.int32))
    slots = machine.place(np.zeros((tokens, k), np.int32))
    slot_tokens = machine.place(np.zeros(tokens * k, np.int32))
    machine.launch(
        kernel,
        (1,),
        {
            "choices": machine.place(choices, writable=False),
            "count": machine.place(np.array([tokens], np.uint32), writable=False),
            "n_used": k,
            "n_expert": n_expert,
            "offsets": offsets,
            "slots": slots,
            "slot_tokens": slot_tokens,
        },
        shared_bytes=group_shared_bytes(n_expert),
    )
    result = [
        machine.read(offsets, np.int32, n_expert + 1),
        machine.read(slots, np.int32, tokens * k),
        machine.read(slot_tokens, np.int32, tokens * k),
    ]
    expected = [part.reshape(-1) for part in group_reference(choices, n_expert)]
    return Outcome(np.concatenate(result), np.concatenate(expected))


def cases() -> Iterator[Case]:
    """The small settings alone and overlapped; real sizes alone."""
    for overlapped in (False, True):
        for block in ROUTE_BLOCKS:
            kernel = route(block, overlapped=overlapped)
            for name, setting in SMALL.items():
                yield Case(name, kernel, partial(run_route, setting, kernel))
        yield from _groups(group(overlapped=overlapped), [(40, 70, 3), (600, 200, 8)])
    for name, setting in LARGE.items():
        kernel = route(route_block(setting.n_expert))
        yield Case(name, kernel, partial(run_route, setting, kernel), large=True)
    yield from _groups(group(), [(128, 31, 8), (128, 4096, 8), (512, 8192, 10)], large=True)


def _groups(
    kernel: Kernel, sizes: list[tuple[int, int, int]], *, large: bool = False
) -> Iterator[Case]:
    for n_expert, tokens, k in sizes:
        run = partial(run_group, n_expert, tokens, k, kernel)
        yield Case(f"{n_expert} experts, {tokens}x{k}", kernel, run, large)
