"""The samplers once more, as plainly as possible: lists of (id, logit), math.exp, no shortcut."""

from __future__ import annotations

import math
from collections.abc import Callable

Row = list[tuple[int, float]]  # candidates, in any order


def softmax(row: Row) -> list[float]:
    top = max(z for _, z in row)
    weights = [math.exp(z - top) for _, z in row]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def by_logit(row: Row) -> Row:
    return sorted(row, key=lambda pair: (-pair[1], pair[0]))


def top_k(row: Row, k: int) -> Row:
    return by_logit(row)[:k]


def top_p(row: Row, p: float, min_keep: int = 0) -> Row:
    row, kept, total = by_logit(row), [], 0.0
    for pair, prob in zip(row, softmax(row), strict=True):
        kept.append(pair)
        total += prob
        if total >= p and len(kept) >= min_keep:
            break
    return kept


def min_p(row: Row, p: float, min_keep: int = 0) -> Row:
    row = by_logit(row)
    probs = softmax(row)
    return [
        pair for i, pair in enumerate(row) if i < min_keep or probs[i] >= p * probs[0] * (1 - 1e-9)
    ]


def typical(row: Row, p: float, min_keep: int = 0) -> Row:
    probs = softmax(row)
    entropy = -sum(q * math.log(q) for q in probs if q > 0)
    far = [abs(-math.log(q) - entropy) if q > 0 else math.inf for q in probs]
    kept, total = [], 0.0
    for i in sorted(range(len(row)), key=lambda i: far[i]):
        kept.append(row[i])
        total += probs[i]
        if total > p and len(kept) >= min_keep:
            break
    return kept


def top_n_sigma(row: Row, n: float) -> Row:
    finite = [z for _, z in row if z > -math.inf]
    mean = sum(finite) / len(finite)
    sigma = math.sqrt(sum((z - mean) ** 2 for z in finite) / len(finite))
    bound = max(finite) - n * sigma
    return [(i, z if z >= bound else -math.inf) for i, z in row]


def xtc(row: Row, threshold: float, min_keep: int = 0) -> Row:
    row = by_logit(row)
    above = sum(q >= threshold for q in softmax(row))
    if above < 2 or len(row) - (above - 1) < min_keep:
        return row
    return row[above - 1 :]


def temperature(row: Row, t: float) -> Row:
    return [(i, z / t) for i, z in row]


def dynamic_temperature(row: Row, t: float, spread: float, exponent: float) -> Row:
    entropy = -sum(q * math.log(q) for q in softmax(row) if q > 0)
    low = max(0.0, t - spread)
    return temperature(row, low + (t + spread - low) * (entropy / math.log(len(row))) ** exponent)


def penalties(
    row: Row, history: list[int], last_n: int, repeat: float, frequency: float, presence: float
) -> Row:
    window = history[-last_n:]
    changed = []
    for i, z in row:
        n = window.count(i)
        if n:
            z = (z / repeat if z > 0 else z * repeat) - n * frequency - presence
        changed.append((i, z))
    return changed


def dry(
    row: Row,
    history: list[int],
    multiplier: float,
    base: float,
    allowed: int,
    is_breaker: Callable[[int], bool] = lambda _: False,
) -> Row:
    """By brute force: for each token, the longest suffix of history that it has followed before."""
    n = len(history)
    longest: dict[int, int] = {}
    for end in range(1, n):  # history[end] followed history[:end]
        length = 0
        while length < end and history[end - 1 - length] == history[n - 1 - length]:
            if is_breaker(history[n - 1 - length]):
                break
            length += 1
        longest[history[end]] = max(longest.get(history[end], 0), length)
    return [
        (i, z - multiplier * base ** (longest[i] - allowed))
        if longest.get(i, 0) >= max(allowed, 1) and not is_breaker(i)
        else (i, z)
        for i, z in row
    ]


def mirostat_2(row: Row, mu: float) -> Row:
    row = by_logit(row)
    kept = [pair for pair, q in zip(row, softmax(row), strict=True) if -math.log2(q) <= mu]
    return kept or row[:1]


def mirostat_1(row: Row, mu: float, n_vocab: int) -> Row:
    row = by_logit(row)
    probs = softmax(row)
    t_b = t_t = 0.0
    for i in range(min(99, len(row) - 1)):
        t = math.log((i + 2) / (i + 1))
        t_b += t * math.log(probs[i] / probs[i + 1])
        t_t += t * t
    s = t_b / t_t
    epsilon = s - 1
    k = ((epsilon * 2**mu) / (1 - n_vocab**-epsilon)) ** (1 / s)
    return row[: max(int(k), 1)]


def adaptive(row: Row, target: float, mean: float) -> Row:
    wanted = min(max(2 * target - mean, 0), 1)
    reshaped = []
    for (i, _), q in zip(row, softmax(row), strict=True):
        x = abs(q - wanted) / 0.3
        reshaped.append((i, 5 - 10 * x * x / (1 + x)))
    return reshaped
