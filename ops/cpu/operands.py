"""The arguments of a matrix product, as the emitted code sees them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ops.cpu.emitter import I64, Emitter, Value
from ops.cpu.formats.kernel_format import FloatFormat, KernelFormat, SuperBlock


@dataclass(frozen=True)
class Operands:
    """The matrix and the rows of it that are wanted; see `ops.cpu.matmul`."""

    weights: Value
    row_bytes: Value
    row_begin: Value
    row_end: Value
    n_elems: Value

    def rows(self, begin: Value, end: Value) -> Operands:
        """The same matrix with other rows wanted."""
        return replace(self, row_begin=begin, row_end=end)


@dataclass(frozen=True)
class Token:
    """One vector's record, the two parts behind its values, and where its results go.

    arranged  x is in the order of the format's `arrangement`
    """

    x: Value
    scales: Value
    sums: Value
    y: Value
    arranged: bool = False


@dataclass(frozen=True)
class Vectors:
    """The pointer tables of all vectors."""

    x_ptrs: Value
    y_ptrs: Value
    n_tokens: Value

    def tokens(
        self, e: Emitter, fmt: KernelFormat, n_elems: Value, first: Value, count: int
    ) -> list[Token]:
        """`count` tokens from number `first`; beyond the end the last one again."""
        scales_at = sums_at = e.i64(0)
        if not isinstance(fmt, FloatFormat):
            scales_at = e.align(n_elems, 64)
            group = 256 if isinstance(fmt, SuperBlock) else 32
            n_scale_bytes = e.mul(e.b.udiv(n_elems, e.i64(group)), 4)
            sums_at = e.b.add(scales_at, e.align(n_scale_bytes, 64))
        tokens = []
        last = e.add(self.n_tokens, -1)
        for i in range(count):
            at = e.mul(e.minimum(e.add(first, i), last), 8)
            x = e.load(I64, self.x_ptrs, at)
            y = e.load(I64, self.y_ptrs, at)
            tokens.append(Token(x, e.add(x, scales_at), e.add(x, sums_at), y))
        return tokens
