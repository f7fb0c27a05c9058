"""Who served a model's routed experts, and what that moved: of a step, a request, or all so far.

A use is one expert of one token in one layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]

ON_CPU, ON_GPU, IN_PLACE, FETCHED, NOBODY = 0, 1, 2, 3, 4
N_KINDS = 5
"""What serves a use: columns of counts. The last one means that a layer uses fewer experts."""


@dataclass(frozen=True, slots=True)
class StepUse:
    """Uses of one step on one GPU's layers.

    counts       i64[n, n_layers, N_KINDS], n: its tokens, or 1: all of them together
    expert_bytes i64[n_layers], of an expert
    """

    counts: I64
    expert_bytes: I64


class RequestUse:
    """Uses of one request's tokens so far; a prompt that shared a step with others counts with its
    share of the tokens."""

    __slots__ = ("_counts", "_expert_bytes")

    def __init__(self) -> None:
        self._counts: list[NDArray[np.float64]] = []  # of each GPU, f64[n_layers, N_KINDS]
        self._expert_bytes: list[I64] = []

    @property
    def uses(self) -> float:
        return float(sum(counts[:, :NOBODY].sum() for counts in self._counts))

    @property
    def hit_rate(self) -> float:
        """0 to 1; 0 where nothing was used."""
        hits = float(sum(counts[:, ON_GPU].sum() for counts in self._counts))
        return hits / max(self.uses, 1.0)

    @property
    def miss_bytes(self) -> float:
        """Of the experts that were not on the GPU, anew for every token."""
        both = zip(self._counts, self._expert_bytes, strict=True)
        kinds = [ON_CPU, IN_PLACE, FETCHED]
        return float(sum(n_bytes @ counts[:, kinds].sum(axis=1) for counts, n_bytes in both))

    def add(self, step: Sequence[StepUse], tokens: slice, n_tokens: int) -> None:
        """These of the n_tokens tokens of a step were the request's.  Takes a microsecond or so."""
        if not self._counts:
            self._counts = [np.zeros(use.counts.shape[1:]) for use in step]
            self._expert_bytes = [use.expert_bytes for use in step]
        for counts, use in zip(self._counts, step, strict=True):
            if len(use.counts) != n_tokens:
                counts += use.counts[0] * ((tokens.stop - tokens.start) / n_tokens)
            elif tokens.stop - tokens.start == 1:
                counts += use.counts[tokens.start]
            else:
                counts += use.counts[tokens].sum(axis=0)


@dataclass(frozen=True)
class LinkTotals:
    """Bytes that crossed the link of one GPU: experts that moved into a slot, that kernels read
    where they lie, and that prompts fetched.

    gb_s  rate of the first, 0: not known
    """

    gpu: str
    uploaded: int = 0
    in_place: int = 0
    fetched: int = 0
    gb_s: float = 0.0

    def since(self, earlier: LinkTotals) -> LinkTotals:
        return LinkTotals(
            self.gpu,
            self.uploaded - earlier.uploaded,
            self.in_place - earlier.in_place,
            self.fetched - earlier.fetched,
            self.gb_s,
        )


@dataclass(frozen=True)
class ExpertTotals:
    """hits, cpu, in_place, fetched: uses served by a slot, the CPU, in place, fetched experts.

    swaps         experts that set out for a slot
    cpu_bytes     of weights that the CPU's uses are of
    cpu_seconds   the CPU team computed; wait_seconds: it waited for what the GPU posts
    """

    hits: int = 0
    cpu: int = 0
    in_place: int = 0
    fetched: int = 0
    swaps: int = 0
    cpu_bytes: int = 0
    cpu_seconds: float = 0.0
    wait_seconds: float = 0.0
    links: tuple[LinkTotals, ...] = ()

    @property
    def misses(self) -> int:
        return self.cpu + self.in_place + self.fetched

    @property
    def hit_rate(self) -> float:
        """0 to 1; 0 where nothing was used."""
        return self.hits / max(self.hits + self.misses, 1)

    @property
    def link_bytes(self) -> int:
        """Over all links, whatever for."""
        return sum(link.uploaded + link.in_place + link.fetched for link in self.links)

    def since(self, earlier: ExpertTotals) -> ExpertTotals:
        """What has come since an earlier reading."""
        known = {link.gpu: link for link in earlier.links}
        return ExpertTotals(
            hits=self.hits - earlier.hits,
            cpu=self.cpu - earlier.cpu,
            in_place=self.in_place - earlier.in_place,
            fetched=self.fetched - earlier.fetched,
            swaps=self.swaps - earlier.swaps,
            cpu_bytes=self.cpu_bytes - earlier.cpu_bytes,
            cpu_seconds=self.cpu_seconds - earlier.cpu_seconds,
            wait_seconds=self.wait_seconds - earlier.wait_seconds,
            links=tuple(
                link.since(known.get(link.gpu, LinkTotals(link.gpu))) for link in self.links
            ),
        )


def together(parts: Iterable[ExpertTotals]) -> ExpertTotals:
    """Of several GPUs, whose links differ."""
    held = list(parts)
    return ExpertTotals(
        hits=sum(part.hits for part in held),
        cpu=sum(part.cpu for part in held),
        in_place=sum(part.in_place for part in held),
        fetched=sum(part.fetched for part in held),
        swaps=sum(part.swaps for part in held),
        cpu_bytes=sum(part.cpu_bytes for part in held),
        cpu_seconds=sum(part.cpu_seconds for part in held),
        wait_seconds=sum(part.wait_seconds for part in held),
        links=tuple(link for part in held for link in part.links),
    )
