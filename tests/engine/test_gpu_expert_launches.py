"""Whether a step's experts are read slot by slot or grouped."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from ops.quants import FORMATS
from runtime.engine.gpu.expert_launches import by_slot


def parts(n_tokens: int, *, fetches: object = None) -> Any:
    def format_of(name: str) -> Any:
        return FORMATS[name]

    return cast(Any, SimpleNamespace(n_tokens=n_tokens, fetches=fetches, format_of=format_of))


def block(
    n_expert: int, n_used: int, gate: str = "Q4_K", up: str = "Q4_K", down: str = "Q6_K"
) -> Any:
    gate_up = (SimpleNamespace(weight=gate), SimpleNamespace(weight=up))
    return cast(
        Any,
        SimpleNamespace(
            gate_up=gate_up, down=SimpleNamespace(weight=down), n_expert=n_expert, n_used=n_used
        ),
    )


@pytest.mark.parametrize(
    ("n_tokens", "n_expert", "n_used", "expected"),
    [
        (1, 8, 2, True),
        (4, 8, 4, True),
        (8, 128, 8, True),
        (8, 64, 8, True),
        (8, 8, 2, False),
        (16, 512, 10, False),
    ],
)
def test_slots_are_grouped_where_many_share_an_expert(
    n_tokens: int, n_expert: int, n_used: int, expected: bool
) -> None:
    assert by_slot(parts(n_tokens), block(n_expert, n_used)) == expected


def test_what_slots_cannot_have_is_grouped() -> None:
    assert not by_slot(parts(1, fetches=object()), block(128, 8))
    assert not by_slot(parts(1), block(128, 8, up="Q5_K"))
    assert not by_slot(parts(1), block(128, 8, gate="F16", up="F16"))
