"""latent_prompt and latent_decode against softmax in f64, over pages that hold NaN elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from ops.gpu.attention import n_splits
from ops.gpu.attention_shape import AttentionShape
from ops.gpu.latent_attention import (
    DIM_V,
    LatentDecodeShape,
    LatentPromptShape,
    decode_shapes,
    latent_decode,
    latent_decode_grid,
    latent_join,
    latent_join_grid,
    latent_prompt,
    latent_prompt_grid,
    prompt_shapes,
)
from ops.gpu.latent_pairs import latent_pairs_reference
from tests.support.cases.attention import (
    TOLERANCE,
    UNTOUCHED,
    Placed,
    Setting,
    joined,
    parts_of,
)
from tests.support.cases.case import Case, Outcome
from tests.support.machines import Machine


def placed_for(dim_k: int, chooses: bool, setting: Setting, m: Machine, *, masked: bool) -> Placed:
    """The step's rows, which are keys and values at once, and its queries."""
    rows = AttentionShape(dim_k, DIM_V, row_buffers=1, chooses=chooses)
    return Placed(setting, rows, m, masked=masked)


def placed_pairs(shape: LatentPromptShape, setting: Setting, m: Machine) -> Placed:
    """The same where the cache keeps q8_0, and the step's rows are pairs."""
    chooses = shape.chooses or shape.listed
    cached = AttentionShape(shape.dim_k, DIM_V, "q8_0", "q8_0", chooses=chooses)
    placed = Placed(setting, cached, m, masked=shape.chooses)
    content = [(k, k[..., :DIM_V]) for k, _ in placed.sequences.content]
    placed.sequences = replace(placed.sequences, content=content)
    keys, _ = placed.sequences.pages.decoded()
    parts = latent_pairs_reference(keys[:, 0])
    pairs = np.stack(parts, axis=1).astype(np.float16)
    placed.arguments["k_pages"] = m.place(pairs, writable=False)
    placed.arguments["k_page_bytes"] = pairs.strides[0]
    return placed


def arguments(placed: Placed) -> dict[str, float]:
    """Those that both kernels take."""
    unknown = ("v_pages", "group", "v_page_bytes", "window")
    return {n: x for n, x in placed.arguments.items() if n not in unknown}


def run_prompt(shape: LatentPromptShape, setting: Setting, m: Machine) -> Outcome:
    """Outputs f32[n_tokens, n_head, 512] and a row that is not to be written."""
    n, chooses = len(setting.tokens) + 1, shape.chooses or shape.listed
    if shape.pairs:
        placed = placed_pairs(shape, setting, m)
    else:
        placed = placed_for(shape.dim_k, chooses, setting, m, masked=shape.chooses)
    expected = np.full((n, setting.n_head, DIM_V), 7.5, np.float32)
    out = m.place(expected)
    m.launch(
        latent_prompt(shape),
        latent_prompt_grid(shape.rows, setting.n_head, n + 3),
        {**arguments(placed), "out": out},
        shared_bytes=shape.shared_bytes,
    )
    expected[:-1] = placed.expected()
    return Outcome(m.read(out, np.float32, expected.shape), expected, TOLERANCE)


def run_decode(shape: LatentDecodeShape, setting: Setting, m: Machine) -> Outcome:
    """See `run_splits`."""
    s, placed = setting, placed_for(shape.dim_k, shape.chooses, setting, m, masked=False)
    n, splits = len(s.tokens) + 1, n_splits(max(p for _, p in s.tokens), s.max_splits)
    sizes = (n, splits, s.n_head, DIM_V), (n, splits, s.n_head, 2)
    partials, states = (m.place(np.full(size, UNTOUCHED, np.float32)) for size in sizes)
    m.launch(
        latent_decode(shape),
        latent_decode_grid(splits, s.n_head, n),
        {
            **arguments(placed),
            "partials": partials,
            "states": states,
            "max_splits": s.max_splits,
        },
        shared_bytes=shape.shared_bytes,
    )
    read = [m.read(x, np.float32, size) for x, size in zip((partials, states), sizes, strict=True)]
    return Outcome(joined(*read), placed.expected(), TOLERANCE)


def run_join(dim_v: int, setting: Setting, overlapped: bool, m: Machine) -> Outcome:
    """Rows of values, and one of a token that the step does not have."""
    s, generator, n = setting, np.random.default_rng(8), len(setting.tokens)
    splits = n_splits(max(p for _, p in s.tokens), s.max_splits)
    o = generator.normal(size=(n + 1, splits, s.n_head, dim_v)).astype(np.float32)
    state = np.empty((n + 1, splits, s.n_head, 2), np.float32)
    state[..., 0] = generator.normal(size=state.shape[:-1]) * 3
    state[..., 1] = generator.uniform(1, 30, state.shape[:-1])
    expected = np.full((n + 1, s.n_head, dim_v), 7.5, np.float32)
    out = m.place(expected)
    for token, (_, position) in enumerate(s.tokens):
        parts = parts_of(position, s)
        o[token, parts:], state[token, parts:] = np.nan, np.nan
        weights = np.exp2(state[token, :parts, :, 0].astype(np.float64))
        total = (weights * state[token, :parts, :, 1]).sum(0)
        expected[token] = (weights[..., None] * o[token, :parts]).sum(0) / total[:, None]
    m.launch(
        latent_join(overlapped=overlapped),
        latent_join_grid(s.n_head, dim_v, n + 1),
        {
            "counts": m.place(np.array([n, 0, 0, 0], np.uint32), writable=False),
            "positions": m.place(np.array([p for _, p in s.tokens] + [0], np.int32)),
            "partials": m.place(o, writable=False),
            "states": m.place(state, writable=False),
            "out": out,
            "n_head": s.n_head,
            "dim_v": dim_v,
            "n_splits": splits,
            "max_splits": s.max_splits,
        },
    )
    return Outcome(m.read(out, np.float32, expected.shape), expected, TOLERANCE)


SMALL = (
    Setting(10, 1, ((0, 63), (0, 64), (1, 0), (1, 1))),
    Setting(70, 1, ((0, 130),)),
)
"""Some tokens a block, of two sequences, with rows that nobody has; some blocks a token."""

ALONE = (Setting(70, 1, ((0, 130), (1, 64 * 5 + 3), (1, 64 * 5 + 4))),)
"""Blocks that have one token, or a few heads of one."""

FEW = (
    Setting(20, 1, ((0, 66), (1, 0))),
    Setting(9, 1, ((0, 64 * 3 + 3), (1, 5)), most=2),
)
"""Splits of one unit, and of more."""

FEW_CHOSEN = (Setting(9, 1, ((0, 66), (1, 64 * 5 + 3)), most=1),)

LARGE = (
    Setting(16, 1, tuple((0, p) for p in range(700, 828))),
    Setting(128, 1, tuple((i, p) for i in range(2) for p in range(60 * i, 90 * i + 20))),
)


LARGE_FEW = (Setting(128, 1, ((0, 2500), (1, 63))), Setting(16, 1, ((0, 9000),)))


JOINS = (
    (128, Setting(3, 1, ((0, 64 * 5), (1, 0)), most=40), False),
    (64, Setting(2, 1, ((0, 64 * 127 + 7), (1, 64 * 200)), most=128), False),
    (DIM_V, Setting(16, 1, ((0, 65_000), (1, 9000)), most=128), True),
)
"""A part or a few for each row of threads; as many as there may be."""


def cases() -> Iterator[Case]:
    for dim_v, setting, large in JOINS:
        for early in (False, True):
            run = partial(run_join, dim_v, setting, early)
            yield Case(f"{dim_v}, {setting}", latent_join(overlapped=early), run, large)
    for shape in prompt_shapes():
        small, many = (ALONE, LARGE[1:]) if shape.listed else (SMALL, LARGE)
        for settings, large in ((small, False), (many, True)):
            for setting in settings:
                run = partial(run_prompt, shape, setting)
                yield Case(str(setting)[:60], latent_prompt(shape), run, large)
    for few in decode_shapes():
        for settings, large in ((FEW_CHOSEN if few.chooses else FEW, False), (LARGE_FEW, True)):
            for setting in settings:
                run = partial(run_decode, few, setting)
                yield Case(str(setting), latent_decode(few), run, large)
