"""Quantized matrix products: one compiled C function for each weight format.

    void matmul(i64 weights, i64 row_bytes, i64 row_begin, i64 row_end, i64 n_elems,
                i64 x_ptrs, i64 y_ptrs, i64 n_tokens, i64 scratch)

stores y_ptrs[t][row] (f32) for row_begin <= row < row_end and t < n_tokens.  Row r starts at
weights + r * row_bytes; x_ptrs[t] is the address of token t's activation record (see
`ops.arithmetic.activation_layout`), or of its f32 row for float formats.  `scratch` is the caller's
own buffer of SCRATCH_BYTES, 64-byte aligned.  Every result has the bits of
`ops.arithmetic.dot_rows`, whatever the instruction set, the rows and the other tokens.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import cfunc, types
from numba.extending import intrinsic

from ops.cpu import gemm
from ops.cpu.arrangement import arrange
from ops.cpu.emitter import Emitter, Value
from ops.cpu.formats import KERNEL_FORMATS
from ops.cpu.formats.kernel_format import FloatFormat, KernelFormat, SmallBlock, SuperBlock
from ops.cpu.gemv import superblock_gemv
from ops.cpu.gemv_eights import eights_gemv, prepared, room_elems
from ops.cpu.gemv_float import float_gemv
from ops.cpu.gemv_short import SHORT_ELEMS, short_gemv
from ops.cpu.gemv_small import small_gemv
from ops.cpu.isa import Isa, choose_isa
from ops.cpu.ledger import is_dry
from ops.cpu.operands import Operands, Token, Vectors
from ops.cpu.x86 import emitter_for

SIGNATURE = types.void(*[types.int64] * 9)
SCRATCH_BYTES = gemm.SCRATCH_BYTES
ARRANGED_ELEMS = SCRATCH_BYTES // 4
"""The longest row of which four vectors fit the scratch."""
L2_ROWS_BYTES = 128 * 1024
"""Weights that several groups of tokens go through before the next rows: they stay in L2."""


def matmul_address(format_name: str, isa: str | None = None) -> int:
    """The address of the compiled function, for the fastest instruction set or the given one; 0
    where memory is only counted.

    Raises:
        LookupError: no kernel for this format.
        UnsupportedIsa: `isa` cannot run here.
    """
    if format_name not in KERNEL_FORMATS:
        known = ", ".join(KERNEL_FORMATS)
        raise LookupError(f"no CPU kernel for format {format_name!r}; known: {known}")
    return 0 if is_dry() else int(_compiled(format_name, choose_isa(isa)).address)


@functools.cache
def _compiled(format_name: str, isa: Isa) -> Any:
    """The C function; it closes over two strings only, so the disk cache finds it again."""

    @cfunc(SIGNATURE, nopython=True, cache=True)
    def matmul(weights, row_bytes, begin, end, n_elems, x_ptrs, y_ptrs, n_tokens, scratch):  # type: ignore[no-untyped-def]
        operands = (weights, row_bytes, begin, end, n_elems, x_ptrs, y_ptrs, n_tokens, scratch)
        _product(format_name, isa, operands)

    return matmul


@intrinsic(prefer_literal=True)
def _product(
    _: Any, format_name: types.Type, isa: types.Type, operands: types.Type
) -> tuple[Any, Any]:
    def codegen(context: Any, builder: Any, _: Any, args: Any) -> Any:
        e = emitter_for(isa.literal_value, builder)
        *matrix, x_ptrs, y_ptrs, n_tokens, scratch = (
            builder.extract_value(args[2], i) for i in range(len(operands))
        )
        vectors = Vectors(x_ptrs, y_ptrs, n_tokens)
        fmt = KERNEL_FORMATS[format_name.literal_value]
        _emit_product(e, fmt, Operands(*matrix), vectors, scratch)
        return context.get_dummy_value()

    return types.void(format_name, isa, operands), codegen


def _emit_product(
    e: Emitter, fmt: KernelFormat, m: Operands, vectors: Vectors, scratch: Value
) -> None:
    if isinstance(fmt, FloatFormat):
        _emit_groups(e, fmt, m, vectors)
        return
    blocked = e.b.and_(
        e.b.icmp_signed(">=", vectors.n_tokens, e.i64(e.gemm_tokens)),
        e.b.icmp_signed("<=", m.n_elems, e.i64(gemm.MAX_ELEMS)),
    )
    with e.b.if_else(blocked) as (many, few):
        with many:
            gemm.emit_gemm(e, fmt, m, vectors, scratch)
        with few:
            longest = _longest_arranged(e, fmt)
            if longest > 0:
                room = e.b.icmp_signed("<=", m.n_elems, e.i64(longest))
                with e.b.if_else(room) as (fits, too_long):
                    with fits:
                        _emit_groups(e, fmt, m, vectors, scratch)
                    with too_long, e.loop(0, vectors.n_tokens) as token:
                        _emit_group(e, fmt, m, vectors.tokens(e, fmt, m.n_elems, token, 1))
            else:
                _emit_groups(e, fmt, m, vectors)


def _longest_arranged(e: Emitter, fmt: KernelFormat) -> int:
    """The longest row whose activations, put in order for the format, have room; 0: it wants none
    of that."""
    if not isinstance(fmt, SuperBlock):
        return 0
    ways = fmt.eights(e)
    if ways is not None:
        return room_elems(ways, SCRATCH_BYTES, 4)
    return ARRANGED_ELEMS if fmt.arrangement(e) else 0


def _emit_groups(
    e: Emitter, fmt: KernelFormat, m: Operands, vectors: Vectors, scratch: Value | None = None
) -> None:
    """Tokens in groups of four, two and one, which share the unpacked weights; three count as
    four.  All groups go through a few rows before the next rows.

    scratch: room for a group's activations in the format's arrangement; None: as they are.
    """

    def emit(rows: Operands, first: Value, count: int) -> None:
        tokens = vectors.tokens(e, fmt, m.n_elems, first, count)
        if isinstance(fmt, SuperBlock) and scratch is not None:
            _emit_arranged(e, fmt, rows, tokens, scratch)
        else:
            _emit_group(e, fmt, rows, tokens)

    step = e.b.udiv(e.i64(L2_ROWS_BYTES), m.row_bytes)
    step = e.b.select(e.b.icmp_signed("<", step, e.i64(1)), e.i64(1), step)
    with e.loop(m.row_begin, m.row_end, step) as begin:
        rows = m.rows(begin, e.minimum(e.b.add(begin, step), m.row_end))
        with e.loop(0, vectors.n_tokens, 4) as first:
            left = e.b.sub(vectors.n_tokens, first)
            with e.b.if_else(e.b.icmp_signed(">", left, e.i64(2))) as (several, at_most_two):
                with several:
                    emit(rows, first, 4)
                with (
                    at_most_two,
                    e.b.if_else(e.b.icmp_signed("==", left, e.i64(2))) as (two, one),
                ):
                    with two:
                        emit(rows, first, 2)
                    with one:
                        emit(rows, first, 1)


def _emit_arranged(
    e: Emitter, fmt: SuperBlock, m: Operands, tokens: list[Token], scratch: Value
) -> None:
    ways = fmt.eights(e)
    if ways is None:
        _emit_group(e, fmt, m, arrange(e, fmt, tokens, m.n_elems, scratch))
    else:
        eights_gemv(e, fmt, ways, m, prepared(e, ways, tokens, m.n_elems, scratch))


def _emit_group(e: Emitter, fmt: KernelFormat, m: Operands, tokens: list[Token]) -> None:
    if isinstance(fmt, SuperBlock):
        short = e.b.icmp_signed("<=", m.n_elems, e.i64(SHORT_ELEMS))
        with e.b.if_else(short) as (few_units, many_units):
            with few_units:
                short_gemv(e, fmt, m, tokens)
            with many_units:
                superblock_gemv(e, fmt, m, tokens)
    elif isinstance(fmt, SmallBlock):
        small_gemv(e, fmt, m, tokens)
    else:
        float_gemv(e, fmt, m, tokens)
