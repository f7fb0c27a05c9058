"""`python -m bench first_request`: what it makes of the requests' times."""

from __future__ import annotations

from bench.first_request import Answer, compared


def test_the_first_request_is_compared_with_the_steady_one() -> None:
    found = compared(Answer([900.0, 150.0, 150.0], 0.25, [1]), Answer([7.0, 90.0, 110.0], 0.5, [1]))
    assert found["first_us"] == 150 and found["steady_us"] == 100
    assert found["first_slower_percent"] == 50
    assert found["first_hit_rate"] == 0.25 and found["steady_hit_rate"] == 0.5
