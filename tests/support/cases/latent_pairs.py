"""latent_pairs: the pages of a step's sequences in two parts, and no other page."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from ops.gpu.kv_layout import PAGE_TOKENS
from ops.gpu.latent_attention import DIM_V, DIMS_K
from ops.gpu.latent_pairs import latent_pairs, latent_pairs_reference
from tests.support.cases.case import Case, Outcome
from tests.support.kv_sequences import KVSequences
from tests.support.machines import Machine

UNTOUCHED = 7.5


def run(dim_k: int, overlapped: bool, lengths: list[int], m: Machine) -> Outcome:
    """Both parts of every page, f16[n_pages, 2, 32, dim_k]."""
    sequences = KVSequences.random(lengths, 1, dim_k, DIM_V, "q8_0", "q8_0")
    keys, _ = sequences.pages.decoded()
    expected = np.full((len(keys), 2, PAGE_TOKENS, dim_k), UNTOUCHED, np.float32)
    pairs = m.place(expected.astype(np.float16))
    width = sequences.tables.shape[1]
    m.launch(
        latent_pairs(dim_k, overlapped=overlapped),
        (width, len(lengths) + 1),
        {
            "counts": m.place(np.array([0, 0, len(lengths), 0], np.uint32), writable=False),
            "page_tables": m.place(sequences.tables, writable=False),
            "k_pages": m.place(sequences.pages.keys, writable=False),
            "pairs": pairs,
            "table_stride": width,
            "k_page_bytes": sequences.pages.parameters()["k_page_bytes"],
        },
    )
    written = sequences.tables[sequences.tables >= 0]
    expected[written] = np.stack(latent_pairs_reference(keys[written, 0]), axis=1)
    return Outcome(m.read(pairs, np.float16, expected.shape), expected.astype(np.float16))


def cases() -> Iterator[Case]:
    for dim_k in DIMS_K:
        for overlapped in (False, True):
            kernel = latent_pairs(dim_k, overlapped=overlapped)
            for lengths, large in (([40, 3], False), ([3000, 0, 700], True)):
                given = partial(run, dim_k, overlapped, lengths)
                yield Case(f"{lengths} tokens", kernel, given, large)
