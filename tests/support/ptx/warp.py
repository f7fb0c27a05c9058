"""Exchanges between the lanes of a warp, and tensor-core products.

The machine brings together the threads that such an instruction names before it runs here. Thread
numbers are 32 a warp, so arrays over all threads fold into rows of 32 lanes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.ptx.elementwise import Builder
from tests.support.ptx.errors import PtxError, UninitialisedRead
from tests.support.ptx.frame import DTYPES, Array, Frame, Step, only
from tests.support.ptx.syntax import Instruction, Pair, Sink

LANES = 32


def _split_pair(operand: Any) -> tuple[Any, Any]:
    return (operand.first, operand.second) if isinstance(operand, Pair) else (operand, Sink())


def _spread(frame: Frame, threads: Array, values: Any) -> Array:
    """An array over all warps, [n_warps, 32], with the threads' values, else zero."""
    values = np.asarray(values)
    spread = np.zeros(frame.n_threads, values.dtype)
    spread[threads] = values
    return spread.reshape(-1, LANES)


def _members(frame: Frame, threads: Array) -> Array:
    """bool[n_warps, 32]: who takes part."""
    return _spread(frame, threads, np.ones(len(threads), bool))


def build_shfl(instruction: Instruction, frame: Frame) -> Step:
    only(instruction, "sync", "up", "down", "bfly", "idx")
    mode = instruction.modifiers[1]
    first, *rest = instruction.operands
    result, in_range = _split_pair(first)
    target, flag = frame.target(result, "b32"), frame.target(in_range, "pred")
    value, by, clamp = (frame.source(operand, "b32") for operand in rest[:3])

    def step(s: Any) -> None:
        threads = frame.lanes(s)
        lane = threads % LANES
        offset, c = np.int64(by(s)) & 31, np.int64(clamp(s))
        segment, limit = (c >> 8) & 31, c & 31
        last = (lane & segment) | (limit & ~segment)
        if mode == "idx":
            source = (lane & segment) | (offset & ~segment)
        else:
            source = {"up": lane - offset, "down": lane + offset, "bfly": lane ^ offset}[mode]
        inside = source >= last if mode == "up" else source <= last
        origin = threads - lane + np.where(inside, source, lane)
        absent = ~_members(frame, threads).reshape(-1)[origin]
        if absent.any():
            raise UninitialisedRead("reads a lane that takes no part", threads[absent])
        target(s, _spread(frame, threads, value(s)).reshape(-1)[origin])
        flag(s, inside)

    return step


def build_vote(instruction: Instruction, frame: Frame) -> Step:
    only(instruction, "sync", "all", "any", "uni", "ballot")
    mode, type_ = instruction.modifiers[1], instruction.type
    target = frame.target(instruction.operands[0], type_)
    value = frame.source(instruction.operands[1], "pred")

    def step(s: Any) -> None:
        threads = frame.lanes(s)
        votes = np.broadcast_to(value(s), threads.shape)
        yes, no = _spread(frame, threads, votes), _spread(frame, threads, ~votes)
        results: dict[str, Any] = {
            "all": ~no.any(axis=1),
            "any": yes.any(axis=1),
            "uni": ~(yes.any(axis=1) & no.any(axis=1)),
            "ballot": bits(yes),
        }
        target(s, results[mode][threads // LANES])

    return step


def bits(lanes: Array) -> Array:
    """u32[n_warps] of bool[n_warps, 32], lane 0 in the lowest bit."""
    return np.packbits(lanes, axis=1, bitorder="little").view(np.uint32)[:, 0]


def build_activemask(instruction: Instruction, frame: Frame) -> Step:
    target = frame.target(instruction.operands[0], "b32")

    def step(s: Any) -> None:
        threads = frame.lanes(s)
        target(s, bits(_members(frame, threads))[threads // LANES])

    return step


def build_match(instruction: Instruction, frame: Frame) -> Step:
    only(instruction, "sync", "all", "any")
    mode, type_ = instruction.modifiers[0], instruction.type
    result, flag = _split_pair(instruction.operands[0])
    target, all_equal = frame.target(result, "b32"), frame.target(flag, "pred")
    value = frame.source(instruction.operands[1], type_)

    def step(s: Any) -> None:
        threads = frame.lanes(s)
        values = _spread(frame, threads, np.broadcast_to(value(s), threads.shape))
        members = _members(frame, threads)
        warp, lane = threads // LANES, threads % LANES
        equal = (values[warp] == values[warp, lane][:, None]) & members[warp]
        whole = (equal == members[warp]).all(axis=1)
        masks = bits(equal)
        target(s, masks if mode == "any" else np.where(whole, masks, np.uint32(0)))
        all_equal(s, whole)

    return step


def build_redux(instruction: Instruction, frame: Frame) -> Step:
    operation, type_ = instruction.modifiers[1], instruction.type
    functions: dict[str, np.ufunc] = {
        "add": np.add, "min": np.minimum, "max": np.maximum,
        "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    }  # fmt: skip
    if operation not in functions:
        raise PtxError(f".{operation} is not supported on redux")
    function = functions[operation]
    target, value = (frame.target(instruction.operands[0], type_),
                     frame.source(instruction.operands[1], type_))  # fmt: skip

    def step(s: Any) -> None:
        threads = frame.lanes(s)
        values = _spread(frame, threads, np.broadcast_to(value(s), threads.shape))
        members = _members(frame, threads)
        totals = np.zeros(len(values), values.dtype)
        for warp in np.unique(threads // LANES):
            totals[warp] = function.reduce(values[warp][members[warp]], dtype=values.dtype)
        target(s, totals[threads // LANES])

    return step


def _fragments(reads: list[Any], s: Any, n_warps: int) -> Array:
    """u32[n_warps, 32, n_registers] of a matrix operand's registers."""
    columns = [np.broadcast_to(read(s), n_warps * LANES) for read in reads]
    return np.ascontiguousarray(np.stack(columns, axis=1)).reshape(n_warps, LANES, -1)


def _elements(words: Array, type_: str) -> Array:
    """The values in each register, [n_warps, 32, n_registers, values a register]."""
    if type_ == "tf32":
        values = (words & TF32_BITS).view(np.float32)
    elif type_ == "bf16":
        halves = words.view(np.uint16).astype(np.uint32) << np.uint32(16)
        values = halves.view(np.float32)
    else:
        values = words.view({"s8": np.int8, "u8": np.uint8, "f16": np.float16}[type_])
    return values.reshape(*words.shape, -1)


def matrix_a(values: Array) -> Array:
    """The 16 x k matrix of each warp from the values of its lanes' registers.

    Register r of lane 4 g + t holds row g + 8 (r mod 2), columns from t n + 4 n (r div 2) for the n
    values of a register.
    """
    n_warps, _, n_registers, n = values.shape
    matrix = np.zeros((n_warps, 16, 2 * n_registers * n), values.dtype)
    g, t = np.divmod(np.arange(LANES), 4)
    for r in range(n_registers):
        for i in range(n):
            matrix[:, g + 8 * (r % 2), t * n + i + 4 * n * (r // 2)] = values[:, :, r, i]
    return matrix


def matrix_b(values: Array) -> Array:
    """The k x 8 matrix: register r of lane 4 g + t holds column g, rows from t n + 4 n r."""
    n_warps, _, n_registers, n = values.shape
    matrix = np.zeros((n_warps, 4 * n_registers * n, 8), values.dtype)
    g, t = np.divmod(np.arange(LANES), 4)
    for r in range(n_registers):
        for i in range(n):
            matrix[:, t * n + i + 4 * n * r, g] = values[:, :, r, i]
    return matrix


_ROW = np.arange(LANES)[:, None] // 4 + np.array([0, 0, 8, 8])
_COLUMN = 2 * (np.arange(LANES)[:, None] % 4) + np.array([0, 1, 0, 1])
"""Where the 4 accumulators of each lane stand in the 16 x 8 result."""

MMA_TYPES = {"s8": "s32", "u8": "s32", "f16": "f32", "bf16": "f32", "tf32": "f32"}
MMA_BITS = {"s8": 8, "u8": 8, "f16": 16, "bf16": 16, "tf32": 32}
TF32_BITS = np.uint32(0xFFFFE000)
"""What a tensor core reads of a tf32 value."""


def build_mma(instruction: Instruction, frame: Frame) -> Step:
    """Integer products wrap at 32 bits; float ones are summed in f64 and rounded once, which is
    not what tensor cores do in the last places."""
    match instruction.modifiers:
        case ["sync", "aligned", shape, "row", "col", d_type, a_type, b_type, c_type]:
            pass
        case _:
            raise PtxError(f"{instruction.opcode} is not supported")
    k = int(shape.removeprefix("m16n8k")) if shape.startswith("m16n8k") else 0
    n_b = k * MMA_BITS.get(a_type, 0) // 128
    known = n_b in (1, 2) and MMA_TYPES.get(a_type) == d_type == c_type
    if not known or MMA_TYPES.get(b_type) != d_type or MMA_BITS[a_type] != MMA_BITS[b_type]:
        raise PtxError(f"{instruction.opcode} is not supported")
    d, a, b, c = instruction.operands
    targets, reads_c = frame.targets(d, d_type), frame.sources(c, c_type)
    reads_a, reads_b = frame.sources(a, "b32"), frame.sources(b, "b32")
    if [len(targets), len(reads_a), len(reads_b), len(reads_c)] != [4, 2 * n_b, n_b, 4]:
        raise PtxError("the operands have the wrong number of registers")
    wide = np.int64 if d_type == "s32" else np.float64

    def step(s: Any) -> None:
        n_warps = len(frame.lanes(s)) // LANES
        x = matrix_a(_elements(_fragments(reads_a, s, n_warps), a_type)).astype(wide)
        y = matrix_b(_elements(_fragments(reads_b, s, n_warps), b_type)).astype(wide)
        addends = _fragments(reads_c, s, n_warps).astype(wide)
        total = np.matmul(x, y)[:, _ROW, _COLUMN] + addends
        values = total.astype(DTYPES[d_type]).reshape(-1, 4)
        for i, target in enumerate(targets):
            target(s, values[:, i])

    return step


def build_ldmatrix(instruction: Instruction, frame: Frame) -> Step:
    """Lane 8 m + r gives the address of row r of matrix m; a row is 8 values of 16 bits."""
    only(instruction, "sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared")
    n_matrices = next(int(m[1:]) for m in instruction.modifiers if m in ("x1", "x2", "x4"))
    transposed = "trans" in instruction.modifiers
    targets = frame.targets(instruction.operands[0], "b32")
    addresses = frame.addresses_of(instruction.operands[1])
    if len(targets) != n_matrices:
        raise PtxError(f"loads {n_matrices} matrices into {len(targets)} registers")

    def step(s: Any) -> None:
        threads = frame.lanes(s)
        for m, target in enumerate(targets):
            givers = threads % LANES // 8 == m
            rows = frame.shared.load(threads[givers], addresses(s)[givers], np.uint32, 4)
            matrix = np.ascontiguousarray(rows).view(np.uint16).reshape(-1, 8, 8)
            if transposed:
                matrix = matrix.transpose(0, 2, 1)
            pairs = np.ascontiguousarray(matrix).view(np.uint32)
            target(s, pairs.reshape(-1))

    return step


BUILDERS: dict[str, Builder] = {
    "shfl": build_shfl, "vote": build_vote, "match": build_match, "redux": build_redux,
    "activemask": build_activemask, "mma": build_mma, "ldmatrix": build_ldmatrix,
}  # fmt: skip
