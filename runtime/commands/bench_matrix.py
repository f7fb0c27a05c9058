"""What `hotexpert bench` runs: option lists and ranges, and the tests they multiply to."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

MAX_VALUES = 1000  # of one option: a mistyped range must not fill the memory


@dataclass(frozen=True)
class Setup:
    """What needs an engine of its own."""

    model: str | None
    n_threads: int | None
    n_batch: int
    cache_type_k: str
    cache_type_v: str


@dataclass(frozen=True)
class Test:
    """`n_prompt` tokens read, then `n_gen` generated, after `n_depth` that are not timed."""

    __test__ = False  # not a test of this project

    n_prompt: int
    n_gen: int
    n_depth: int

    @property
    def n_tokens(self) -> int:
        return self.n_prompt + self.n_gen

    @property
    def n_ctx(self) -> int:
        return self.n_depth + self.n_tokens

    @property
    def name(self) -> str:
        """llama-bench's name: pp512, tg128, pp512+tg128, pp512 @ d4096."""
        parts = [f"pp{self.n_prompt}"] if self.n_prompt else []
        parts += [f"tg{self.n_gen}"] if self.n_gen else []
        return "+".join(parts) + (f" @ d{self.n_depth}" if self.n_depth else "")


def numbers(text: str) -> list[int]:
    """`1,4-8+2,1-64*2` as [1, 4, 6, 8, 1, 2, 4, ...]: an argparse type."""
    values: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9})(?:([+*])(\d{1,9}))?)?", part.strip())
        if match is None:
            raise argparse.ArgumentTypeError(
                f"{part!r}: use numbers and ranges FIRST-LAST, FIRST-LAST+STEP or FIRST-LAST*FACTOR"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        values += span(first, last, match[3] or "+", int(match[4] or 1))
        if len(values) > MAX_VALUES:
            raise argparse.ArgumentTypeError(f"{text!r} gives more than {MAX_VALUES} values")
    return values


def span(first: int, last: int, operation: str, step: int) -> list[int]:
    """Raises: argparse.ArgumentTypeError for a range that goes nowhere."""
    if last < first or step < (1 if operation == "+" else 2) or (operation == "*" and not first):
        raise argparse.ArgumentTypeError(f"{first}-{last}{operation}{step} is not a range")
    if operation == "+":
        return list(range(first, min(last, first + step * MAX_VALUES) + 1, step))
    values = []
    while first <= last:
        values.append(first)
        first *= step
    return values


def positive_numbers(text: str) -> list[int]:
    values = numbers(text)
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: use numbers of at least 1")
    return values


def prompt_and_generation(text: str) -> tuple[int, int]:
    """`512,128`: an argparse type."""
    match = re.fullmatch(r"(\d{1,9}),(\d{1,9})", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: use PROMPT,GENERATED, such as 512,128")
    return int(match[1]), int(match[2])


def setups(settings: argparse.Namespace) -> Iterator[Setup]:
    """Every combination of what needs an engine of its own."""
    for values in product(
        settings.model or [None],
        settings.threads or [None],
        settings.batch_size,
        settings.cache_type_k,
        settings.cache_type_v,
    ):
        yield Setup(*values)


def tests(settings: argparse.Namespace) -> list[Test]:
    """Prompt tests, generation tests, then combined ones, each at every depth."""
    wanted = [(n, 0) for n in settings.n_prompt]
    wanted += [(0, n) for n in settings.n_gen]
    wanted += settings.pg
    return [Test(p, g, d) for d in settings.n_depth for p, g in wanted if p or g]
