"""What every GPU kernel has to compute: the cases, run by the interpreter and on GPUs.

A file of cases has a `cases` function; a new file is one line in `SOURCES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.support.cases import (
    activate,
    attention,
    embed,
    expert,
    gemm,
    heads,
    latent_heads,
    linear,
    mailbox,
    norm,
    quantize,
    router,
    sample,
    sampling,
    step_io,
)
from tests.support.cases.case import Case

SOURCES: tuple[Callable[[], Iterator[Case]], ...] = (
    quantize.cases,
    expert.cases,
    linear.cases,
    embed.cases,
    mailbox.cases,
    norm.cases,
    activate.cases,
    router.cases,
    step_io.cases,
    sampling.cases,
    sample.cases,
    heads.cases,
    latent_heads.cases,
    attention.cases,
    gemm.cases,
)


def every_case() -> Iterator[Case]:
    """All cases, the large ones included."""
    for cases in SOURCES:
        yield from cases()
