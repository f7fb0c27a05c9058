"""hotexpert logits and perplexity, and the pass through an executor under them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from runtime.commands import main
from runtime.commands.forward import ForwardPass
from runtime.commands.perplexity import Estimate, negative_log_probabilities
from runtime.engine.executor import ExecutorLimits
from runtime.engine.fake_executor import FakeExecutor
from runtime.engine.step import StepKind
from runtime.errors import ConfigError

LIMITS = ExecutorLimits(n_vocab=50, n_pages=4, page_tokens=8, max_step_tokens=6, max_sequences=1)
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]


def recording_executor() -> FakeExecutor:
    executor = FakeExecutor(LIMITS)
    executor.keep_steps = True
    return executor


async def test_prefill_in_chunks_and_decode_agree() -> None:
    executor = recording_executor()
    sequence = ForwardPass(executor)
    found = await sequence.prefill(TOKENS, range(4, 14))
    assert [indices for indices, _ in found] == [range(4, 6), range(6, 12), range(12, 14)]
    assert [step.n_tokens for step in executor.steps] == [6, 6, 2]
    together = np.concatenate([rows for _, rows in found])

    sequence.rewind()
    assert not await sequence.prefill(TOKENS[:4])
    alone = np.stack([(await sequence.decode(token)).copy() for token in TOKENS[4:]])
    assert np.array_equal(together, alone)
    assert executor.steps[-1].kind is StepKind.DECODE
    assert sequence.n_tokens == len(TOKENS)


async def test_rewind_keeps_what_was_computed() -> None:
    sequence = ForwardPass(FakeExecutor(LIMITS))
    await sequence.prefill(TOKENS)
    sequence.rewind(5)
    again = (await sequence.decode(TOKENS[5])).copy()
    fresh = ForwardPass(FakeExecutor(LIMITS))
    await fresh.prefill(TOKENS[:5])
    assert np.array_equal(again, await fresh.decode(TOKENS[5]))


async def test_the_context_is_a_limit() -> None:
    with pytest.raises(ConfigError, match="33 tokens"):
        sequence = ForwardPass(FakeExecutor(LIMITS))
        await sequence.prefill([1] * 32)
        await sequence.decode(1)


@pytest.mark.parametrize("split", [None, 0, 3, 6])
def test_logits(split: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "f.npz"
    words = ["logits", "--device", "fake", "--tokens", "1,2,3,4, 5,6", "--out", str(path)]
    assert main([*words, "-b", "4", *([] if split is None else ["--split", str(split)])]) == 0
    assert "f32[6, 259]" in capsys.readouterr().out
    with np.load(path) as saved:
        assert saved["tokens"].tolist() == [1, 2, 3, 4, 5, 6]
        assert saved["logits"].dtype == np.float32 and saved["logits"].shape == (6, 259)
        total = float(saved["logits"].sum())
    whole = tmp_path / "whole.npz"
    assert main([*words[:-1], str(whole)]) == 0
    with np.load(whole) as saved:
        assert float(saved["logits"].sum()) == total


def test_tokens_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "ids").write_text("7 8\n9\n")
    path = tmp_path / "f.npz"
    words = ["logits", "--device", "fake", "--tokens", f"@{tmp_path / 'ids'}", "--out", str(path)]
    assert main(words) == 0
    with np.load(path) as saved:
        assert saved["tokens"].tolist() == [7, 8, 9]


def test_negative_log_probabilities() -> None:
    logits = np.array([[1.0, 2.0, 3.0], [1000.0, 0.0, 0.0]], dtype=np.float32)
    found = negative_log_probabilities(logits, [0, 1])
    exact = math.log(math.exp(1) + math.exp(2) + math.exp(3)) - 1
    assert found.tolist() == pytest.approx([exact, 1000.0])


def test_estimate() -> None:
    values = np.array([0.5, 1.5, 2.5, 1.0])
    estimate = Estimate()
    estimate.add(values[:3])
    estimate.add(values[3:])
    assert estimate.perplexity == pytest.approx(math.exp(values.mean()))
    error = values.std() / math.sqrt(len(values) - 1)
    assert estimate.deviation == pytest.approx(error * math.exp(values.mean()))


def test_perplexity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Against the same executor driven by hand: second half of each chunk, nothing else."""
    text = "The quick brown fox jumps over the lazy dog. " * 4  # the fake vocabulary: bytes
    path = tmp_path / "text"
    path.write_text(text)
    words = ["perplexity", "--device", "fake", "-f", str(path), "-c", "32"]
    assert main([*words, "--chunks", "3"]) == 0
    shown = capsys.readouterr().out
    assert main(words) == 0
    assert len(capsys.readouterr().out.split("]")) == len(text) // 32 + 1

    logits_path = tmp_path / "logits.npz"
    surprises: list[float] = []
    for chunk in range(3):
        tokens = list(text.encode())[chunk * 32 : chunk * 32 + 32]
        ids = ",".join(map(str, fake_ids(tokens)))
        words = ["logits", "--device", "fake", "--tokens", ids, "--out", str(logits_path)]
        assert main(words) == 0
        with np.load(logits_path) as saved:
            rows, ids_used = saved["logits"].astype(float), saved["tokens"]
        for i in range(16, 31):
            p = np.exp(rows[i] - rows[i].max())
            surprises.append(-math.log(p[ids_used[i + 1]] / p.sum()))
    capsys.readouterr()
    wanted = math.exp(np.mean(surprises))
    final = float(shown.split("PPL = ")[1].split()[0])
    assert final == pytest.approx(wanted, abs=1e-3)
    assert f"[3]{final:.4f}," in shown


def fake_ids(text: list[int]) -> list[int]:
    """Ids of a text in the fake vocabulary."""
    from runtime.engine.fake_model import fake_metadata
    from runtime.text.tokenizer import Tokenizer

    return Tokenizer.from_metadata(fake_metadata()).encode(bytes(text).decode())


def test_a_short_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "text"
    path.write_text("short")
    assert main(["perplexity", "--device", "fake", "-f", str(path)]) == 1
    assert "at least 1024" in capsys.readouterr().err
