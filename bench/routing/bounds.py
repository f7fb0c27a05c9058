"""What no policy can exceed, and plain LRU of every size at once."""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from profiles import RoutingTrace

I64 = NDArray[np.int64]
NEVER = np.iinfo(np.int64).max


def belady_hits(trace: RoutingTrace, layers: list[int], n_slots: int, warm_up: int = 0) -> int:
    """The most hits that the layers' tokens after the first `warm_up` can have with n_slots
    slots that they share and that start empty, if every expert could be brought at once, and none
    had to be.

    An expert that is kept from one use to the next is a hit. Of those that could be kept, too many
    at a time, the one needed last is let go: no other choice keeps more.
    """
    ends = _next_uses(trace, layers)
    kept_until: dict[int, int] = {}
    latest: list[int] = []
    n_kept = hits = 0
    for token in range(trace.n_tokens):
        n_back = kept_until.pop(token, 0)
        n_kept -= n_back
        hits += n_back if token >= warm_up else 0
        times, counts = np.unique(ends[token], return_counts=True)
        for end, count in zip(times.tolist(), counts.tolist(), strict=True):
            if end == NEVER:
                continue
            if end not in kept_until:
                heappush(latest, -end)
                kept_until[end] = 0
            kept_until[end] += count
            n_kept += count
        while n_kept > n_slots:
            end = -latest[0]
            dropped = min(n_kept - n_slots, kept_until[end])
            n_kept -= dropped
            kept_until[end] -= dropped
            if not kept_until[end]:
                heappop(latest)
                del kept_until[end]
    return hits


def _next_uses(trace: RoutingTrace, layers: list[int]) -> I64:
    """i64[n_tokens, n_layers * n_used]: the token that uses each choice next."""
    choices = trace.choices[:, layers]
    following = np.full((len(layers), max(trace.n_expert) + 1), NEVER, np.int64)  # -1: the last
    ends = np.full(choices.shape, NEVER, np.int64)
    rows = np.arange(len(layers))[:, None]
    for token in range(len(choices) - 1, -1, -1):
        used = choices[token]
        ends[token] = np.where(used >= 0, following[rows, used], NEVER)
        following[rows, used] = token
    return ends.reshape(len(choices), -1)


def lru_curves(trace: RoutingTrace, warm_up: int = 0) -> NDArray[np.float64]:
    """f64[n_layers, n_expert + 1]: the layer's hits of LRU, by the uses of all layers, with so many
    slots for the layer alone, where a missed expert has its slot at once."""
    n_expert = max(trace.n_expert)
    last = np.full((trace.n_layers, n_expert), -1, np.int64)
    found = np.zeros((trace.n_layers, n_expert + 1), np.int64)
    rows, within = np.arange(trace.n_layers)[:, None], np.arange(trace.n_used)[None, :]
    n_uses = 0
    for token, used in enumerate(trace.choices):
        known = used >= 0
        times = np.where(known, last[rows, used], -1)
        newer = (last[:, None, :] > times[:, :, None]).sum(axis=2)  # slots that LRU needs, less 1
        layers = np.broadcast_to(rows, used.shape)
        if token >= warm_up:
            n_uses += int(known.sum())
            np.add.at(found, (layers[times >= 0], newer[times >= 0] + 1), 1)
        order = np.broadcast_to(token * trace.n_used + within, used.shape)
        last[layers[known], used[known]] = order[known]
    curves: NDArray[np.float64] = np.cumsum(found, axis=1) / max(n_uses, 1)
    return curves


def lru_curve(trace: RoutingTrace, warm_up: int = 0) -> NDArray[np.float64]:
    """f64[n_expert + 1]: the hit rate over all layers."""
    return lru_curves(trace, warm_up).sum(axis=0)


def most_used_share(trace: RoutingTrace, n_slots: int) -> float:
    """The hit rate of the n_slots experts of each layer that the trace uses most, for ever."""
    hits = total = 0
    for layer in range(trace.n_layers):
        used = trace.choices[:, layer]
        counts = np.sort(np.bincount(used[used >= 0], minlength=trace.n_expert[layer]))
        hits += int(counts[-n_slots:].sum()) if n_slots else 0
        total += int(counts.sum())
    return hits / max(total, 1)
