"""attention and attention_prompt against softmax in f64, over pages that hold NaN elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ops.gpu.attention import (
    attention,
    attention_grid,
    attention_prompt,
    attention_prompt_grid,
    attention_prompt_shared_bytes,
    attention_reference,
    attention_shared_bytes,
    max_splits,
    n_splits,
    partials_bytes,
)
from ops.gpu.attention_copies import LIST_KEYS
from ops.gpu.attention_shape import LATENT_DIMS, UNIT_KEYS, AttentionShape, shipped_shapes
from ops.gpu.kv_layout import PAGE_TOKENS
from ops.quants.block import F32
from tests.support.cases.case import Case, Outcome
from tests.support.kv_sequences import KVSequences
from tests.support.machines import Machine

TOLERANCE = 4e-5
UNTOUCHED = -77
"""What was in memory before."""


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
    masked: bool = False
    """Masks say which keys tokens read, not lists."""
    arguments: dict[str, float] = field(init=False)
    read: list[NDArray[np.int64]] = field(init=False)
    """The keys of each token where it has a list."""

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
            self._choose(generator)

    def _choose(self, generator: np.random.Generator) -> None:
        """About half of the earlier keys, four by four, and the last ones; of the first token those
        alone."""
        tables, m = self.sequences.tables, self.machine
        lists = np.full((len(self.q), 8 * tables.shape[1]), 0xFFFFFFF0, np.uint32)
        ends, self.read = np.zeros(len(self.q), np.int32), []
        for i, (sequence, position) in enumerate(self.setting.tokens):
            last = position // LIST_KEYS
            taken = np.flatnonzero(generator.random(last) < 0.5 * (i > 0))
            firsts = LIST_KEYS * np.append(taken, last)
            lists[i, : len(firsts)] = PAGE_TOKENS * tables[sequence, firsts // PAGE_TOKENS]
            lists[i, : len(firsts)] += (firsts % PAGE_TOKENS).astype(np.uint32)
            keys = (firsts[:, None] + np.arange(LIST_KEYS)).reshape(-1)
            self.read.append(keys[keys <= position])
            ends[i] = len(self.read[i]) - 1
        if self.masked:
            read = np.zeros((len(self.q), PAGE_TOKENS * tables.shape[1]), bool)
            for i, keys in enumerate(self.read):
                read[i, keys] = True
            masks = np.packbits(read, axis=1, bitorder="little").view(np.uint32)
            self.arguments["masks"] = m.place(masks, writable=False)
            self.arguments["mask_stride"] = masks.shape[1]
            return
        self.arguments["positions"] = m.place(ends, writable=False)
        self.arguments["lists"] = m.place(lists, writable=False)
        self.arguments["list_stride"] = lists.shape[1]

    def expected(self, sinks: F32 | None = None) -> F32:
        """Outputs f32[n_tokens, n_head, dim_v]."""
        s = self.setting
        if self.shape.chooses:
            chosen = []
            for i, (sequence, _) in enumerate(s.tokens):
                content = [x[:, self.read[i]] for x in self.sequences.content[sequence]]
                chosen.append(attention_reference(self.q[i], *content, len(self.read[i]) - 1))
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
    partials, states = (
        m.place(np.full(x, UNTOUCHED, np.float32)) for x in (partial_shape, state_shape)
    )
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
    o, state = (
        m.read(partials, np.float32, partial_shape),
        m.read(states, np.float32, state_shape),
    )
    return Outcome(joined(o, state) * np.float32(s.value_scale), placed.expected(), TOLERANCE)


def joined(partials: F32, states: F32) -> F32:
    """Outputs of all tokens but the last, which the step does not have: nothing of it was written.

    partials f32[n_tokens, n_parts, n_head, dim_v], states f32[n_tokens, n_parts, n_head, 2]
    """
    o, state = partials.astype(np.float64), states.astype(np.float64)
    # A part that a token does not have was not written.
    used = state[..., 1] != UNTOUCHED
    assert used[:-1].any() and not used[-1].any() and (o[~used] == UNTOUCHED).all()
    peak = np.where(used, state[..., 0], -np.inf)
    weight = np.where(used, np.exp2(peak - peak[:-1].max(1, initial=-1e30, keepdims=True).max()), 0)
    total = (weight * state[..., 1])[:-1].sum(1)
    result: F32 = ((weight[..., None] * o)[:-1].sum(1) / total[..., None]).astype(np.float32)
    return result


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


def parts_of(position: int, s: Setting) -> int:
    """Splits of a token, counted one by one."""
    first = max(0, position + 1 - s.window) if s.window else 0
    units = range(first // UNIT_KEYS, position // UNIT_KEYS + 1)
    spans = range(1, len(units) + 1)
    span = next(span for span in spans if len(units[::span]) <= s.max_splits)
    return len(units[::span])


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

LONG_LISTS = Setting(9, 1, ((0, 64 * 6 + 3), (1, 64 * 12 - 1)), most=3)
"""The same where about every second key is read."""

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
    (AttentionShape(256, 256, chooses=True), Setting(8, 2, ((0, 5), (1, 4100)))),
    (
        AttentionShape(*LATENT_DIMS, overlapped=True, row_buffers=2, chooses=True),
        Setting(64, 1, ((0, 5), (1, 4100))),
    ),
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


def cases() -> Iterator[Case]:
    for shape in shipped_shapes():
        setting = SETTINGS[shape.dim_k, shape.dim_v]
        for each in (setting, LONG_LISTS if shape.chooses else LONG):
            yield Case(str(each), attention(shape), partial(run_splits, shape, each))
        no_prompts = (shape.dim_k, shape.dim_v) == LATENT_DIMS or shape.chooses
        for each in () if no_prompts else PROMPTS:
            yield Case(str(each)[:60], attention_prompt(shape), partial(run_prompt, shape, each))
    for shape, setting in LARGE:
        yield Case(str(setting), attention(shape), partial(run_splits, shape, setting), True)
    for shape, setting in LARGE_PROMPTS:
        name = str(setting)[:60]
        yield Case(name, attention_prompt(shape), partial(run_prompt, shape, setting), True)
