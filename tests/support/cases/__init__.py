"""What every GPU kernel has to compute: the cases, run by the interpreter and on GPUs.

A file of cases has a `cases` function; a new file is one line in `SOURCES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.support.cases import expert, quantize
from tests.support.cases.case import Case

SOURCES: tuple[Callable[[], Iterator[Case]], ...] = (
    quantize.cases,
    expert.cases,
)


def every_case() -> Iterator[Case]:
    """All cases, the large ones included."""
    for cases in SOURCES:
        yield from cases()
