"""attention and attention_join against softmax in f64, over pages that hold NaN elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ops.arithmetic import activation_layout, quantize_rows
from ops.gpu.attention import (
    LATENT_DIMS,
    UNIT_KEYS,
    AttentionShape,
    attention,
    attention_grid,
    attention_join,
    attention_join_grid,
    attention_prompt,
    attention_prompt_grid,
    attention_prompt_shared_bytes,
    attention_reference,
    attention_shared_bytes,
    max_splits,
    n_splits,
    partials_bytes,
    shipped_shapes,
)
from ops.quants.block import F32
from tests.support.cases.case import Array, Case, Outcome
from tests.support.kv_sequences import KVSequences
from tests.support.machines import Machine

TOLERANCE = 4e-5


@dataclass(frozen=True)
class Setting:
    """Tokens (sequence, position) of a step, and how many heads share a kv head."""

    group: int
    n_head_kv: int
    tokens: tuple[tuple[int, int], ...]
    window: int = 0
    sinks: bool = False
    value_scale: float = 1.0
    gated: bool = False
    most: int = 0

    @property
    def max_splits(self) -> int:
        """`most`, 0: as a model of this shape gets them."""
        return self.most or max_splits(self.n_head, self.n_head_kv)

    @property
    def n_splits(self) -> int:
        return n_splits(max(p for _, p in self.tokens), self.max_splits, self.window)

    @property
    def n_head(self) -> int:
        return self.group * self.n_head_kv

    def __str__(self) -> str:
        window = f", window {self.window}" if self.window else ""
        return f"{self.group} heads x {self.n_head_kv}, {self.tokens}{window}"


@dataclass
class Placed:
    """A step's keys, values and queries on a machine."""

    setting: Setting
    shape: AttentionShape
    machine: Machine
    sequences: KVSequences = field(init=False)
    q: F32 = field(init=False)
    n_given: int = 0
    arguments: dict[str, float] = field(init=False)
    masks: NDArray[np.uint32] = field(init=False)

    def __post_init__(self) -> None:
        s, shape, m = self.setting, self.shape, self.machine
        lengths: dict[int, int] = {}
        for sequence, position in s.tokens:
            lengths[sequence] = max(lengths.get(sequence, 0), position + 1)
        self.sequences = KVSequences.random(
            [lengths.get(i, 0) for i in range(max(lengths) + 1)],
            s.n_head_kv, shape.dim_k, shape.dim_v, shape.k_cache, shape.v_cache,
        )  # fmt: skip
        n = len(s.tokens) + 1
        generator = np.random.default_rng(3)
        q = generator.normal(size=(n, s.n_head, shape.dim_k)) * 1.5 / np.sqrt(shape.dim_k)
        self.q = q.astype(np.float32)
        self.q[0] *= 4  # a few keys have all the weight
        if shape.row_buffers:
            content = [(k, k[..., : shape.dim_v]) for k, _ in self.sequences.content]
            self.sequences = replace(self.sequences, content=content)
        tables, pages = self.sequences.tables, self.sequences.pages
        layout = pages.parameters()
        self.arguments = {
            "counts": m.place(np.array([n - 1, 0, 0, 0], np.uint32), writable=False),
            "positions": m.place(
                np.array([p for _, p in s.tokens] + [0], np.int32), writable=False
            ),
            "rows": m.place(np.array([r for r, _ in s.tokens] + [0], np.int32), writable=False),
            "page_tables": m.place(tables, writable=False),
            "q": m.place(self.q, writable=False),
            "k_pages": m.place(pages.keys, writable=False),
            "v_pages": 0 if shape.row_buffers else m.place(pages.values, writable=False),
            "n_head": s.n_head,
            "group": s.group,
            "table_stride": tables.shape[1],
            "k_page_bytes": layout["k_page_bytes"],
            "v_page_bytes": layout["v_page_bytes"],
            "window": s.window,
        }
        if shape.chooses:
            self.masks = generator.integers(0, 1 << 32, (n, tables.shape[1]), np.uint32)
            self.masks[0, 0] = 1  # no key of its further pages
            self.masks[0, 1:] = 0
            for i, (_, position) in enumerate(s.tokens):
                self.masks[i, position // 32] |= np.uint32(1 << position % 32)
            self.arguments["masks"] = m.place(self.masks, writable=False)
            self.arguments["mask_stride"] = tables.shape[1]

    def _read(self, token: int, keys: Array, position: int) -> Array:
        """The keys or values f32[n_head_kv, n, dim] that the token reads, up to its position."""
        bits = np.unpackbits(self.masks[token].view(np.uint8), bitorder="little")
        return keys[:, np.flatnonzero(bits[: position + 1])]

    def expected(self, sinks: F32 | None = None) -> F32:
        """Outputs f32[n_tokens, n_head, dim_v]."""
        s = self.setting
        if self.shape.chooses:
            chosen = []
            for i, (sequence, position) in enumerate(s.tokens):
                content = [self._read(i, x, position) for x in self.sequences.content[sequence]]
                n = content[0].shape[1]
                chosen.append(attention_reference(self.q[i], *content, n - 1))
            return np.stack(chosen)
        rows = [
            attention_reference(
                self.q[i], *self.sequences.content[sequence], position, s.window, sinks,
                s.value_scale,
            )
            for i, (sequence, position) in enumerate(s.tokens)
        ]  # fmt: skip
        return np.stack(rows)


def run_splits(shape: AttentionShape, setting: Setting, m: Machine) -> Outcome:
    """Outputs f32[n_tokens, n_head, dim_v], joined in NumPy; unused parts keep what they held."""
    s, placed = setting, Placed(setting, shape, m)
    splits = s.n_splits
    n, parts = len(s.tokens) + 1, splits
    partial_shape, state_shape = (n, parts, s.n_head, shape.dim_v), (n, parts, s.n_head, 2)
    assert partials_bytes(parts, s.n_head, shape.dim_v, n)[0] == 4 * np.prod(partial_shape)
    partials, states = (m.place(np.full(x, -77, np.float32)) for x in (partial_shape, state_shape))
    m.launch(
        attention(shape),
        attention_grid(splits, s.n_head, s.n_head_kv, n),
        {
            **placed.arguments,
            "partials": partials,
            "states": states,
            "max_splits": s.max_splits,
        },
        shared_bytes=attention_shared_bytes(shape),
    )
    o = m.read(partials, np.float32, partial_shape).astype(np.float64)
    state = m.read(states, np.float32, state_shape).astype(np.float64)
    # A part that a token does not have was not written.
    used = state[..., 1] != -77
    assert used[:-1].any() and not used[-1].any() and (o[~used] == -77).all()
    peak = np.where(used, state[..., 0], -np.inf)
    weight = np.where(used, np.exp2(peak - peak[:-1].max(1, initial=-1e30, keepdims=True).max()), 0)
    total = (weight * state[..., 1])[:-1].sum(1)
    joined = (weight[..., None] * o)[:-1].sum(1) / total[..., None] * s.value_scale
    return Outcome(joined.astype(np.float32), placed.expected(), TOLERANCE)


def run_prompt(shape: AttentionShape, setting: Setting, m: Machine) -> Outcome:
    """Outputs f32[n_tokens, n_head, dim_v] and a row that is not to be written."""
    s, placed = setting, Placed(setting, shape, m)
    n, generator = len(s.tokens) + 1, np.random.default_rng(8)
    out = m.place(np.full((n, s.n_head, shape.dim_v), 7.5, np.float32))
    sinks = generator.normal(size=s.n_head).astype(np.float32)
    gates = generator.normal(size=(n, s.n_head, shape.dim_v + 2)).astype(np.float32)
    m.launch(
        attention_prompt(shape),
        attention_prompt_grid(s.n_head, s.n_head_kv, n + 70),
        {
            **placed.arguments,
            "sinks": m.place(sinks, writable=False) if s.sinks else 0,
            "gates": m.place(gates, writable=False) if s.gated else 0,
            "out": out,
            "gate_row": gates[0].size,
            "gate_stride": gates.shape[2],
            "value_scale": s.value_scale,
        },
        shared_bytes=attention_prompt_shared_bytes(shape),
    )
    expected = np.full((n, s.n_head, shape.dim_v), 7.5, np.float32)
    expected[:-1] = placed.expected(sinks if s.sinks else None)
    if s.gated:
        expected[:-1] /= 1 + np.exp(-gates[:-1, :, : shape.dim_v])
    return Outcome(m.read(out, np.float32, expected.shape), expected, TOLERANCE)


def run_join(dim_v: int, setting: Setting, overlapped: bool, m: Machine) -> Outcome:
    """f32 rows, then the records of both kinds: those of the rows that the kernel gave."""
    s, generator = setting, np.random.default_rng(8)
    splits = s.n_splits
    n = len(s.tokens)
    o = generator.normal(size=(n + 1, splits, s.n_head, dim_v)).astype(np.float32)
    state = np.empty((n + 1, splits, s.n_head, 2), np.float32)
    state[..., 0] = generator.normal(size=state.shape[:-1]) * 3
    state[..., 1] = generator.uniform(1, 30, state.shape[:-1])
    for token, (_, position) in enumerate(s.tokens):
        n_parts = parts_of(position, s)
        o[token, n_parts:], state[token, n_parts:] = np.nan, np.nan
    if setting.window:
        state[0, 0, :, 0], state[0, 0, :, 1], o[0, 0] = -np.inf, 0, 0  # nothing seen there
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
        "n_splits": splits,
        "window": s.window,
        "max_splits": s.max_splits,
        "gate_row": gates[0].size,
        "gate_stride": gates.shape[2],
        **dict(zip(("scales_256", "sums_256", "bytes_256"), layout_256, strict=True)),
        **dict(zip(("scales_32", "sums_32", "bytes_32"), layout_32, strict=True)),
        "value_scale": s.value_scale,
    }
    kernel, grid = (
        attention_join(overlapped=overlapped),
        attention_join_grid(s.n_head, dim_v, n + 1),
    )
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


def parts_of(position: int, s: Setting) -> int:
    """Splits of a token, counted one by one."""
    first = max(0, position + 1 - s.window) if s.window else 0
    units = range(first // UNIT_KEYS, position // UNIT_KEYS + 1)
    spans = range(1, len(units) + 1)
    span = next(span for span in spans if len(units[::span]) <= s.max_splits)
    return len(units[::span])


def _joined(o: Array, state: Array, n_parts: int, sinks: F32, s: Setting) -> Array:
    """Parts of one token -> f64[n_head, dim_v]."""
    peaks, totals = state[:n_parts, :, 0].astype(np.float64), state[:n_parts, :, 1]
    weights = np.exp2(peaks)
    total = (weights * totals).sum(0)
    if s.sinks:
        total = total + np.exp(sinks.astype(np.float64))
    return s.value_scale * (weights[..., None] * o[:n_parts]).sum(0) / total[:, None]


SETTINGS = {
    (64, 64): Setting(12, 2, ((0, 0), (0, 31), (1, 130))),
    (80, 80): Setting(1, 3, ((0, 100), (1, 63))),
    (96, 96): Setting(5, 1, ((0, 64),)),
    (128, 128): Setting(12, 2, ((0, 40), (1, 191), (1, 192)), window=70),
    (192, 128): Setting(16, 1, ((0, 77),)),
    (192, 192): Setting(7, 1, ((0, 200),), window=33),
    LATENT_DIMS: Setting(24, 1, ((0, 66),)),
    (256, 256): Setting(17, 1, ((0, 95),)),
}
"""A small step for each pair of dimensions."""

LONG = Setting(9, 1, ((0, 64 * 3 + 3), (1, 64 * 6 - 1)), most=3)
"""Splits of more than one unit."""

PROMPTS = (
    Setting(
        1, 2, (*((0, p) for p in range(60, 101)), *((1, p) for p in range(5)), (2, 33)), 0, True
    ),
    Setting(12, 1, tuple((0, p) for p in range(150, 157)), window=40, value_scale=0.5, gated=True),
)
"""Several sequences in a tile, over two units; parts of a tile in a window."""

LARGE = (
    (AttentionShape(128, 128), Setting(8, 4, ((0, 4095),))),
    (AttentionShape(128, 128), Setting(8, 4, ((0, 33_000), (1, 100), (2, 2047)))),
    (AttentionShape(128, 128, "q8_0", "q8_0"), Setting(1, 16, ((0, 9000),))),
    (AttentionShape(64, 64), Setting(8, 8, ((0, 5000),), window=128)),
    (AttentionShape(192, 128), Setting(16, 4, ((0, 6000),))),
    (AttentionShape(*LATENT_DIMS, overlapped=True, row_buffers=2), Setting(128, 1, ((0, 2500),))),
    (AttentionShape(256, 256), Setting(8, 2, ((0, 6000), (0, 6001)))),
)

LARGE_PROMPTS = (
    (AttentionShape(128, 128), Setting(8, 1, tuple((0, p) for p in range(900, 1156)))),
    (
        AttentionShape(64, 64),
        Setting(8, 1, tuple((0, p) for p in range(512)), window=128, sinks=True),
    ),
    (AttentionShape(128, 128, "q8_0", "q8_0"), Setting(1, 2, tuple((0, p) for p in range(300)))),
    (
        AttentionShape(256, 256),
        Setting(8, 1, tuple((i, p) for i in range(3) for p in range(70 * i, 90 * i + 40))),
    ),
)

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
    for shape in shipped_shapes():
        setting = SETTINGS[shape.dim_k, shape.dim_v]
        for each in (setting, LONG):
            yield Case(str(each), attention(shape), partial(run_splits, shape, each))
        no_prompts = (shape.dim_k, shape.dim_v) == LATENT_DIMS or shape.chooses
        for each in () if no_prompts else PROMPTS:
            yield Case(str(each)[:60], attention_prompt(shape), partial(run_prompt, shape, each))
    for shape, setting in LARGE:
        yield Case(str(setting), attention(shape), partial(run_splits, shape, setting), True)
    for shape, setting in LARGE_PROMPTS:
        name = str(setting)[:60]
        yield Case(name, attention_prompt(shape), partial(run_prompt, shape, setting), True)
    for joins, large in ((JOINS, False), (LARGE_JOINS, True)):
        for dim_v, setting in joins:
            for overlapped in (False, True):
                kernel = attention_join(overlapped=overlapped)
                run = partial(run_join, dim_v, setting, overlapped)
                yield Case(f"{dim_v}, {setting}", kernel, run, large)
