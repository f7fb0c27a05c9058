"""Every kernel that ships, in each of its formats and variants: what has to be tested.

A file of kernels has a `variants` function that yields (name, kernel), the name telling apart what
an entry's name does not; a new file is one line here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ops.gpu import (
    activate,
    attention,
    choose_experts,
    delta_gates,
    delta_net,
    dense_down,
    embed,
    expert,
    fetch,
    gated_streams,
    gemm,
    gemm_float,
    handover,
    heads,
    indexer,
    latent_attention,
    latent_heads,
    latent_pairs,
    linear,
    mailbox,
    ngram_memory,
    norm,
    quantize,
    router,
    sampling,
    step_io,
    streams,
    take_rows,
    timestamp,
)
from ops.gpu.kernel import Kernel

SOURCES: tuple[Callable[[], Iterator[tuple[str, Kernel]]], ...] = (
    quantize.variants,
    expert.variants,
    fetch.variants,
    linear.variants,
    embed.variants,
    mailbox.variants,
    norm.variants,
    activate.variants,
    router.variants,
    choose_experts.variants,
    step_io.variants,
    sampling.variants,
    handover.variants,
    heads.variants,
    latent_heads.variants,
    latent_attention.variants,
    latent_pairs.variants,
    attention.variants,
    gemm.variants,
    gemm_float.variants,
    delta_gates.variants,
    delta_net.variants,
    dense_down.variants,
    streams.variants,
    gated_streams.variants,
    ngram_memory.variants,
    take_rows.variants,
    indexer.variants,
    timestamp.variants,
)


def every_kernel() -> Iterator[tuple[str, Kernel]]:
    """(name, kernel) of all of them; the names differ."""
    for variants in SOURCES:
        yield from variants()
