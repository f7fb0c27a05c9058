"""Latent attention on a GPU: a token's bits are its own, whatever is computed beside it."""

from __future__ import annotations

import numpy as np

from ops.gpu.attention import n_splits
from ops.gpu.latent_attention import (
    DIM_V,
    LatentDecodeShape,
    LatentPromptShape,
    latent_decode,
    latent_decode_grid,
    latent_prompt,
    latent_prompt_grid,
)
from tests.support.cases.attention import Setting, parts_of
from tests.support.cases.case import Array, same_bits
from tests.support.cases.latent_attention import arguments, placed_for
from tests.support.machines import InterpretedMachine

TOKENS = (*((0, p) for p in range(60, 67)), *((1, p) for p in range(3)))


def picked_arguments(setting: Setting, picked: slice, m: InterpretedMachine) -> dict[str, float]:
    """Those of a step that has some of a setting's tokens, over the keys of all of them."""
    placed = placed_for(576, False, setting, m, masked=False)
    tokens = setting.tokens[picked]
    start = range(len(setting.tokens))[picked].start
    return {
        **arguments(placed),
        "counts": m.place(np.array([len(tokens), 0, 0, 0], np.uint32)),
        "positions": m.place(np.array([p for _, p in tokens], np.int32)),
        "rows": m.place(np.array([r for r, _ in tokens], np.int32)),
        "q": m.place(placed.q[start : start + len(tokens)]),
    }


def prompt_outputs(setting: Setting, picked: slice, rows: int) -> Array:
    m, shape, n = InterpretedMachine(), LatentPromptShape(576, rows), len(setting.tokens[picked])
    out = m.place(np.zeros((n, setting.n_head, DIM_V), np.float32))
    m.launch(
        latent_prompt(shape),
        latent_prompt_grid(rows, setting.n_head, n),
        {**picked_arguments(setting, picked, m), "out": out},
        shared_bytes=shape.shared_bytes,
    )
    return m.read(out, np.float32, (n, setting.n_head, DIM_V))


def test_a_prompts_bits_depend_neither_on_its_cut_nor_on_the_tile() -> None:
    setting = Setting(9, 1, TOKENS)
    together = prompt_outputs(setting, slice(0, len(TOKENS)), 64)
    for picked, rows in ((slice(0, 1), 64), (slice(2, 9), 64), (slice(1, 10), 32)):
        assert same_bits(prompt_outputs(setting, picked, rows), together[picked])


def decode_results(setting: Setting, picked: slice, splits: int) -> list[tuple[Array, Array]]:
    """Written (partials, states) of each picked token."""
    m, shape, tokens = InterpretedMachine(), LatentDecodeShape(576), setting.tokens[picked]
    size = (len(tokens), splits, setting.n_head)
    partials = m.place(np.zeros((*size, DIM_V), np.float32))
    states = m.place(np.zeros((*size, 2), np.float32))
    m.launch(
        latent_decode(shape),
        latent_decode_grid(splits, setting.n_head, len(tokens)),
        {
            **picked_arguments(setting, picked, m),
            "partials": partials,
            "states": states,
            "max_splits": setting.max_splits,
        },
        shared_bytes=shape.shared_bytes,
    )
    values = m.read(partials, np.float32, (*size, DIM_V))
    state = m.read(states, np.float32, (*size, 2))
    counts = [parts_of(position, setting) for _, position in tokens]
    return [(values[i, :count], state[i, :count]) for i, count in enumerate(counts)]


def test_a_tokens_splits_do_not_depend_on_the_grid_or_on_other_tokens() -> None:
    setting = Setting(2, 1, ((0, 64 * 7), (1, 130)), most=4)
    together = decode_results(setting, slice(0, 2), 4)
    alone = decode_results(setting, slice(1, 2), n_splits(130, 4))
    for a, b in zip(together[1], alone[0], strict=True):
        assert same_bits(a, b)
    assert len(together[0][0]) == 4
