"""Activations in the order that a format's weights unpack to with the least work.

Putting one vector in order costs as much as a few blocks of weights; a product reads it again for
every row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ops.cpu.emitter import I8, Emitter, Value, vector
from ops.cpu.formats.kernel_format import CHUNK, SuperBlock
from ops.cpu.operands import Token

BLOCK = 256


def arrange(
    e: Emitter, fmt: SuperBlock, tokens: list[Token], n_elems: Value, target: Value
) -> list[Token]:
    """The tokens with their values copied to `target`, one after the other, in fmt's arrangement.

    Raises:
        ValueError: the format has no arrangement.
    """
    order = fmt.arrangement(e)
    if order is None:
        raise ValueError(f"{fmt.name} has no arrangement for {e.isa}")
    copies = []
    for i, token in enumerate(tokens):
        copy = e.add(target, e.mul(n_elems, i))
        with e.loop(0, n_elems, BLOCK) as at:
            source = e.add(token.x, at)
            chunks = [e.load(vector(I8, CHUNK), source, start) for start in range(0, BLOCK, CHUNK)]
            for start in range(0, BLOCK, CHUNK):
                e.store(_pick(e, chunks, order[start : start + CHUNK]), e.add(copy, at), start)
        copies.append(replace(token, x=copy, arranged=True))
    return copies


def _pick(e: Emitter, chunks: Sequence[Value], lanes: Sequence[int]) -> Value:
    """The numbered lanes of all chunks together, picked from two chunks at a time."""
    if len(chunks) == 1:
        return e.shuffle(chunks[0], lanes)
    half = len(chunks) // 2
    n_low = half * CHUNK
    within = [lane % n_low for lane in lanes]
    low, high = (_pick(e, part, within) for part in (chunks[:half], chunks[half:]))
    return e.shuffle(low, [i + CHUNK * (lane >= n_low) for i, lane in enumerate(lanes)], high)
