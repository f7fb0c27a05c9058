"""Pieces of experts that prompts fetch: all of them once, in order, none larger than a buffer."""

from __future__ import annotations

import pytest

from ops.quants import FORMATS
from runtime.experts import fetched_experts
from runtime.experts.fetched_experts import BUFFERS, PIECES, fetch_bytes, pieces_of
from runtime.experts.host_experts import LayerExperts, Matrix


def layer(n_expert: int, n_bytes: int) -> LayerExperts:
    """Experts of three matrices of so many bytes."""
    matrices = [Matrix(1 << 20, n_bytes, n_bytes, i * n_bytes) for i in range(3)]
    fmt = FORMATS["Q4_K"]
    return LayerExperts(n_expert, (matrices[0], matrices[1], matrices[2]), (fmt, fmt, fmt))


LAYERS = {
    "alike": [layer(288, 2 << 20)] * 4,
    "one of more bits": [layer(288, 5 << 20), *[layer(288, 2 << 20)] * 9],
    "few and large": [layer(8, 100 << 20)] * 2,
    "small": [layer(64, 1 << 12)] * 3,
    "uneven": [layer(7, 40 << 20), layer(131, 3 << 20)],
}


@pytest.mark.parametrize("name", LAYERS)
def test_pieces(name: str) -> None:
    layers = LAYERS[name]
    pieces = pieces_of(layers)
    assert [piece.number for piece in pieces] == list(range(len(pieces)))
    found = [(p.layer, e) for p in pieces for e in range(p.first, p.first + p.n)]
    assert found == [(i, e) for i, one in enumerate(layers) for e in range(one.n_expert)]
    room = fetch_bytes(layers) // BUFFERS
    for piece in pieces:
        size = sum(m.n_bytes for m in layers[piece.layer].matrices)
        assert piece.n * (size + 32) <= room


def test_a_layer_of_more_bits_does_not_make_the_buffers_larger() -> None:
    usual, mixed = LAYERS["alike"], LAYERS["one of more bits"]
    assert fetch_bytes(mixed) < 1.3 * fetch_bytes(usual)
    assert len([p for p in pieces_of(mixed) if p.layer == 0]) > PIECES


def test_small_layers_are_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(pieces_of(LAYERS["small"])) == 3
    monkeypatch.setattr(fetched_experts, "LEAST_PIECE_BYTES", 0)
    assert len(pieces_of(LAYERS["small"])) == 3 * PIECES


def test_no_layers_take_nothing() -> None:
    assert fetch_bytes([]) == 0
