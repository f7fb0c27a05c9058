"""The inputs of a step as the compiled jobs read them: attention items, pages, limits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from runtime.engine.activation_rows import Rows
from runtime.engine.executor import ExecutorLimits
from runtime.engine.step import Step, StepKind
from runtime.engine.step_buffers import StepBuffers
from runtime.errors import EngineBug

LIMITS = ExecutorLimits(
    n_vocab=10, n_pages=64, page_tokens=32, max_step_tokens=100, max_sequences=3
)
TILE = 8


def make_step(
    kind: StepKind, spans: list[tuple[int, int]], outputs: list[int], token: int = 1
) -> Step:
    """Spans: (first position, end) of each sequence."""
    positions = np.concatenate([np.arange(first, end) for first, end in spans])
    rows = np.concatenate([np.full(end - first, i) for i, (first, end) in enumerate(spans)])
    table = np.arange(len(spans))[:, None] + len(spans) * np.arange(64 // len(spans))
    return Step(
        kind,
        np.full(len(positions), token, np.int32),
        positions.astype(np.int32),
        rows.astype(np.int32),
        table.astype(np.int32),
        np.array(outputs, np.int32),
    )


def items_of(buffers: StepBuffers, n_items: int) -> list[tuple[int, ...]]:
    return [tuple(item) for item in buffers.items[:n_items].tolist()]


def test_prompts_become_tiles_of_one_sequence_outputs_and_long_contexts_first() -> None:
    buffers = StepBuffers(LIMITS, TILE)
    n_items, n_output_items, merged = buffers.fill(
        make_step(StepKind.PREFILL, [(0, 10), (508, 520), (5, 6)], [22, 9])
    )
    assert merged == 0
    assert items_of(buffers, n_items) == [
        (8, 2, 0, 1, -1),
        (22, 1, 0, 1, -1),
        (10, 8, 0, 2, -1),
        (18, 4, 0, 2, -1),
        (0, 8, 0, 1, -1),
    ]
    assert n_output_items == 2
    assert buffers.n_tokens[0] == 23
    assert buffers.n_outputs[0] == 2
    assert buffers.output_tokens[:2].tolist() == [22, 9]
    assert buffers.cell_pages[[0, 9, 10, 13, 14, 22]].tolist() == [0, 0, 46, 46, 49, 2]
    assert buffers.sequences[:23].tolist() == [0] * 10 + [1] * 12 + [2]


def test_decoding_is_cut_at_blocks_once_a_context_is_longer_than_one() -> None:
    buffers = StepBuffers(LIMITS, TILE)
    n_items, n_output_items, merged = buffers.fill(
        make_step(StepKind.DECODE, [(3, 4), (511, 512)], [0, 1])
    )
    assert (n_items, n_output_items, merged) == (2, 2, 0)
    assert items_of(buffers, 2) == [(0, 1, 0, 1, -1), (1, 1, 0, 1, -1)]
    n_items, n_output_items, merged = buffers.fill(
        make_step(StepKind.DECODE, [(3, 4), (512, 513)], [0, 1])
    )
    assert (n_items, n_output_items, merged) == (3, 3, 1)
    assert items_of(buffers, 3) == [(0, 1, 0, 1, 0), (1, 1, 0, 1, 1), (1, 1, 1, 2, 2)]
    assert buffers.partial_spans[:2].tolist() == [[0, 1], [1, 2]]


def test_embeddings_are_copied_where_the_table_is_known() -> None:
    buffers, x = StepBuffers(LIMITS, TILE), Rows(100, 4 * 24)
    table = np.random.default_rng(1).normal(size=(10, 24)).astype(np.float32)
    buffers.embed_from(table, x)
    buffers.fill(make_step(StepKind.PREFILL, [(0, 3)], [], token=7))
    assert np.array_equal(x.memory.view(np.float32)[:3], table[[7, 7, 7]])
    assert not x.memory[3:].any()


def test_flags_of_the_last_step_are_cleared() -> None:
    buffers = StepBuffers(LIMITS, TILE)
    buffers.not_finite[:3] = 1
    buffers.fill(make_step(StepKind.PREFILL, [(0, 4)], [0, 3]))
    assert not buffers.not_finite[:3].any()


@pytest.mark.parametrize(
    ("spans", "token"),
    [
        ([(0, 101)], 1),
        ([(0, 0)], 1),
        ([(0, 1)] * 4, 1),
        ([(2047, 2049)], 1),
        ([(0, 1)], 10),
        ([(0, 1)], -1),
    ],
)
def test_steps_beyond_the_limits_are_refused(spans: list[tuple[int, int]], token: int) -> None:
    buffers = StepBuffers(LIMITS, TILE)
    with pytest.raises(EngineBug, match="beyond the executor's"):
        buffers.fill(make_step(StepKind.DECODE, spans, [], token))


def test_a_position_without_a_page_is_marked() -> None:
    buffers = StepBuffers(LIMITS, TILE)
    step = make_step(StepKind.DECODE, [(40, 41)], [0])
    step.page_tables[0, 1] = -1
    buffers.fill(step)
    assert buffers.cell_pages[0] == -1
    short = Step(step.kind, step.token_ids, step.positions, step.rows, step.page_tables[:, :1],
                 step.output_tokens)  # fmt: skip
    buffers.fill(short)
    assert buffers.cell_pages[0] == -1


def test_sequences_with_states_get_their_spans() -> None:
    limits = replace(LIMITS, n_state_slots=4)
    buffers = StepBuffers(limits, TILE)
    step = make_step(StepKind.PREFILL, [(0, 10), (508, 520), (5, 6)], [22])
    slots = np.array([3, 0, 2], np.int32)
    buffers.fill(replace(step, state_slots=slots))
    assert buffers.spans[:3].tolist() == [(0, 10, 0, 3), (10, 12, 508, 0), (22, 1, 5, 2)]
    for wrong in ([3, 0, 4], [3, -1, 2], [3, 0]):
        with pytest.raises(EngineBug, match="state slots"):
            buffers.fill(replace(step, state_slots=np.array(wrong, np.int32)))
