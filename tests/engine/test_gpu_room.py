"""Places of a step's memory: those of a phase lie under another phase's, and under nothing else."""

from __future__ import annotations

import pytest

from runtime.engine.gpu.launch_plan import Room

BASE = 1 << 20
ASKED = [
    ("x", 1000, ""),
    ("q", 5000, "mixer"),
    ("gates", 300, "feed-forward"),
    ("pending", 256, ""),
    ("k", 100, "mixer"),
    ("hidden", 9000, "feed-forward"),
]


def fill(room: Room) -> dict[str, tuple[int, int, str]]:
    return {name: (room.place(name, n, phase), n, phase) for name, n, phase in ASKED}


def test_a_measured_room_holds_every_place() -> None:
    measured = Room()
    fill(measured)
    assert measured.n_bytes == 1024 + 256 + 9216 + 512, "the larger phase counts"
    for spare in (0, 4096):  # of a smaller step in the room of the largest
        end = BASE + measured.n_bytes + spare
        places = fill(Room(BASE, measured.n_bytes + spare))
        for name, (at, n, phase) in places.items():
            assert at >= BASE and at + n <= end and at % 256 == 0
            for other, (start, size, owner) in places.items():
                may = name == other or (phase and owner and phase != owner)
                assert may or at + n <= start or start + size <= at, (name, other)
        both = [places[name][0] for name in ("q", "hidden")]
        assert abs(both[0] - both[1]) < 9000, "phases lie under each other"


def test_a_place_is_found_again_and_does_not_grow() -> None:
    room = Room(BASE, 1 << 16)
    first = room.place("q", 512, "mixer")
    assert room.place("q", 500, "mixer") == first
    assert room.place("q", 512, "feed-forward") != room.place("q", 512)
    with pytest.raises(ValueError, match="has 512 bytes, not 600"):
        room.place("q", 600, "mixer")
