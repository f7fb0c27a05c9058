"""`python -m bench first_request`: what it makes of the requests' times."""

from __future__ import annotations

from bench.first_request import CASES, RESTARTED, STEADY, Answer, Run, compared, same


def answer(first_us: float, *us: float, hits: float = 0.5, ids: tuple[int, ...] = (1,)) -> Answer:
    return Answer(first_us, list(us), hits, [hits], list(ids))


def a_run(restarted: Answer, steady: Answer) -> Run:
    late = answer(1.0, 1.0)
    run = {case: [steady, late] for case in CASES}
    return {**run, RESTARTED: [restarted, late]}


def test_the_first_request_is_compared_with_the_same_one_without_a_restart() -> None:
    late = [1000.0] * 15
    first = a_run(answer(900.0, 150.0, 160.0, hits=0.25), answer(600.0, 90.0, 110.0))
    second = a_run(answer(700.0, 250.0, *late), answer(600.0, 200.0, *late, hits=1.0))
    found = compared([first], RESTARTED)
    assert found["us"] == found["mean_us"] == 155 and found["steady_us"] == 100
    assert found["us_slower_percent"] == 55 and found["rounds"] == 1
    assert found["to_first_us"] == 900 and found["to_first_us_slower_percent"] == 50
    assert found["hit_rates"] == [0.25] and found["steady_hit_rates"] == [0.5]
    both = compared([first, second], RESTARTED)
    assert both["steady_hit_rates"] == [0.75] and both["to_first_us"] == 800
    # 15 tokens at most, the one that waited for the prompt aside
    assert both["first_tokens_us"] == 1000
    assert both["first_tokens_mean_us"] == round((150 + 160 + 250 + 14 * 1000) / 17, 1)
    assert both["mean_us"] == round((150 + 160 + 250 + 15 * 1000) / 18, 1)
    assert compared([first], STEADY)["us_slower_percent"] == 0


def test_rounds_without_a_case_say_nothing_of_it() -> None:
    first = a_run(answer(900.0, 150.0), answer(600.0, 100.0))
    short = {STEADY: [answer(1.0, 7.0)], RESTARTED: [answer(1.0, 7.0)]}
    found = compared([first, short], CASES[2])
    assert found["rounds"] == 1 and found["us"] == found["steady_us"] == 100


def test_texts_are_the_same_or_not() -> None:
    one, other = answer(1.0, 1.0), answer(1.0, 1.0, ids=(2,))
    assert same([a_run(one, one), a_run(other, other)])
    assert not same([a_run(one, one), a_run(other, one)])
