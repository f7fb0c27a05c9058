"""attention_join against sums in f64, and its records against those of the rows that it gives."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from ops.arithmetic import activation_layout, quantize_rows
from ops.gpu.attention import attention_join, attention_join_grid
from ops.quants.block import F32
from tests.support.cases.attention import TOLERANCE, Setting, parts_of
from tests.support.cases.case import Array, Case, Outcome
from tests.support.machines import Machine


def run_join(dim_v: int, setting: Setting, overlapped: bool, m: Machine) -> Outcome:
    """f32 rows, then the records of both kinds: those of the rows that the kernel gave."""
    s, generator, n = setting, np.random.default_rng(8), len(setting.tokens)
    o, state = _parts(s, dim_v, generator)
    n_values = s.n_head * dim_v
    sinks = generator.normal(size=s.n_head).astype(np.float32)
    gates = generator.normal(size=(n, s.n_head, dim_v + 16)).astype(np.float32)
    layout_256 = activation_layout("q8_256", -(-n_values // 256) * 256)
    layout_32 = activation_layout("q8_32", -(-n_values // 32) * 32)
    wants_256 = n_values % 256 == 0
    out = m.place(np.full((n + 1, n_values), 7.5, np.float32))
    records_256 = m.place(np.zeros((n, layout_256[2]), np.uint8)) if wants_256 else 0
    records_32 = m.place(np.zeros((n, layout_32[2]), np.uint8))
    arguments: dict[str, float] = {
        "counts": m.place(np.array([n, 0, 0, 0], np.uint32), writable=False),
        "positions": m.place(np.array([p for _, p in s.tokens] + [0], np.int32), writable=False),
        "partials": m.place(o, writable=False),
        "states": m.place(state, writable=False),
        "sinks": m.place(sinks, writable=False) if s.sinks else 0,
        "gates": m.place(gates, writable=False) if s.gated else 0,
        "out": out,
        "records_256": records_256,
        "records_32": records_32,
        "n_head": s.n_head,
        "dim_v": dim_v,
        "n_splits": s.n_splits,
        "window": s.window,
        "max_splits": s.max_splits,
        "gate_row": gates[0].size,
        "gate_stride": gates.shape[2],
        **dict(zip(("scales_256", "sums_256", "bytes_256"), layout_256, strict=True)),
        **dict(zip(("scales_32", "sums_32", "bytes_32"), layout_32, strict=True)),
        "value_scale": s.value_scale,
    }
    kernel = attention_join(overlapped=overlapped)
    grid = attention_join_grid(s.n_head, dim_v, n + 1)
    m.launch(kernel, grid, arguments)
    rows = m.read(out, np.float32, (n + 1, n_values))
    expected = np.full(rows.shape, 7.5, np.float32)
    for token, (_, position) in enumerate(s.tokens):
        row = _joined(o[token], state[token], parts_of(position, s), sinks, s)
        if s.gated:
            row /= 1 + np.exp(-gates[token, :, :dim_v].astype(np.float64))
        expected[token] = row.ravel()
    compared = [(rows, expected)]
    if wants_256:
        got = m.read(records_256, np.uint8, (n, layout_256[2]))
        compared.append((got, quantize_rows("q8_256", rows[:n])))
        alone = m.place(np.zeros((n, layout_256[2]), np.uint8))
        m.launch(kernel, grid, {**arguments, "out": 0, "records_256": alone, "records_32": 0})
        m.launch(kernel, grid, {**arguments, "records_256": 0, "records_32": 0})
        compared.append((m.read(alone, np.uint8, (n, layout_256[2])), got))
    got = m.read(records_32, np.uint8, (n, layout_32[2]))
    compared.append((got, quantize_rows("q8_32", rows[:n])))
    return Outcome(
        np.concatenate([a.ravel().astype(np.float32) for a, _ in compared]),
        np.concatenate([b.ravel().astype(np.float32) for _, b in compared]),
        TOLERANCE,
    )


def _parts(s: Setting, dim_v: int, generator: np.random.Generator) -> tuple[F32, F32]:
    """What `attention` leaves: values, and peaks and totals; NaN where a token has no part."""
    o = generator.normal(size=(len(s.tokens) + 1, s.n_splits, s.n_head, dim_v)).astype(np.float32)
    state = np.empty((*o.shape[:-1], 2), np.float32)
    state[..., 0] = generator.normal(size=state.shape[:-1]) * 3
    state[..., 1] = generator.uniform(1, 30, state.shape[:-1])
    for token, (_, position) in enumerate(s.tokens):
        n_parts = parts_of(position, s)
        o[token, n_parts:], state[token, n_parts:] = np.nan, np.nan
    if s.window:
        state[0, 0, :, 0], state[0, 0, :, 1], o[0, 0] = -np.inf, 0, 0  # nothing seen there
    return o, state


def _joined(o: Array, state: Array, n_parts: int, sinks: F32, s: Setting) -> Array:
    """Parts of one token -> f64[n_head, dim_v]."""
    peaks, totals = state[:n_parts, :, 0].astype(np.float64), state[:n_parts, :, 1]
    weights = np.exp2(peaks)
    total = (weights * totals).sum(0)
    if s.sinks:
        total = total + np.exp(sinks.astype(np.float64))
    return s.value_scale * (weights[..., None] * o[:n_parts]).sum(0) / total[:, None]


JOINS = (
    (128, Setting(2, 1, ((0, 40), (1, 64 * 20)), value_scale=0.5)),
    (80, Setting(4, 1, ((0, 64 * 40 * 2 + 7),), sinks=True, most=40)),
    (64, Setting(4, 2, ((0, 700), (1, 3)), window=128, gated=True)),
)
LARGE_JOINS = (
    (128, Setting(8, 4, ((0, 100_000), (1, 5)))),
    (64, Setting(8, 8, ((0, 4000),), sinks=True)),
)


def cases() -> Iterator[Case]:
    for joins, large in ((JOINS, False), (LARGE_JOINS, True)):
        for dim_v, setting in joins:
            for overlapped in (False, True):
                kernel = attention_join(overlapped=overlapped)
                run = partial(run_join, dim_v, setting, overlapped)
                yield Case(f"{dim_v}, {setting}", kernel, run, large)
