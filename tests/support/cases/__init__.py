"""What every GPU kernel has to compute: the cases, run by the interpreter and on GPUs.

A file of cases has a `cases` function; a new file is one line in `SOURCES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.support.cases import (
    activate,
    attention,
    attention_join,
    choose_experts,
    delta_gates,
    delta_net,
    dense_down,
    embed,
    expert,
    fetch,
    gated_streams,
    gemm,
    handover,
    heads,
    indexer,
    latent_attention,
    latent_heads,
    latent_pairs,
    linear,
    mailbox,
    mixed_streams,
    ngram_memory,
    norm,
    quantize,
    router,
    sample,
    sampling,
    step_io,
    streams,
    take_rows,
    timestamp,
)
from tests.support.cases.case import Case

SOURCES: tuple[Callable[[], Iterator[Case]], ...] = (
    quantize.cases,
    expert.cases,
    fetch.cases,
    linear.cases,
    embed.cases,
    mailbox.cases,
    norm.cases,
    activate.cases,
    router.cases,
    choose_experts.cases,
    step_io.cases,
    sampling.cases,
    sample.cases,
    handover.cases,
    heads.cases,
    latent_heads.cases,
    latent_attention.cases,
    latent_pairs.cases,
    attention.cases,
    attention_join.cases,
    gemm.cases,
    delta_gates.cases,
    delta_net.cases,
    dense_down.cases,
    streams.cases,
    gated_streams.cases,
    mixed_streams.cases,
    ngram_memory.cases,
    take_rows.cases,
    indexer.cases,
    timestamp.cases,
)


def every_case() -> Iterator[Case]:
    """All cases, the large ones included."""
    for cases in SOURCES:
        yield from cases()
