"""The nth largest of some numbers."""

from __future__ import annotations

from ops.cpu.job import kernel_njit
from ops.cpu.vector import f32_at


@kernel_njit
def nth_largest(address, n, rank):
    """(the rank-th largest of f32[n], how many of its equals are among the rank largest).

    1 <= rank <= n; the numbers are reordered (quickselect).  With a NaN among them: any of them.
    """
    x = f32_at(address)
    first, last = 0, n - 1
    target = rank - 1
    while first < last:
        pivot = x[(first + last) // 2]
        i, j = first, last
        while i <= j:
            while x[i] > pivot:
                i += 1
            while x[j] < pivot:
                j -= 1
            if i <= j:
                held = x[i]
                x[i] = x[j]
                x[j] = held
                i += 1
                j -= 1
        if target <= j:
            last = j
        elif target >= i:
            first = i
        else:
            break
    limit = x[target]
    n_above = 0
    for i in range(n):
        n_above += x[i] > limit
    return limit, rank - n_above
