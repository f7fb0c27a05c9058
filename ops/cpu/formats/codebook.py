"""Grid lookups and sign bits of the IQ formats, for every instruction set.

A grid entry holds the bytes of 4 or 8 neighbouring weights, so a lookup is one load and its result
is already in natural order.  On AVX-512 entries of eight bytes are gathered (measured on Emerald
Rapids: 1.7 ns for eight, 2.8 ns by single loads); grids of four-byte entries are kept in registers,
see `ops.cpu.formats.codebook_vbmi`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from ops.cpu.emitter import I8, I16, I32, I64, Emitter, Value, vector
from ops.quants.codebooks import grid

SIGN_CODE_BITS = 7
GATHERED_BITS = 64


def entry_table(e: Emitter, name: str, factor: int, offset: int) -> Value:
    """The address of a grid whose entries are integers of the bytes factor * value + offset."""
    entries = (factor * grid(name) + offset).astype(np.uint8)
    n_entries, n_bytes = entries.shape
    element = ir.IntType(8 * n_bytes)
    kind = ir.ArrayType(element, n_entries)
    symbol = f"{name}.grid.{factor}.{offset}"
    table = e.b.module.globals.get(symbol)
    if table is None:
        words = [int.from_bytes(entry.tobytes(), "little") for entry in entries]
        table = cgutils.global_constant(e.b.module, symbol, ir.Constant(kind, words))
        table.align = 64
    return e.b.ptrtoint(table, I64)


def pinned(e: Emitter, element: ir.Type, values: Iterable[int]) -> Value:
    """`Emitter.constant` of integers that stays in a register through an inner loop.

    The compiler keeps constants in memory and reads them, through an address it makes each time,
    wherever they are used: up to a fifth of a kernel's time.  So it must not see that this is one.
    """
    n_bytes, values = element.width // 8, list(values)
    data = b"".join((v % (1 << element.width)).to_bytes(n_bytes, "little") for v in values)
    kind = ir.ArrayType(I8, len(data))
    symbol = f"pinned.{data.hex()}"
    table = e.b.module.globals.get(symbol)
    if table is None:
        table = cgutils.global_constant(e.b.module, symbol, ir.Constant(kind, bytearray(data)))
        table.align = 64
    address = e.b.ptrtoint(table, I64)
    value = e.load(vector(element, len(values)), e.add(address, e.unseen(0, address)))
    value.set_metadata("invariant.load", e.b.module.add_metadata([]))
    return value


def entries(e: Emitter, table: Value, codes: Value, bits: int) -> Value:
    """i8x64: the entries of `bits` bits that lanes of i8 or i16 codes choose, in their order."""
    if e.isa == "avx512" and bits == GATHERED_BITS:
        return _gather(e, table, e.widen(codes, I32, signed=False))
    element, width = ir.IntType(bits), codes.type.element.width
    words = e.cast(codes, I64)
    chosen = e.zeros(element, codes.type.count)
    for lane in range(codes.type.count):
        word, place = divmod(lane, 64 // width)
        shifted = e.b.lshr(e.extract(words, word), e.i64(width * place))
        code = e.b.and_(shifted, e.i64((1 << width) - 1))
        entry = e.load(element, table, e.mul(code, bits // 8))
        chosen = e.insert(chosen, entry, lane)
    return e.cast(chosen, I8)


def longer_codes(e: Emitter, low: Value, word: Value, starts: Sequence[int], mask: int) -> Value:
    """i16 lanes: bytes `low`, and above them the bits of `word` from bit starts[i] in lane i.

    word: i32; mask: the bits of a code that come from it.
    """
    fields = e.shift_right(e.splat(word, len(starts)), starts)
    high = e.bit_and(e.shift_left(fields, 8), mask)
    return e.b.or_(e.widen(low, I16, signed=False), e.b.trunc(high, vector(I16, len(starts))))


def flip_signs(e: Emitter, raised: Value, negative: Value, offset: int) -> Value:
    """offset + w -> offset - w where `negative`, an i1 vector."""
    mirror = 2 * offset if offset < 64 else 2 * offset - 256
    return e.select(negative, e.b.sub(e.same(raised, mirror), raised), raised)


def stored_signs(e: Emitter, address: Value, offset: int) -> Value:
    """i1x64: the sign bits of 64 weights, eight bytes at address + offset."""
    return e.b.bitcast(e.load(I64, address, offset), vector(ir.IntType(1), 64))


def sign_bytes(e: Emitter, words: Value) -> Value:
    """i32x8, four 7-bit sign codes from bit 0 each -> i8x32 of eight sign bits.

    The eighth bit is the parity of the seven; bits of a byte's neighbours reach its upper half
    only, so all bytes of a word fold at once.
    """
    codes = e.bit_and(words, 0x7F)
    for byte in range(1, 4):
        code = e.bit_and(e.shift_left(words, byte), 0x7F << 8 * byte)
        codes = e.b.or_(codes, code)
    folded = codes
    for distance in (4, 2, 1):
        folded = e.b.xor(folded, e.shift_right(folded, distance))
    parity = e.shift_left(e.bit_and(folded, 0x01010101), SIGN_CODE_BITS)
    return e.cast(e.b.or_(codes, parity), I8)


def spread_signs(e: Emitter, bytes_: Value, index: int) -> Value:
    """i1x64: the bits of bytes 8 * index ... of i8x32."""
    chosen = e.shuffle(bytes_, [8 * index + weight // 8 for weight in range(64)])
    bits = e.b.and_(chosen, e.constant(I8, [1, 2, 4, 8, 16, 32, 64, -128] * 8))
    return e.b.icmp_unsigned("!=", bits, e.same(bits, 0))


def each_twice(e: Emitter, numbers: Value) -> Value:
    """i32x8 of numbers that fit 16 bits -> i16x16, every one for two runs of 16 values."""
    low = e.bit_and(numbers, 0xFFFF)
    return e.cast(e.b.or_(low, e.shift_left(numbers, 16)), I16)


def odd_nibbles(e: Emitter, block: Value, offset: int) -> Value:
    """2 s + 1 of the 16 nibbles s in eight bytes, low ones first: i16x16."""
    packed = e.widen(e.load(vector(I8, 8), block, offset), I16, signed=False)
    spread = e.b.or_(packed, e.shift_left(packed, 4))
    nibbles = e.widen(e.cast(e.bit_and(spread, 0x0F0F), I8), I16, signed=False)
    return e.b.or_(e.shift_left(nibbles, 1), e.same(nibbles, 1))


def scaled(e: Emitter, numbers: Value, factor: float) -> Value:
    """f32 vector times a power of two."""
    return e.b.fmul(numbers, e.splat(e.f32(factor), numbers.type.count))


def _gather(e: Emitter, table: Value, codes: Value) -> Value:
    """Eight entries of eight bytes by one instruction."""
    every = e.constant(ir.IntType(1), [1] * 8)
    pointer = e.b.inttoptr(table, I8.as_pointer())
    source = e.zeros(I64, 8)
    name = "llvm.x86.avx512.mask.gather.dpq.512"
    return e.cast(e.call(name, source.type, source, pointer, codes, every, e.i32(8)), I8)
