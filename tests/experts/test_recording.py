"""Recording: the trace is what the routers chose, sequence by sequence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from profiles import Phase, ProfileError, RoutingTrace
from runtime.config import BUNDLED_MODEL
from runtime.engine.step import StepKind
from runtime.experts.recording import RecordedExecutor, TraceRecorder, recorder_for
from runtime.models import open_model
from tests.support.cpu_steps import executor_of, step_of

TOKENS = np.random.default_rng(3).integers(0, 12288, 24).astype(np.int32)


async def recorded(
    parts: list[tuple[StepKind, list[tuple[int, slice]], list[int] | None]],
) -> RoutingTrace:
    """The trace of steps of the bundled model: (kind, (sequence, tokens of it), outputs)."""
    with open_model(BUNDLED_MODEL) as model:
        async with executor_of(model) as executor:
            assert isinstance(executor, RecordedExecutor) and executor.recorder is None
            recorder = recorder_for(model, "bundled", executor.limits.page_tokens)
            executor.recorder = recorder
            for kind, spans, outputs in parts:
                rows = [(s, TOKENS[span], span.start) for s, span in spans]
                await executor.run(step_of(executor, kind, rows, outputs))
            executor.recorder = None
            await executor.run(step_of(executor, StepKind.DECODE, [(3, TOKENS[:1], 0)]))
            return recorder.trace()


async def test_prompt_and_single_tokens_are_routed_alike() -> None:
    together = await recorded([(StepKind.PREFILL, [(1, slice(0, 8))], None)])
    single = [(StepKind.PREFILL, [(1, slice(i, i + 1))], None) for i in range(8)]
    apart = await recorded(single)
    assert together.n_expert == (32,) * 8 and together.n_used == 4
    assert np.array_equal(together.choices, apart.choices)
    assert (together.choices >= 0).all() and len(np.unique(together.choices)) > 16
    for row in together.choices.reshape(-1, 4):
        assert len(set(row.tolist())) == 4
    assert apart.sequences.tolist() == [0] * 8
    assert together.steps.tolist() == [8] and together.phases.tolist() == [Phase.PROMPT]


async def test_sequences_and_phases() -> None:
    trace = await recorded(
        [
            (StepKind.PREFILL, [(1, slice(0, 3)), (2, slice(0, 2))], None),
            (StepKind.DECODE, [(2, slice(2, 3)), (1, slice(3, 4))], None),
            (StepKind.PREFILL, [(0, slice(0, 1))], None),
            (StepKind.DECODE, [(1, slice(4, 5))], None),
            (StepKind.PREFILL, [(1, slice(0, 2))], None),
        ]
    )
    assert trace.sequences.tolist() == [0, 0, 0, 1, 1, 1, 0, 2, 0, 3, 3]
    assert trace.steps.tolist() == [5, 2, 1, 1, 2]
    assert trace.phases.tolist() == [0, 1, 0, 1, 0]


async def test_the_last_layer_s_skipped_tokens_are_unknown() -> None:
    trace = await recorded([(StepKind.PREFILL, [(1, slice(0, 6))], [2, 5])])
    whole = await recorded([(StepKind.PREFILL, [(1, slice(0, 6))], None)])
    assert np.array_equal(trace.choices[:, :-1], whole.choices[:, :-1])
    assert np.array_equal(trace.choices[[2, 5], -1], whole.choices[[2, 5], -1])
    assert (trace.choices[[0, 1, 3, 4], -1] == -1).all()


def test_a_model_without_experts_gives_no_trace() -> None:
    with pytest.raises(ProfileError):
        TraceRecorder("dense", [], 16).trace()


def test_the_command_writes_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from profiles import load_trace
    from runtime.commands import main

    (tmp_path / "a.txt").write_text("The capital of France is Paris. " * 5)
    (tmp_path / "b.txt").write_text("def main(): return 0\n" * 5)
    words = ["routing", "-f", str(tmp_path / "a.txt"), "-f", str(tmp_path / "b.txt"),
             "-c", "16", "--tokens", "24", "--split", "10", "--device", "cpu", "-t", "1",
             "--out", str(tmp_path / "t")]  # fmt: skip
    assert main(words) == 0
    assert "48 tokens of 4 sequences" in capsys.readouterr().out
    trace = load_trace(tmp_path / "t")
    assert trace.steps.tolist() == [10, *[1] * 6, 8] * 2
    assert trace.sequences.tolist() == [0] * 16 + [1] * 8 + [2] * 16 + [3] * 8
