"""Matrix times a few vectors for float weights: 64 partial sums, one fma an element."""

from __future__ import annotations

from ops.cpu.emitter import F32, Emitter, vector
from ops.cpu.formats.kernel_format import FloatFormat
from ops.cpu.gemv import PREFETCH_BYTES
from ops.cpu.operands import Operands, Token

LANES = 16
PARTIALS = 64


def float_gemv(e: Emitter, fmt: FloatFormat, m: Operands, tokens: list[Token]) -> None:
    """y[row] for the rows of `m`.  The elements after the last whole 64 go one by one."""
    kind = vector(F32, LANES)
    partials = [[e.variable(kind) for _ in range(PARTIALS // LANES)] for _ in tokens]
    stacks = [e.stack(4 * PARTIALS) for _ in tokens]
    whole = e.b.and_(m.n_elems, e.i64(-PARTIALS))
    with e.loop(m.row_begin, m.row_end) as row:
        weights = e.add(m.weights, e.mul(row, m.row_bytes))
        for partial in (p for group in partials for p in group):
            e.put(partial, e.zeros(F32, LANES))
        with e.loop(0, whole, PARTIALS) as i:
            address = e.add(weights, e.mul(i, fmt.elem_bytes))
            e.prefetch(address, PREFETCH_BYTES, PARTIALS * fmt.elem_bytes)
            for j in range(PARTIALS // LANES):
                w = fmt.values(e, e.add(address, j * LANES * fmt.elem_bytes), LANES)
                for token, group in zip(tokens, partials, strict=True):
                    x = e.load(kind, token.x, e.mul(e.add(i, j * LANES), 4))
                    e.put(group[j], e.fma(w, x, e.get(group[j])))
        for stack, group in zip(stacks, partials, strict=True):
            for j, partial in enumerate(group):
                e.store(e.get(partial), stack, 4 * LANES * j)
        with e.loop(whole, m.n_elems) as i:
            w = fmt.values(e, e.add(weights, e.mul(i, fmt.elem_bytes)), 1)
            slot = e.mul(e.b.sub(i, whole), 4)
            for token, stack in zip(tokens, stacks, strict=True):
                x = e.load(w.type, token.x, e.mul(i, 4))
                e.store(e.fma(w, x, e.load(w.type, stack, slot)), stack, slot)
        for token, stack in zip(tokens, stacks, strict=True):
            total = e.tree_sum(e.load(vector(F32, PARTIALS), stack))
            e.store(total, token.y, e.mul(row, 4))
