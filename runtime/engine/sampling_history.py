"""What a sequence holds so far, as the repetition samplers see it: counts, and repeats for DRY."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

MAX_EXPONENT_LOG = 88.7228391  # ln of the largest f32


class TokenWindow:
    """The last `size` tokens and how often each occurs among them."""

    def __init__(self, size: int) -> None:
        self.tokens: deque[int] = deque(maxlen=size)
        self.counts: dict[int, int] = {}

    def push(self, token: int) -> None:
        if not self.tokens.maxlen:
            return
        if len(self.tokens) == self.tokens.maxlen:
            oldest = self.tokens[0]
            self.counts[oldest] -= 1
            if not self.counts[oldest]:
                del self.counts[oldest]
        self.tokens.append(token)
        self.counts[token] = self.counts.get(token, 0) + 1


def longest_repeats(tokens: Sequence[int], limit: int) -> dict[int, int]:
    """For each token that once followed what the sequence ends with: how long that repeat is.

    [.. a b c d .. a b c] gives {d: 3}; at most `limit`.  Linear: the Z function of the reversed
    tokens.
    """
    backwards = list(reversed(tokens))
    n = len(backwards)
    matches = [0] * n
    left = right = 0  # backwards[left:right] equals backwards[0:right-left]
    longest: dict[int, int] = {}
    for k in range(1, n):
        length = min(right - k, matches[k - left]) if k < right else 0
        while k + length < n and backwards[length] == backwards[k + length]:
            length += 1
        matches[k] = length
        if k + length > right:
            left, right = k, k + length
        follower = backwards[k - 1]
        if length and longest.get(follower, 0) < min(length, limit):
            longest[follower] = min(length, limit)
    return longest


def repeat_limit(tokens: Sequence[int], breakers: Mapping[int, Sequence[tuple[int, ...]]]) -> int:
    """How many tokens at the end lie after the last sequence breaker (all, where there is none).

    breakers  token -> the tails that make it a breaker together with the tokens after it;
              () for a breaker by itself
    """
    n = len(tokens)
    for after in range(n):
        tails = breakers.get(tokens[n - 1 - after])
        if tails is None:
            continue
        following = tuple(tokens[n - after : n - after + max(map(len, tails))])
        fitting = [len(tail) for tail in tails if following[: len(tail)] == tail]
        if fitting:
            return after - max(fitting)
    return n


def dry_penalties(
    tokens: Sequence[int],
    breakers: Mapping[int, Sequence[tuple[int, ...]]],
    multiplier: float,
    base: float,
    allowed_length: int,
) -> dict[int, float]:
    """multiplier * base^(length - allowed_length) for each token that would extend a repeat."""
    if len(tokens) <= allowed_length:
        return {}
    limit = repeat_limit(tokens, breakers)
    if limit < allowed_length:
        return {}
    highest = int(MAX_EXPONENT_LOG / math.log(base)) if base > 1.000001 else 0
    penalties = {}
    for token, length in longest_repeats(tokens, limit).items():
        if length < allowed_length or () in breakers.get(token, ()):
            continue
        exponent = length - allowed_length
        if highest:
            exponent = min(exponent, highest)
        penalties[token] = min(multiplier * base**exponent, 3e38)
    return penalties
