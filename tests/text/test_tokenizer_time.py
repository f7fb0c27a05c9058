"""What tokenizers take: time that grows with the text, and none of other threads' turns."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import runtime
from runtime.config import BUNDLED_MODEL
from runtime.text.tokenizer import Tokenizer
from tests.support.vocabulary import byte_characters, byte_level, sentence_piece


def tokenizer_of(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_metadata(metadata, source="test.gguf")


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "deepseek-v3", "gpt-4o", "default"])
@pytest.mark.parametrize("character", ["a", " ", "A", "\n", "1", "<", "\u6f22"])
def test_60000_equal_characters(pre: str, character: str) -> None:
    model = tokenizer_of(byte_level(("a a", "aa aa"), pre=pre))
    started = time.process_time()
    ids = model.encode(character * 60_000)
    assert time.process_time() - started < 2.0
    assert model.decode(ids) == character * 60_000


def test_sentence_piece() -> None:
    model = tokenizer_of(sentence_piece([("a" * n, float(-n)) for n in (1, 2, 4, 8)]))
    started = time.process_time()
    assert len(model.encode("a" * 60_000, add_special=False)) == 7500 + 3
    assert time.process_time() - started < 4.0


def test_long_texts_let_other_threads_run() -> None:
    """A server's loop must turn while a megabyte is tokenized on another thread."""
    bundled = runtime.load_tokenizer(BUNDLED_MODEL)
    text = "x" * 500_000 + "hello world " * 40_000
    # Of three times the best: others may hold up one, what the tokenizer does holds up all.
    assert min(longest_pause(lambda: bundled.encode(text)) for _ in range(3)) < 0.5
    assert bundled.decode(bundled.encode(text)) == text


def longest_pause(work: Callable[[], object]) -> float:
    """How long another thread waited for its turn while `work` ran, as a part of the whole time."""
    gaps = [0.0]
    ended = threading.Event()

    def watch() -> None:
        last = time.perf_counter()
        while not ended.wait(0.001):
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.perf_counter()
    work()
    seconds = time.perf_counter() - started
    ended.set()
    watcher.join()
    return max(gaps) / seconds


def test_a_large_vocabulary_loads_quickly() -> None:
    """150,000 tokens take about 0.5 s of a core."""
    characters = byte_characters()[33:127]
    pairs = [f"{a} {b}" for a in characters for b in characters]
    longer = [f"{pair.replace(' ', '')} {c}" for pair in pairs for c in characters][:140_000]
    metadata = byte_level([*pairs, *longer])
    started = time.process_time()
    model = tokenizer_of(metadata)
    assert time.process_time() - started < 5.0
    assert model.n_vocab == 256 + len(pairs) + len(longer)
