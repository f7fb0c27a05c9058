"""Tables for the terminal and for docs, and the plot of one trace as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from bench.routing.replay import Outcome

WIDTH, HEIGHT, LEFT, BOTTOM = 760, 420, 60, 50
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")


@dataclass(frozen=True)
class Case:
    """One trace with one number of slots: outcomes by contender.

    bound  hit rate that Belady's choice would have
    """

    trace: str
    share: float
    bound: float
    outcomes: Mapping[str, Outcome]


def table(case: Case) -> Iterator[str]:
    """Lines, the quickest contender first."""
    best = min(outcome.ms_per_token for outcome in case.outcomes.values())
    yield (
        f"{case.trace}, {100 * case.share:g} % of the experts in slots; "
        f"Belady's bound {100 * case.bound:.1f} % hits"
    )
    yield (
        f"  {'policy':26} {'ms/token':>9} {'+':>7} {'hits':>7} {'of bound':>9} "
        f"{'MB/token':>9} {'us':>5}"
    )
    ranked = sorted(case.outcomes.items(), key=lambda pair: pair[1].ms_per_token)
    for name, outcome in ranked:
        yield (
            f"  {name:26} {outcome.ms_per_token:9.2f} {outcome.ms_per_token / best - 1:7.1%} "
            f"{outcome.hit_rate:7.1%} {outcome.hit_rate / max(case.bound, 1e-9):9.1%} "
            f"{outcome.uploaded_bytes / max(outcome.n_tokens, 1) / 1e6:9.1f} "
            f"{outcome.policy_us:5.0f}"
        )


def summary(cases: Sequence[Case]) -> Iterator[str]:
    """How much slower each contender is than the best of each case: the worst and the mean."""
    behind: dict[str, list[float]] = {}
    for case in cases:
        best = min(outcome.ms_per_token for outcome in case.outcomes.values())
        for name, outcome in case.outcomes.items():
            behind.setdefault(name, []).append(outcome.ms_per_token / best - 1)
    yield f"  {'policy':26} {'worst':>7} {'mean':>7}   ms behind the best of each of {len(cases)}"
    for name, values in sorted(behind.items(), key=lambda pair: max(pair[1])):
        yield f"  {name:26} {max(values):7.1%} {sum(values) / len(values):7.1%}"


def plot(cases: Sequence[Case], names: Sequence[str]) -> str:
    """An SVG of hit rates over the share of experts in slots, of one trace, with the bound."""
    curves = {
        name: [(case.share, case.outcomes[name].hit_rate) for case in cases] for name in names
    }
    curves["Belady's bound"] = [(case.share, case.bound) for case in cases]
    most = max(case.share for case in cases)

    def x(share: float) -> float:
        return LEFT + (WIDTH - LEFT - 220) * share / most

    def y(rate: float) -> float:
        return (HEIGHT - BOTTOM) - (HEIGHT - BOTTOM - 30) * rate

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="18">{escape(cases[0].trace)}: hits of generated tokens</text>',
    ]
    for tenth in range(0, 11, 2):
        at = y(tenth / 10)
        parts.append(
            f'<line x1="{LEFT}" x2="{x(most):.0f}" y1="{at:.0f}" y2="{at:.0f}" stroke="#ddd"/>'
        )
        parts.append(f'<text x="20" y="{at + 4:.0f}">{10 * tenth} %</text>')
    for case in cases:
        parts.append(
            f'<text x="{x(case.share) - 12:.0f}" y="{HEIGHT - 28}">{100 * case.share:g} %</text>'
        )
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 8}">share of the experts in slots</text>')
    for number, (name, points) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{x(share):.1f},{y(rate):.1f}" for share, rate in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        at = 40 + 20 * number
        parts.append(
            f'<text x="{WIDTH - 205}" y="{at}" fill="{colour}">&#9632; {escape(name)}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])
