"""Attention on a GPU: a token's bits are its own, whatever is computed beside it."""

from __future__ import annotations

import numpy as np
import pytest

from ops.gpu.attention import (
    attention,
    attention_grid,
    attention_prompt,
    attention_prompt_grid,
    attention_prompt_shared_bytes,
    attention_shared_bytes,
    max_splits,
    n_splits,
)
from ops.gpu.attention_shape import AttentionShape
from ops.gpu.heads import turns_of
from ops.gpu.kv_layout import GPUPageLayout
from tests.support.cases.attention import Placed, Setting, parts_of
from tests.support.cases.case import Array, same_bits
from tests.support.machines import InterpretedMachine

SHAPE = AttentionShape(64, 64)


def prompt_outputs(setting: Setting, picked: slice) -> Array:
    """attention_prompt of some of a setting's tokens, over the keys of all of them."""
    m = InterpretedMachine()
    placed = Placed(setting, SHAPE, m)
    tokens = setting.tokens[picked]
    n, start = len(tokens), range(len(setting.tokens))[picked].start
    out = m.place(np.zeros((n, setting.n_head, SHAPE.dim_v), np.float32))
    m.launch(
        attention_prompt(SHAPE),
        attention_prompt_grid(setting.n_head, setting.n_head_kv, n),
        {
            **placed.arguments,
            "counts": m.place(np.array([n, 0, 0, 0], np.uint32)),
            "positions": m.place(np.array([p for _, p in tokens], np.int32)),
            "rows": m.place(np.array([r for r, _ in tokens], np.int32)),
            "q": m.place(placed.q[start : start + n]),
            "sinks": 0,
            "gates": 0,
            "out": out,
            "gate_row": 0,
            "gate_stride": 0,
            "value_scale": 1.0,
        },
        shared_bytes=attention_prompt_shared_bytes(SHAPE),
    )
    return m.read(out, np.float32, (n, setting.n_head, SHAPE.dim_v))


@pytest.mark.parametrize("window", [0, 50])
def test_a_prompts_bits_do_not_depend_on_how_it_is_cut(window: int) -> None:
    tokens = (*((0, p) for p in range(100, 140)), *((1, p) for p in range(70, 100)))
    setting = Setting(3, 1, tokens, window)
    together = prompt_outputs(setting, slice(0, len(tokens)))
    for picked in (slice(0, 1), slice(9, 30), slice(33, 62), slice(62, 70)):
        assert same_bits(prompt_outputs(setting, picked), together[picked])


def split_results(setting: Setting, picked: slice, splits: int) -> list[tuple[Array, Array]]:
    """Written (partials, states) of each picked token."""
    m = InterpretedMachine()
    placed = Placed(setting, SHAPE, m)
    tokens = setting.tokens[picked]
    n, start = len(tokens), range(len(setting.tokens))[picked].start
    partial_shape = (n, splits, setting.n_head, SHAPE.dim_v)
    partials = m.place(np.zeros(partial_shape, np.float32))
    states = m.place(np.zeros((*partial_shape[:3], 2), np.float32))
    m.launch(
        attention(SHAPE),
        attention_grid(splits, setting.n_head, setting.n_head_kv, n),
        {
            **placed.arguments,
            "counts": m.place(np.array([n, 0, 0, 0], np.uint32)),
            "positions": m.place(np.array([p for _, p in tokens], np.int32)),
            "rows": m.place(np.array([r for r, _ in tokens], np.int32)),
            "q": m.place(placed.q[start : start + n]),
            "partials": partials,
            "states": states,
            "max_splits": setting.max_splits,
        },
        shared_bytes=attention_shared_bytes(SHAPE),
    )
    values = m.read(partials, np.float32, partial_shape)
    state = m.read(states, np.float32, (*partial_shape[:3], 2))
    counts = [parts_of(position, setting) for _, position in tokens]
    return [(values[i, :count], state[i, :count]) for i, count in enumerate(counts)]


def test_a_tokens_splits_do_not_depend_on_the_grid_or_on_other_tokens() -> None:
    setting = Setting(2, 1, ((0, 64 * 7), (1, 130)), most=4)
    together = split_results(setting, slice(0, 2), 4)
    alone = split_results(setting, slice(1, 2), n_splits(130, 4))
    for a, b in zip(together[1], alone[0], strict=True):
        assert same_bits(a, b)
    assert len(together[0][0]) == 4


@pytest.mark.parametrize("window", [0, 1, 64, 65, 128, 1000])
def test_the_grid_has_a_split_for_every_part(window: int) -> None:
    setting = Setting(8, 4, ((0, 0),), window)
    for position in (0, 63, 64, 127, 128, 1000, 4095, 8192, 100_000):
        n_parts = parts_of(position, setting)
        assert n_parts <= n_splits(position, setting.max_splits, window) <= 128


def test_few_kv_heads_get_more_splits() -> None:
    assert [max_splits(32, n) for n in (1, 2, 4, 8, 16, 32)] == [128, 128, 128, 64, 32, 16]
    assert max_splits(128, 1) == 64


def test_a_page_knows_its_size() -> None:
    assert GPUPageLayout("keys", "f16", 80).head_bytes == 32 * 96 * 2
    assert GPUPageLayout("values", "f16", 80).head_bytes == 32 * 80 * 2
    assert GPUPageLayout("keys", "q8_0", 128).head_bytes == 32 * (128 + 4 * 4)
    with pytest.raises(ValueError, match="q8_0 needs heads"):
        GPUPageLayout("values", "q8_0", 80)
    assert GPUPageLayout("keys", "f16", 24).head_bytes == 32 * 32 * 2
    with pytest.raises(ValueError, match="keys of a multiple of 8"):
        GPUPageLayout("keys", "f16", 20)
    with pytest.raises(ValueError, match="values of a multiple of 16"):
        GPUPageLayout("values", "f16", 24)


def test_turns_hold_the_angle_of_any_position() -> None:
    frequencies = np.array([1.0, 0.3, 1e-6])
    turns = turns_of(frequencies)
    for position in (1, 77, 1 << 20):
        held = (turns * np.uint64(position)).astype(np.float64) / 2.0**64
        wanted = np.mod(position * frequencies / (2 * np.pi), 1.0)
        assert np.abs(held - wanted).max() < 1e-9


def test_too_many_heads_a_kv_head_are_refused() -> None:
    with pytest.raises(ValueError, match="up to 64 heads a kv head"):
        attention_prompt_grid(128, 1, 5)
