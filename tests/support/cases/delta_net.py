"""delta_inputs, delta_net, gated_norm: sequences that begin, go on and share a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ops.arithmetic import activation_layout, quantize_rows
from ops.gpu.delta_net import (
    CHUNK_SHARED_BYTES,
    INPUTS_RUN,
    N_TAPS,
    decay_reference,
    delta_chunk,
    delta_chunk_grid,
    delta_inputs,
    delta_inputs_grid,
    delta_inputs_reference,
    delta_net,
    delta_net_grid,
    delta_net_reference,
    gated_norm,
    gated_norm_grid,
    gated_norm_reference,
)
from ops.quants.block import F32, ActivationKind
from tests.support.cases.case import Array, Case, Outcome
from tests.support.machines import Machine

TOLERANCE = 1e-5
EPS = 1e-6
FLOOR = -5.0
UNTOUCHED = 7.5
SLOT_GAP = 20
"""Values between one slot's state and the next, of other layers."""


@dataclass(frozen=True)
class Setting:
    """spans: (tokens, position of the first, slot) of each sequence of the step."""

    n_key_head: int
    n_value_head: int
    dim: int
    spans: tuple[tuple[int, int, int], ...] = ((5, 0, 1), (1, 7, 0), (6, 1, 3), (0, 3, 2))
    wide_decay: bool = False
    has_floor: bool = False
    n_slots: int = 4

    def __str__(self) -> str:
        kind = (
            f"{'wide ' if self.wide_decay else ''}decay{' with a floor' if self.has_floor else ''}"
        )
        lengths = ", ".join(f"{n} at {at}" for n, at, _ in self.spans)
        return f"{self.n_key_head}/{self.n_value_head} x {self.dim}, {kind}, {lengths}"

    @property
    def n_tokens(self) -> int:
        return sum(n for n, _, _ in self.spans)

    @property
    def n_channels(self) -> int:
        return (2 * self.n_key_head + self.n_value_head) * self.dim

    @property
    def width(self) -> int:
        return self.dim if self.wide_decay else 1


SMALL = (
    Setting(2, 6, 16),
    Setting(1, 1, 128, ((5, 0, 1), (1, 7, 0))),
    Setting(1, 2, 32, ((2, 2, 0), (4, 3, 2)), wide_decay=True, has_floor=True),
    Setting(1, 1, 64, ((2, 5, 0),)),
)
LARGE = (
    Setting(16, 48, 128, ((1, 7, 0),)),
    Setting(16, 48, 128, ((1, 7, 0), (1, 0, 2), (1, 1, 1), (1, 900, 3))),
    Setting(16, 48, 128, ((37, 0, 0), (20, 4, 1))),
    Setting(64, 64, 128, ((1, 7, 0), (30, 0, 2)), wide_decay=True, has_floor=True),
)
RUNS = Setting(
    *(1, 2, 32, ((20, 0, 1), (2, 5, 2), (1, 4, 0), (11, 2, 3))), wide_decay=True, has_floor=True
)
"""Sequences that begin, and end, within what a warp of `delta_inputs` takes."""
SMALL_CHUNKS = (
    Setting(1, 2, 16, ((5, 0, 1), (1, 7, 0), (41, 9, 3), (0, 3, 2))),
    Setting(1, 1, 128, ((33, 0, 1), (4, 30, 0)), wide_decay=True, has_floor=True),
    Setting(1, 1, 64, ((18, 31, 0),)),
    Setting(1, 1, 32, ((17, 15, 0),), wide_decay=True, has_floor=True),
    Setting(1, 1, 128, ((35, 3, 1), (4, 14, 0)), wide_decay=True),
    Setting(1, 1, 128, ((17, 16, 0),)),
)
LARGE_CHUNKS = (
    Setting(16, 48, 128, ((512, 0, 0),)),
    Setting(16, 48, 128, ((37, 3, 0), (1, 900, 3), (20, 4, 1))),
    Setting(64, 64, 128, ((200, 7, 0), (30, 0, 2)), wide_decay=True, has_floor=True),
    Setting(64, 64, 128, ((200, 7, 0), (30, 0, 2)), wide_decay=True),
)
NORMS = (("f32", "q8_256", "q8_32"), ("f32",), ("q8_32",))


class Operands:
    """Arrays that kernels share."""

    def __init__(self, setting: Setting, machine: Machine) -> None:
        self.rng = np.random.default_rng(setting.n_channels + setting.n_tokens)
        n_sequences, first = len(setting.spans), 0
        spans, rows = [], []
        for row, (n, position, slot) in enumerate(setting.spans):
            spans.append((first, n, position, slot))
            rows += [row] * n
            first += n
        self.spans = np.array(spans, np.int32)
        counts = np.array([setting.n_tokens, 0, n_sequences, 0], np.uint32)
        self.arguments: dict[str, float] = {
            "counts": machine.place(counts, writable=False),
            "spans": machine.place(np.array([*spans, (0, 9, 9, 0)], np.int32), writable=False),
        }
        self.rows = machine.place(np.array([*rows, 0], np.int32), writable=False)

    def normal(self, *shape: int) -> F32:
        return self.rng.normal(size=shape).astype(np.float32)

    def uniform(self, low: float, high: float, *shape: int) -> F32:
        return self.rng.uniform(low, high, shape).astype(np.float32)


def run_inputs(
    s: Setting, overlapped: bool, run: int, m: Machine, *, late: bool = False
) -> Outcome:
    """Queries, keys, values, decays, betas, and the histories of all slots."""
    operands = Operands(s, m)
    n, channels, n_decays = s.n_tokens, s.n_channels, s.n_value_head * s.width
    x, decays = operands.normal(n + 1, channels + 4), operands.normal(n + 1, n_decays + 8)
    betas = operands.normal(n + 1, s.n_value_head)
    slots = operands.normal(s.n_slots, 3 * channels + SLOT_GAP)
    taps = operands.normal(channels, N_TAPS)
    bias, rate = operands.normal(n_decays), -operands.uniform(0.05, 8, s.n_value_head)
    states = m.place(slots)
    n_key = s.n_key_head * s.dim
    outs = [
        m.place(np.full((n + 1, width), UNTOUCHED, np.float32))
        for width in (channels, n_decays, s.n_value_head)
    ]
    m.launch(
        delta_inputs(overlapped=overlapped),
        delta_inputs_grid(s.n_key_head, s.n_value_head, s.width, n + 1, run),
        {
            **operands.arguments,
            "rows": operands.rows,
            "states": states,
            "x": m.place(x, writable=False),
            "taps_q": m.place(taps[:n_key], writable=False),
            "taps_k": m.place(taps[n_key : 2 * n_key], writable=False),
            "taps_v": m.place(taps[2 * n_key :], writable=False),
            "qkv": outs[0],
            "decays": m.place(decays, writable=False),
            "decay_bias": m.place(bias, writable=False),
            "decay_rate": m.place(rate, writable=False),
            "decay": outs[1],
            "betas": m.place(betas, writable=False),
            "beta": outs[2],
            "slot_bytes": slots.strides[0],
            "x_stride": x.shape[1],
            "n_key_head": s.n_key_head,
            "n_value_head": s.n_value_head,
            "dim": s.dim,
            "decays_stride": decays.shape[1],
            "decay_width": s.width,
            "has_floor": s.has_floor,
            "betas_stride": s.n_value_head,
            "run": run,
            "late": int(late),
            "decay_floor": FLOOR,
            "q_scale": 0.25,
            "l2_eps": EPS,
        },
    )
    qkv = _convolved(s, operands, x, taps, slots)
    decay, beta = (np.full((n + 1, w), UNTOUCHED, np.float32) for w in (n_decays, s.n_value_head))
    floor = FLOOR if s.has_floor else None
    biased = (decays[:n, :n_decays] + bias).reshape(n, s.n_value_head, s.width)
    decay[:n] = decay_reference(biased, rate, floor).reshape(n, -1)
    beta[:n] = 1 / (1 + np.exp(-betas[:n].astype(np.float64)))
    return _outcome(m, [*zip(outs, (qkv, decay, beta), strict=True), (states, slots)])


def _convolved(s: Setting, operands: Operands, x: F32, taps: F32, slots: F32) -> F32:
    """Queries, keys and values of all tokens; the histories in `slots` go on to their ends."""
    channels = s.n_channels
    qkv = np.full((s.n_tokens + 1, channels), UNTOUCHED, np.float32)
    for first, count, position, slot in operands.spans:
        if not count:
            continue
        tokens = slice(first, first + count)
        history = slots[slot, : 3 * channels].reshape(3, channels)
        places = np.arange(position, position + 3) % 3  # of the last three, the oldest first
        before = history[places] * (np.arange(position - 3, position) >= 0)[:, None]
        qkv[tokens], after = delta_inputs_reference(
            x[tokens, :channels], before, taps, s.n_key_head, s.dim, EPS
        )
        qkv[tokens, : s.n_key_head * s.dim] *= np.float32(0.25)
        history[(places + count) % 3] = after
    return qkv


def run_net(s: Setting, chunks: bool, overlapped: bool, m: Machine) -> Outcome:
    """Outputs, and the states of all slots."""
    operands = Operands(s, m)
    n, n_heads = s.n_tokens, 2 * s.n_key_head + s.n_value_head
    qkv = operands.normal(n + 1, n_heads, s.dim)
    keys = qkv[:, : 2 * s.n_key_head]
    keys /= np.sqrt((keys * keys).sum(axis=-1, keepdims=True))
    decay = operands.uniform(0.1, 1, n + 1, s.n_value_head, s.width)
    decay[:: 5 if n > 20 else 1 << 30] = np.float32(np.exp(FLOOR))
    if s.wide_decay and not s.has_floor:
        decay[:, :, ::7] **= np.float32(20)
        decay[3::9, :, 1::5] = 0
    beta = operands.uniform(0, 1, n + 1, s.n_value_head)
    matrices = (s.n_value_head, s.dim, s.dim)
    n_state = int(np.prod(matrices))
    slots = operands.normal(s.n_slots, n_state + SLOT_GAP)
    states = m.place(slots)
    out = m.place(np.full((n + 1, s.n_value_head, s.dim), UNTOUCHED, np.float32))
    make, grid = (delta_chunk, delta_chunk_grid) if chunks else (delta_net, delta_net_grid)
    m.launch(
        make(overlapped=overlapped),
        grid(s.n_value_head, s.dim, len(s.spans) + 1),
        {
            **operands.arguments,
            "states": states,
            "qkv": m.place(qkv, writable=False),
            "decay": m.place(decay, writable=False),
            "beta": m.place(beta, writable=False),
            "out": out,
            "slot_bytes": slots.strides[0],
            "n_key_head": s.n_key_head,
            "n_value_head": s.n_value_head,
            "dim": s.dim,
            "decay_width": s.width,
        },
        shared_bytes=CHUNK_SHARED_BYTES if chunks else 0,
    )
    expected = np.full((n + 1, s.n_value_head, s.dim), UNTOUCHED, np.float32)
    for first, count, position, slot in operands.spans:
        if not count:
            continue
        tokens = slice(first, first + count)
        before = slots[slot, :n_state].reshape(matrices) * np.float32(position > 0)
        expected[tokens], after = delta_net_reference(
            qkv[tokens], decay[tokens], beta[tokens], before, s.n_key_head
        )
        slots[slot, :n_state] = after.reshape(-1)
    return _outcome(m, [(out, expected), (states, slots)])


def run_norm(
    dim: int, kinds: tuple[ActivationKind, ...], is_sigmoid: bool, overlapped: bool, m: Machine
) -> Outcome:
    """The f32 rows; before them how many bytes of records are not those of these rows."""
    n, heads = 2, 1536 // dim
    rng = np.random.default_rng(dim)
    x, gates = (rng.normal(size=(n + 1, heads * dim)).astype(np.float32) for _ in range(2))
    weight = rng.normal(size=dim).astype(np.float32)
    widths = {kind: activation_layout(kind, heads * dim)[2] for kind in kinds}
    outs = {kind: m.place(np.zeros((n + 1, width), np.uint8)) for kind, width in widths.items()}
    m.launch(
        gated_norm(overlapped=overlapped),
        gated_norm_grid(heads * dim, n + 1),
        {
            "counts": m.place(np.array([n, 0, 0, 0], np.uint32), writable=False),
            "x": m.place(x, writable=False),
            "gates": m.place(np.pad(gates, ((0, 0), (0, 4))), writable=False),
            "weight": m.place(weight, writable=False),
            "out_f32": outs.get("f32", 0),
            "q8_256": outs.get("q8_256", 0),
            "q8_32": outs.get("q8_32", 0),
            "gates_stride": heads * dim + 4,
            "n": heads * dim,
            "dim": dim,
            "is_sigmoid": is_sigmoid,
            "eps": EPS,
        },
    )
    shape = (n, heads, dim)
    expected = gated_norm_reference(
        x[:n].reshape(shape), weight, gates[:n].reshape(shape), is_sigmoid, EPS
    ).reshape(n, -1)
    read = {kind: m.read(at, np.uint8, (n + 1, widths[kind])) for kind, at in outs.items()}
    if "f32" not in read:
        scales, _, _ = activation_layout("q8_32", heads * dim)
        codes = read["q8_32"][:n, : heads * dim].view(np.int8).astype(np.float32)
        steps = read["q8_32"][:n, scales : scales + heads * dim // 8].copy().view(np.float32)
        steps = np.repeat(steps, 32, axis=1)
        # Half a step of the record, and what a value may be off.
        error = np.abs(codes * steps - expected) <= 0.501 * steps + TOLERANCE
        return Outcome(error, np.ones_like(error))
    rows = read["f32"][:n, : 4 * heads * dim].copy().view(np.float32)
    wrong = [int(np.count_nonzero(read["f32"][n:]))]
    for kind, records in read.items():
        wanted = np.zeros_like(records)
        wanted[:n] = quantize_rows(kind, rows)
        wrong.append(int(np.count_nonzero(records != wanted)))
    result = np.concatenate([np.array(wrong, np.float32), rows.reshape(-1)])
    return Outcome(
        result, np.concatenate([np.zeros(len(wrong), np.float32), expected.reshape(-1)]), TOLERANCE
    )


def _outcome(m: Machine, pairs: list[tuple[int, Array]]) -> Outcome:
    """(address, what has to lie there) of f32 arrays."""
    results = [m.read(at, np.float32, expected.shape).reshape(-1) for at, expected in pairs]
    return Outcome(
        np.concatenate(results),
        np.concatenate([expected.reshape(-1) for _, expected in pairs]),
        TOLERANCE,
    )


def cases() -> Iterator[Case]:
    """Small settings alone and overlapped, real ones."""
    for settings, large in ((SMALL, False), (LARGE, True)):
        for s in settings:
            for overlapped in (False,) if large else (False, True):
                inputs, net = (make(overlapped=overlapped) for make in (delta_inputs, delta_net))
                yield Case(str(s), inputs, partial(run_inputs, s, overlapped, 1), large)
                yield Case(str(s), net, partial(run_net, s, False, overlapped), large)
    for settings, large in ((SMALL_CHUNKS, False), (LARGE_CHUNKS, True)):
        for s in settings:
            for overlapped in (False,) if large else (False, True):
                run = partial(run_net, s, True, overlapped)
                yield Case(str(s), delta_chunk(overlapped=overlapped), run, large)
    floorless = replace(SMALL[2], has_floor=False)
    several = ((floorless, 1), (RUNS, 4), (RUNS, INPUTS_RUN))
    for overlapped in (False, True):
        for s, n in several:
            name = f"{s}, {n} a warp"
            kernel = delta_inputs(overlapped=overlapped)
            yield Case(name, kernel, partial(run_inputs, s, overlapped, n))
        late = partial(run_inputs, RUNS, overlapped, 1, late=True)
        yield Case(f"{RUNS}, late", delta_inputs(overlapped=overlapped), late)
        kernel = gated_norm(overlapped=overlapped)
        for dim, kinds, is_sigmoid in (
            (128, NORMS[0], False),
            (16, NORMS[1], True),
            (32, NORMS[2], True),
        ):
            name = f"heads of {dim}, {', '.join(kinds)}, {'sigmoid' if is_sigmoid else 'silu'}"
            yield Case(name, kernel, partial(run_norm, dim, kinds, is_sigmoid, overlapped))
