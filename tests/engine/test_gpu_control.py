"""What a GPU step takes from the host: its class, its control block, its parts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.gpu.sampling import CHAIN, EDIT, MAX_VOCAB, PENALTIES
from ops.gpu.step_io import RING, refresh_reference
from runtime.cuda.device import Device
from runtime.engine.executor import ExecutorLimits
from runtime.engine.gpu.control import ControlRing, cell_pages, control_layout
from runtime.engine.gpu.step_shape import MAX_OUTPUTS, Sampling, StepShapes, part_of, parts_of
from runtime.engine.step import DeviceWork, Step, StepKind
from runtime.errors import EngineBug

LIMITS = ExecutorLimits(
    n_vocab=100, n_pages=40, page_tokens=32, max_step_tokens=512, max_sequences=6
)


def step_of(
    lengths: list[int],
    outputs: list[int],
    kind: StepKind = StepKind.DECODE,
    first: int = 0,
) -> Step:
    """Sequences of so many tokens each, from position `first`."""
    n = sum(lengths)
    return Step(
        kind,
        np.arange(n, dtype=np.int32) % LIMITS.n_vocab,
        np.concatenate([np.arange(first, first + k) for k in lengths]).astype(np.int32),
        np.repeat(np.arange(len(lengths)), lengths).astype(np.int32),
        np.arange(len(lengths) * 20, dtype=np.int32).reshape(len(lengths), 20),
        np.array(outputs, np.int32),
    )


@pytest.mark.parametrize(
    ("lengths", "outputs", "expected"),
    [
        ([1], [0], (1, 1, 1, False)),
        ([1, 1, 1], [0, 1, 2], (4, 4, 4, False)),
        ([1, 1, 1], [2, 1, 0], (4, 4, 4, True)),
        ([5], [4], (8, 6, 1, True)),
        ([32], [], (64, 6, 1, True)),
        ([200], list(range(128)), (256, 6, 128, True)),
        ([500], [1, 2], (512, 6, 8, True)),
    ],
)
def test_the_class_of_a_step(
    lengths: list[int], outputs: list[int], expected: tuple[int, int, int, bool]
) -> None:
    shape = StepShapes(LIMITS, 512).of(step_of(lengths, outputs))
    assert (shape.n_tokens, shape.n_sequences, shape.n_outputs, shape.gathered) == expected
    assert shape in StepShapes(LIMITS, 512).largest() or shape.n_context == 512


def test_contexts_have_classes_too() -> None:
    shapes = StepShapes(LIMITS, 31)
    assert [shapes.of(step_of([1], [0], first=p)).n_context for p in (0, 511, 512, 600)] == [
        512, 512, 1280, 1280,
    ]  # fmt: skip
    assert shapes.max_batch == 31
    assert {shape.n_tokens for shape in shapes.largest()} == {1, 2, 4, 8, 16, 31}


def test_the_first_request_finds_its_classes() -> None:
    shapes = StepShapes(LIMITS, 31)
    first = shapes.first_request()
    step = step_of([1], [0], first=70)
    assert first == [shapes.of(replace(step, sampling=(work(k),))) for k in (1, 40)]
    assert [shape.sampling for shape in first] == [Sampling.BEST, Sampling.CHAIN]
    without = StepShapes(replace(LIMITS, n_vocab=MAX_VOCAB + 1), 31)
    assert without.first_request() == [without.of(step)]


def test_likely_classes_are_those_of_one_sequence() -> None:
    shapes = StepShapes(LIMITS, 512)
    likely = shapes.likely()
    assert len(likely) == len(set(likely))
    prompt = StepKind.PREFILL
    of_it = [shapes.of(step_of([n], [n - 1], prompt)) for n in (1, 2, 5, 8, 20, 31, 64, 200, 512)]
    of_it.append(shapes.of(step_of([512], [], prompt, first=512)))
    for first in (0, 300, 600, 1200):
        step = step_of([1], [0], first=first)
        of_it += [shapes.of(replace(step, sampling=(work(k),))) for k in (1, 40)]
    assert set(of_it) <= set(likely)
    assert likely[: len(shapes.first_request())] != shapes.first_request()  # prompts come first
    few = StepShapes(replace(LIMITS, n_pages=2), 512).likely()
    assert max(shape.n_tokens for shape in few) <= 64 and {s.n_context for s in few} == {64}


@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=5),
    share=st.floats(0, 1),
    max_batch=st.sampled_from([1, 7, 31, 300]),
)
def test_parts_hold_every_token_and_output_once(
    lengths: list[int], share: float, max_batch: int
) -> None:
    n = sum(lengths)
    rng = np.random.default_rng(n)
    outputs = rng.permutation(n)[: int(share * n)].tolist()
    step = step_of(lengths, outputs, StepKind.PREFILL)
    logits = np.full(len(outputs), -1)
    tokens: list[int] = []
    for span in parts_of(step, max_batch):
        part, rows = part_of(step, span)
        assert part.n_tokens <= max_batch
        assert len(part.output_tokens) <= MAX_OUTPUTS
        assert logits[rows].max(initial=-1) == -1
        logits[rows] = part.output_tokens + span.start
        tokens += range(span.start, span.stop)
        np.testing.assert_array_equal(part.positions, step.positions[span])
    assert tokens == list(range(n))
    assert logits.tolist() == outputs


def test_a_part_has_the_sequences_of_its_tokens_alone() -> None:
    """A class has room for as many sequences as tokens: 300 of them are in no one part."""
    step = step_of([1] * 300, list(range(300)), first=5)
    step = replace(
        step,
        state_slots=np.arange(1000, 1300, dtype=np.int32),
        previous_tokens=np.arange(600, dtype=np.int32).reshape(300, 2),
        sampling=tuple(work(1 + i % 2) for i in range(300)),
    )
    many = replace(LIMITS, max_sequences=512)
    shapes, n = StepShapes(many, 2048), 0
    for span in parts_of(step, shapes.most_tokens(step.kind)):
        part, rows = part_of(step, span)
        shape = shapes.of(part)
        assert len(part.page_tables) == part.n_tokens <= shape.n_sequences
        assert step.sampling is not None and part.sampling == step.sampling[span]
        for name in ("page_tables", "state_slots"):
            found = getattr(part, name)[part.rows]
            np.testing.assert_array_equal(found, getattr(step, name)[step.rows[span]])
        n += len(rows)
    assert n == 300
    two = step_of([3, 2, 4], [8])
    part, rows = part_of(two, slice(4, 9))
    assert part.rows.tolist() == [0, 1, 1, 1, 1] and rows == [0]
    np.testing.assert_array_equal(part.page_tables, two.page_tables[1:])


def test_the_control_block_holds_the_step(device: Device) -> None:
    step = step_of([1, 1, 1], [2, 0], first=70)
    shape = StepShapes(LIMITS, 31).of(step)
    layout = control_layout(shape, LIMITS.page_tokens, max_deltas=4)
    ring = ControlRing(device, layout.block_bytes)
    writers = ring.writers(layout)
    assert len(writers) == RING
    writers[1].write(step, cell_pages(step, 32), [(3, 16, 32, 48), (9, 0, 0, 0)])
    table = np.full((10, 4), 7, np.uint64)
    block = ring._buffer.view[ring.stride :][: ring.stride]
    control = refresh_reference(block, layout.n_bytes, layout.n_bytes, table)
    ring.close()

    def field(offset: int, *dims: int) -> list[int]:
        values = control[offset:].view(np.int32)[: int(np.prod(dims))]
        return values.reshape(dims).tolist()  # type: ignore[no-any-return]

    assert field(layout.counts, 4)[:3] == [3, 2, 3]
    assert field(layout.token_ids, 3) == step.token_ids.tolist()
    assert field(layout.positions, 3) == [70, 70, 70]
    assert field(layout.rows, 3) == [0, 1, 2]
    assert field(layout.cell_pages, 3) == [2, 22, 42]
    assert field(layout.output_tokens, 2) == [2, 0]
    tables = field(layout.page_tables, 3, layout.max_pages)
    assert [row[:16] for row in tables] == step.page_tables[:, :16].tolist()
    # The fourth word, a rule of the expert's, stays.
    assert table[3].tolist() == [16, 32, 48, 7]
    assert table[9].tolist() == [0, 0, 0, 7]
    assert table[0].tolist() == [7, 7, 7, 7]


def test_more_changes_than_room_are_refused(device: Device) -> None:
    step = step_of([1], [0])
    layout = control_layout(StepShapes(LIMITS, 31).of(step), 32, max_deltas=1)
    ring = ControlRing(device, layout.block_bytes)
    with pytest.raises(EngineBug, match="2 changes of the table, room for 1"):
        ring.writers(layout)[0].write(step, cell_pages(step, 32), [(0, 1, 1, 1)] * 2)
    ring.close()


def work(k: int, n_edits: int = 0, *, drawn: bool = True) -> DeviceWork:
    """One whose edits are of the tokens 0, 1, ..., and whose numbers tell k."""
    edits, penalties, chain = np.zeros(n_edits, EDIT), np.zeros(1, PENALTIES), np.zeros(1, CHAIN)
    edits["id"], penalties["repeat"], chain["position"] = np.arange(n_edits), k, k
    return DeviceWork(k, edits, penalties, chain if drawn else None)


@pytest.mark.parametrize(
    ("works", "expected"),
    [
        (None, Sampling.HOST),
        ([work(1), work(1)], Sampling.BEST),
        ([work(1), work(40)], Sampling.CHAIN),
        ([work(1, 3), work(1)], Sampling.CHAIN),
    ],
)
def test_who_chooses_is_part_of_the_class(
    works: list[DeviceWork] | None, expected: Sampling
) -> None:
    sampling = None if works is None else tuple(works)
    step = replace(step_of([1, 1], [0, 1]), sampling=sampling)
    shapes = StepShapes(LIMITS, 31)
    shape = shapes.of(step)
    assert shape.sampling is expected
    assert not shape.gathered
    assert shapes.samples(step) == (works is not None)


def test_steps_that_the_gpu_does_not_sample() -> None:
    shapes = StepShapes(LIMITS, 31)
    most = shapes.of(replace(step_of([1], [0]), sampling=(work(2),))).max_edits
    for step, works, expected in (
        (step_of([1], [0]), [work(2, most)], True),
        (step_of([1], [0]), [work(2, most + 1)], False),
        (step_of([1, 1], [1, 0]), [work(1), work(1)], False),
        (step_of([2], [0, 1]), [work(1)], False),
        (step_of([1], [0], StepKind.PREFILL), [work(1)], False),
    ):
        assert shapes.samples(replace(step, sampling=tuple(works))) is expected


def test_many_tokens_are_sampled_in_parts_but_never_ahead() -> None:
    shapes = StepShapes(replace(LIMITS, max_sequences=512), 2048)
    step = step_of([1] * 300, list(range(300)))
    few = replace(step, sampling=(work(1),) * 300)
    assert shapes.samples(few)
    assert not shapes.samples(replace(few, follows=True))
    edits = shapes.of(replace(step_of([1] * 128, list(range(128))), sampling=(work(2),) * 128))
    crowded = (work(2, edits.max_edits + 1), *[work(1)] * 299)
    assert not shapes.samples(replace(step, sampling=crowded))
    large = replace(LIMITS, n_vocab=MAX_VOCAB + 1)
    sampled = replace(step_of([1], [0]), sampling=(work(1),))
    assert not StepShapes(large, 31).samples(sampled)
    assert all(shape.sampling is Sampling.HOST for shape in StepShapes(large, 31).largest())


def test_the_control_block_holds_how_tokens_are_chosen(device: Device) -> None:
    works = (work(40, 3), work(1), work(7, 2, drawn=False))
    step = replace(step_of([1, 1, 1], [0, 1, 2]), sampling=works)
    layout = control_layout(StepShapes(LIMITS, 31).of(step), LIMITS.page_tokens, max_deltas=0)
    ring = ControlRing(device, layout.block_bytes)
    ring._buffer.view[:] = 0xA5  # whatever steps of other layouts left in the block
    ring.writers(layout)[0].write(step, cell_pages(step, 32))
    block = ring._buffer.view[: layout.n_bytes].copy()
    ring.close()
    assert block[layout.k :].view(np.int32)[:3].tolist() == [40, 1, 7]
    assert block[layout.first_edit :].view(np.int32)[:4].tolist() == [0, 3, 3, 5]
    edits = block[layout.edits : layout.n_bytes].view(EDIT)
    assert edits["id"][:5].tolist() == [0, 1, 2, 0, 1]
    penalties = block[layout.penalties : layout.chains].view(PENALTIES)
    assert penalties["repeat"][:3].tolist() == [40, 1, 7]
    chains = block[layout.chains : layout.edits].view(CHAIN)
    assert chains["position"][:3].tolist() == [40, 1, 0]
    assert chains["top_p"][2] == chains["temperature"][2] == 1  # any that is valid
