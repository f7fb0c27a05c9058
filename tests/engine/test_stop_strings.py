"""Stop strings, wherever the tokens cut the text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import runtime
from runtime.engine.stop_strings import StopStrings
from tests.support.fake_engine import GREEDY, fake, read, text

ANSWER = "one STOP two"


def pushed(stops: list[str], pieces: list[str]) -> tuple[str, str]:
    """(the answer, the stop string that ended it)."""
    matcher = StopStrings(stops)
    out = ""
    for piece in pieces:
        certain, stop = matcher.push(piece)
        out += certain
        if stop:
            return out, stop
    return out + matcher.flush(), ""


@pytest.mark.parametrize("cut", range(len(ANSWER) + 1))
def test_a_stop_string_is_found_at_every_split(cut: int) -> None:
    for second in range(cut, len(ANSWER) + 1):
        pieces = [ANSWER[:cut], ANSWER[cut:second], ANSWER[second:]]
        assert pushed(["STOP"], pieces) == ("one ", "STOP")


def test_text_that_could_become_a_stop_string_is_held_back_and_flushed() -> None:
    matcher = StopStrings(["STOP"])
    assert matcher.push("one ST") == ("one ", "")
    assert matcher.push("A") == ("STA", "")
    assert matcher.push("STO") == ("", "")
    assert matcher.flush() == "STO"


@settings(max_examples=200, deadline=None)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    pieces=st.lists(st.text("ab", max_size=3), max_size=8),
)
def test_the_answer_is_the_text_before_the_first_stop_string(
    stops: list[str], pieces: list[str]
) -> None:
    whole = "".join(pieces)
    answer, stop = pushed(stops, pieces)
    if stop:
        assert whole.startswith(answer + stop)
        assert not any(s in answer for s in stops)
    else:
        assert answer == whole
        assert not any(s in whole for s in stops)


async def answered(stops: list[str], script: str, max_tokens: int) -> list[runtime.Token]:
    async with runtime.open_engine(runtime.EngineConfig(device="fake", n_ctx=256)) as engine:
        fake(engine).next_token = lambda tokens: ord((script + "~" * 100)[len(tokens) - 2])
        return await read(engine, [1, 2], GREEDY(stop=stops, max_tokens=max_tokens))


async def test_the_engine_stops_before_the_stop_string() -> None:
    tokens = await answered(["STOP"], ANSWER, 50)
    assert text(tokens) == "one "
    last = tokens[-1]
    assert (last.finish_reason, last.stop_type, last.stopping_word) == ("stop", "word", "STOP")
    assert last.n_generated == len("one STOP")


async def test_held_text_is_flushed_when_the_answer_ends_by_limit() -> None:
    tokens = await answered(["STOP"], "one STO", 7)
    assert text(tokens) == "one STO"
    assert tokens[-1].stop_type == "limit"


async def test_the_joined_texts_never_contain_a_stop_string() -> None:
    assert text(await answered(["e S", "two"], ANSWER, 50)) == "on"
