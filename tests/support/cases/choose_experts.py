"""choose_experts: sum and norm as `norm`, then products, choices and weights bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial

import numpy as np

from ops.arithmetic import activation_layout, quantize_rows
from ops.gpu.choose_experts import (
    ChoiceLaunch,
    choice_launch,
    choose_experts,
    launches,
)
from ops.gpu.linear import linear_reference
from ops.gpu.norm import norm_reference
from ops.gpu.router import (
    SIGMOID,
    SOFTMAX,
    SOFTMAX_SELECTED,
    Routing,
    route_reference,
    sigmoid,
)
from ops.quants import BlockFormat
from ops.quants.block import F32, ActivationKind
from tests.support.blocks import random_rows
from tests.support.cases.case import Array, Case, Outcome, given, normal_of
from tests.support.cases.expert import place_matrix
from tests.support.cases.norm import differing, put_record
from tests.support.cases.router import ExpertTable
from tests.support.machines import Machine

RELATIVE, EPS = 1e-6, 1e-6
UNTOUCHED = 0x33
"""What bytes hold that no block writes."""


@dataclass(frozen=True)
class Setting:
    """A router behind a norm.

    tokens  of the step; the grid has one more
    ahead   rows of another router of the same input
    every   see `in_place_word`, of every other expert; 0: all have addresses
    """

    n: int
    n_expert: int
    routing: Routing
    tokens: int = 2
    pairs: int = 2
    delta: bool = True
    biased: bool = False
    shared: bool = False
    ahead: int = 0
    every: int = 0
    table: bool = True
    kinds: tuple[ActivationKind, ...] = ("f32",)


SMALL = {
    "softmax of 24, a shared expert, a router ahead": Setting(
        256,
        24,
        Routing(4, renormalise=True),
        shared=True,
        ahead=6,
        kinds=("f32", "q8_256", "q8_32"),
    ),
    "softmax of 300, a router ahead": Setting(64, 300, Routing(10, renormalise=True), ahead=6),
    "groups, rows behind four steps": Setting(
        704, 64, Routing(6, SIGMOID, 8, 3, True, 2.5), 1, 4, biased=True
    ),
    "chosen first, in groups": Setting(64, 264, Routing(6, SOFTMAX_SELECTED, 8, 3), 1, biased=True),
    "softmax of 600": Setting(64, 600, Routing(3), 1, 4, shared=True, table=False),
    "softmax in groups, some in place, nothing added": Setting(
        64,
        128,
        Routing(8, SOFTMAX, 4, 2, True),
        pairs=1,
        delta=False,
        every=3,
        kinds=("f32", "q8_32"),
    ),
}

LARGE = {
    "128 of 2048": Setting(2048, 128, Routing(8, renormalise=True), 7, kinds=("f32", "q8_256")),
    "one token, ahead": Setting(2048, 128, Routing(8, renormalise=True), 1, ahead=128),
    "64 of 2048": Setting(2048, 64, Routing(8), 7, 1),
    "512 of 2048": Setting(2048, 512, Routing(10, renormalise=True), 3, shared=True),
    "160 of 4096": Setting(4096, 160, Routing(8, SIGMOID, 1, 1, True, 2.5), 3, 1, biased=True),
}


class Operands:
    """Host arrays of a setting."""

    def __init__(self, setting: Setting, fmt: BlockFormat) -> None:
        rng = np.random.default_rng(setting.n)
        shape = setting.tokens, setting.n

        normal = normal_of(rng)
        self.x, self.delta, self.weight = normal(*shape), normal(*shape), normal(setting.n)
        sizes = [setting.n_expert, int(setting.shared), setting.ahead]
        self.rows = [n_rows for n_rows in sizes if n_rows]
        self.matrices = [
            random_rows(fmt, n_rows, setting.n, seed) for seed, n_rows in enumerate(self.rows)
        ]
        self.matrices[0][2::7] = self.matrices[0][0]  # equals
        lowest: F32 = np.full(setting.n_expert, -100, np.float32)  # equals stay so
        self.has_ahead = setting.ahead > 0
        self.biases: list[F32 | None] = [lowest if setting.ahead else None]
        self.biases += [None] if setting.shared else []
        self.biases += [normal(setting.ahead)] if setting.ahead else []
        self.starts = np.cumsum([0, *(-(-n_rows // 4) * 4 for n_rows in self.rows)]).tolist()
        self.stride = self.starts[-1]
        self.n_polled = self.starts[1 + setting.shared]
        self.preference = normal(setting.n_expert) if setting.biased else None
        self.table = ExpertTable(rng, setting.n_expert, setting.every)

    def place_matrices(self, machine: Machine) -> dict[str, float]:
        """Addresses of matrices and biases; a gate has no bias."""
        places = [place_matrix(machine, matrix) for matrix in self.matrices]
        biases = [given(machine, bias) for bias in self.biases]
        n_ahead = self.rows[-1] if self.has_ahead else 0
        return {
            "router": places[0],
            "router_bias": biases[0],
            "gate": places[1] if len(self.rows) - self.has_ahead == 2 else 0,
            "ahead": places[-1] if n_ahead else 0,
            "ahead_bias": biases[-1] if n_ahead else 0,
            "n_ahead": n_ahead,
        }

    def products(self, fmt: BlockFormat, normed: F32) -> list[F32]:
        records = quantize_rows("f32", normed)
        pairs = zip(self.matrices, self.biases, strict=True)
        return [linear_reference(fmt, matrix, records, bias) for matrix, bias in pairs]


def run(setting: Setting, fmt: BlockFormat, launch: ChoiceLaunch, machine: Machine) -> Outcome:
    """Two launches, the second over what the first left, without f32 rows: how many bytes of x_to,
    products, words, choices, weights, addresses and forms are wrong; ratios of the normed rows.
    """
    o, tokens, k = Operands(setting, fmt), setting.tokens, setting.routing.n_used
    launched = tokens + 1
    widths = {kind: activation_layout(kind, setting.n)[2] for kind in setting.kinds}
    forms = {kind: np.full((launched, w), UNTOUCHED, np.uint8) for kind, w in widths.items()}
    outs: dict[str, Array] = {
        "x_to": np.full(o.x.shape, UNTOUCHED, np.float32),
        "y": np.full((tokens, o.stride), UNTOUCHED, np.float32),
        "words": np.zeros((tokens, o.stride), np.uint32),
        "choices": np.full((launched, k), UNTOUCHED, np.int32),
        "weights": np.full((launched, k), UNTOUCHED, np.float32),
        "experts": np.full((launched * k, 4), UNTOUCHED, np.uint64),
        "shared_weights": np.full(launched, UNTOUCHED, np.float32),
    }
    places = {name: machine.place(out) for name, out in outs.items()}
    form_places = {kind: machine.place(form) for kind, form in forms.items()}
    arguments = {
        **_given(setting, o, machine),
        **places,
        **{name: form_places.get(kind, 0) for name, kind in FORMS.items()},
        "router_blocks": launch.blocks(setting.n_expert),
        "pairs": launch.pairs,
    }
    for others in ({"rehearse": 0}, {"rehearse": 1, "out_f32": 0}):
        machine.launch(
            choose_experts(fmt, launch),
            launch.grid(o.rows, launched),
            {**arguments, **others},
            shared_bytes=launch.shared_bytes(fmt, setting.n, setting.n_expert),
        )

    summed, expected_normed = norm_reference(o.x, o.weight, EPS, o.delta if setting.delta else None)
    read_forms = {
        kind: machine.read(at, np.uint8, forms[kind].shape) for kind, at in form_places.items()
    }
    normed = np.ascontiguousarray(read_forms["f32"][:tokens, : 4 * setting.n]).view(np.float32)
    products = o.products(fmt, normed)
    choices, weights = route_reference(products[0], setting.routing, o.preference)
    expected = {name: out.copy() for name, out in outs.items()}
    if setting.delta:
        expected["x_to"] = summed
    if setting.ahead:
        at = o.starts[len(o.rows) - 1]
        expected["y"][:, at : at + setting.ahead] = products[-1]
    expected["choices"][:tokens], expected["weights"][:tokens] = choices, weights
    if setting.table:
        expected["experts"][: tokens * k] = o.table.of(choices)
        expected["experts"][tokens * k :] = 0
    if setting.shared:
        expected["shared_weights"][:tokens] = sigmoid(products[1][:, 0])
    read = {name: machine.read(places[name], out.dtype, out.shape) for name, out in outs.items()}
    wrong = [differing(read[name], out) for name, out in expected.items()]
    for kind, records in read_forms.items():
        put_record(kind, setting.n, forms[kind][:tokens], quantize_rows(kind, normed))
        wrong.append(differing(records, forms[kind]))
    result = np.concatenate([np.array(wrong), (normed / expected_normed).reshape(-1)])
    return Outcome(result, np.concatenate([np.zeros(len(wrong)), np.ones(normed.size)]), RELATIVE)


FORMS: dict[str, ActivationKind] = {"out_f32": "f32", "q8_256": "q8_256", "q8_32": "q8_32"}


def _given(setting: Setting, o: Operands, machine: Machine) -> dict[str, float]:
    """What a launch reads."""
    return {
        **o.place_matrices(machine),
        "x": given(machine, o.x),
        "n": setting.n,
        "count": given(machine, np.array([setting.tokens], np.uint32)),
        "delta": given(machine, o.delta, setting.delta),
        "weight": given(machine, o.weight),
        "eps": EPS,
        "y_stride": o.stride,
        "n_polled": o.n_polled,
        "gate_column": o.starts[1] if setting.shared else 0,
        "bias": given(machine, o.preference),
        "n_expert": setting.n_expert,
        **asdict(setting.routing),
        "table": o.table.place(machine) if setting.table else 0,
        "in_place": int(setting.every > 0),
    }


def cases() -> Iterator[Case]:
    """The small settings for what ships; real ones for the block that takes them."""
    for launch, fmt in launches():
        for title, setting in SMALL.items():
            yield _case(title, setting, fmt, replace(launch, pairs=setting.pairs))
        for title, setting in LARGE.items():
            if launch == choice_launch(setting.n, setting.n_expert, overlapped=True):
                chosen = replace(launch, pairs=setting.pairs)
                yield _case(title, setting, fmt, chosen, large=True)


def _case(
    title: str, setting: Setting, fmt: BlockFormat, launch: ChoiceLaunch, *, large: bool = False
) -> Case:
    return Case(title, choose_experts(fmt, launch), partial(run, setting, fmt, launch), large)
