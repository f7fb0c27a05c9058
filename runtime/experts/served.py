"""What serves the experts that steps chose: counted for each token, and added up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ops.cpu.expert_use import COUNT_USES, call_of, count_uses
from ops.cpu.job import live, record
from ops.cpu.program import address_of, aligned
from ops.gpu.router import in_place
from runtime.experts.totals import (
    FETCHED,
    IN_PLACE,
    N_KINDS,
    NOBODY,
    ON_CPU,
    ON_GPU,
    ExpertTotals,
    LinkTotals,
)

I8 = NDArray[np.int8]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]


@dataclass
class Usage:
    """Who served the routed experts of all tokens so far.

    by_layer  i64[n_layers, 5]: on the CPU, on the GPU, in place, fetched; the last column means
              nothing
    uploads   experts that set out for the GPU, upload_bytes of them
    fetch_bytes  of experts that prompts fetched
    """

    by_layer: I64
    uploads: int = 0
    upload_bytes: int = 0
    fetch_bytes: int = 0

    @property
    def cpu_misses(self) -> int:
        return int(self.by_layer[:, ON_CPU].sum())

    @property
    def hits(self) -> int:
        return int(self.by_layer[:, ON_GPU].sum())

    @property
    def in_place(self) -> int:
        return int(self.by_layer[:, IN_PLACE].sum())

    @property
    def fetched(self) -> int:
        return int(self.by_layer[:, FETCHED].sum())

    def totals(self, expert_bytes: I64, gpu: str) -> ExpertTotals:
        """The same with bytes; expert_bytes i64[n_layers]: of an expert."""
        n_bytes = expert_bytes @ self.by_layer
        return ExpertTotals(
            hits=self.hits,
            cpu=self.cpu_misses,
            in_place=self.in_place,
            fetched=self.fetched,
            swaps=self.uploads,
            cpu_bytes=int(n_bytes[ON_CPU]),
            links=(
                LinkTotals(
                    gpu,
                    uploaded=self.upload_bytes,
                    in_place=int(n_bytes[IN_PLACE]),
                    fetched=self.fetch_bytes,
                ),
            ),
        )


@dataclass(frozen=True)
class InPlaceRule:
    """Which missed experts of a token kernels read in place besides those that the table names.

    every    see `CacheSettings.in_place_every`; by_slot  bool[n_layers]: layers that may
    n_tokens of a step at most
    """

    every: int
    by_slot: NDArray[np.bool_]
    n_tokens: int

    def applies_to(self, n_tokens: int) -> bool:
        """Whether a step of so many tokens may read some."""
        return self.every > 0 and n_tokens <= self.n_tokens

    def apply(self, kinds: I8, choices: I32) -> None:
        """Change those of i8[n_layers, n_tokens, n_used]."""
        if self.applies_to(choices.shape[1]):
            missed = (kinds == ON_CPU) & self.by_slot[:, None, None] & (choices >= 0)
            kinds[in_place(missed, self.every)] = IN_PLACE


class UseCounter:
    """Counts what serves choices of experts.

    kinds   i8[n_layers, n_expert]: what serves each expert; looked at whenever something is counted
    totals  i64[n_layers, N_KINDS], to which all that is counted is added
    """

    def __init__(self, kinds: I8, totals: I64) -> None:
        self._kinds, self._totals = kinds, totals
        self._choices = aligned(max(kinds.size, 1), np.int32)
        self._counts = aligned(N_KINDS * max(kinds.size, 1), np.int64)
        self._args = record(
            COUNT_USES,
            choices=address_of(self._choices),
            kinds=address_of(kinds),
            counts=address_of(self._counts),
            totals=address_of(totals),
            n_layers=len(kinds),
            n_expert=kinds.shape[1],
            n_kinds=N_KINDS,
        )
        self._state = live(self._args)
        self._call = call_of(count_uses, self._args)
        self._expect((len(kinds), 0, 0))

    def _expect(self, shape: tuple[int, ...]) -> None:
        """Choices of this shape: where they go, and what is counted of them."""
        n_layers, n, n_used = self._shape = shape
        self._fits = n_layers * n * n_used <= self._kinds.size
        self._state.n_tokens, self._state.n_used = n, n_used
        if self._fits:
            self._given = self._choices[: n_layers * n * n_used].reshape(shape)
            n_counts = n * n_layers * N_KINDS
            self._found = self._counts[:n_counts].reshape(n, n_layers, N_KINDS)

    def counted(self, choices: I32, rule: InPlaceRule) -> I64:
        """i64[n, n_layers, N_KINDS]: what serves the choices, of each token or (n = 1) of all.

        choices  i32[n_layers, n_tokens, n_used], -1: none
        """
        if choices.shape != self._shape:
            self._expect(choices.shape)
        if not self._fits or (rule.every and rule.applies_to(choices.shape[1])):
            counts = counted(self._kinds, choices, rule)
            self._totals += counts.sum(axis=0)
            return counts
        self._given[:] = choices
        self._call()
        return self._found.copy()


def counted(kinds: I8, choices: I32, rule: InPlaceRule) -> I64:
    """The same without a compiled call: of many choices, or where tokens read in place."""
    (n_layers, n_expert), n = kinds.shape, choices.shape[1]
    layers = np.arange(n_layers)[:, None, None]
    if choices.size > kinds.size and not rule.applies_to(n):
        # Experts, not choices: a prompt's take 20 ms longer.
        n = 1
        cells = choices + (1 + (n_expert + 1) * layers)
        uses = np.bincount(cells.reshape(-1), minlength=n_layers * (n_expert + 1))
        weights = uses.reshape(n_layers, n_expert + 1)[:, 1:]
        cells = kinds + N_KINDS * layers[:, 0]
        counts = np.bincount(cells.reshape(-1), weights.reshape(-1), N_KINDS * n_layers)
    else:
        chosen = kinds[layers, choices]
        rule.apply(chosen, choices)
        if int(choices.min(initial=0)) < 0:
            chosen[choices < 0] = NOBODY
        cells = chosen + N_KINDS * (layers + n_layers * np.arange(n)[:, None])
        counts = np.bincount(cells.reshape(-1), minlength=N_KINDS * n_layers * n)
    return counts.reshape(n, n_layers, N_KINDS).astype(np.int64)
