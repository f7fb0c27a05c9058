"""Expert and dense feed-forward jobs against the arithmetic contract, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import njit
from numpy.typing import NDArray

from ops.arithmetic import activation_layout, dot_rows, quantize_rows, silu_mul
from ops.cpu.experts import (
    BATCH_TOKENS,
    FEED_FORWARD,
    FEED_FORWARD_SCRATCH_BYTES,
    FEED_FORWARDS,
    SWIGLU_CLAMPED,
    SWIGLU_OAI,
    activate,
    down,
    gate_up,
)
from ops.cpu.linear import MATRIX
from ops.cpu.matmul import SCRATCH_BYTES, matmul_address
from ops.cpu.memory import array
from ops.cpu.program import aligned
from ops.gpu.activate import activated
from ops.quants import FORMATS
from ops.quants.block import ACTIVATION_GROUP
from tests.support.blocks import random_blocks
from tests.support.jobs import job_args, run_job

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]


class Experts:
    """Random experts of one format; `n_experts` 0: one dense block."""

    def __init__(self, name: str, n_in: int, n_ff: int, n_out: int, n_experts: int) -> None:
        self.format, self.sizes, self.n_experts = FORMATS[name], (n_in, n_ff, n_out), n_experts
        count = max(n_experts, 1)
        self.gate, self.up = (self._stack(count, n_ff, n_in, seed) for seed in (1, 2))
        self.down = self._stack(count, n_out, n_ff, 3)

    def _stack(self, count: int, n_rows: int, n_elems: int, seed: int) -> U8:
        blocks = random_blocks(
            self.format, count * n_rows * n_elems // self.format.block_elems, seed
        )
        stack = aligned((count, n_rows, self.format.row_bytes(n_elems)), np.uint8)
        stack[:] = blocks.reshape(stack.shape)
        return stack

    def matrix(self, stack: U8, n_elems: int, **fields: Any) -> NDArray[Any]:
        return job_args(
            MATRIX, matmul=matmul_address(self.format.name), weights=stack, n_elems=n_elems,
            row_bytes=stack.shape[-1], slab_bytes=stack[0].nbytes, **fields,
        )  # fmt: skip

    def expected(self, x: F32, expert: int) -> F32:
        kind = self.format.activation
        records = quantize_rows(kind, x)
        hidden = silu_mul(
            *(dot_rows(self.format, w[expert], records) for w in (self.gate, self.up))
        )
        return dot_rows(self.format, self.down[expert], quantize_rows(kind, hidden))

    def run(self, x: F32, lists: list[list[int]], gate_up_rows: int, down_rows: int) -> F32:
        """Output rows of every slot; `lists`: the tokens of each expert."""
        n_in, n_ff, n_out = self.sizes
        kind = self.format.activation
        records = aligned((len(x), activation_layout(kind, n_in)[2]), np.uint8)
        records[:] = quantize_rows(kind, x)[:, : records.shape[1]]
        active = np.array([e for e, tokens in enumerate(lists) if tokens], np.int32)
        tokens = np.array([t for each in lists for t in each], np.int32)
        offsets = np.cumsum([0] + [len(lists[e]) for e in active]).astype(np.int32)
        n_slots = len(tokens) if self.n_experts else len(x)
        hidden = aligned((n_slots, activation_layout(kind, n_ff)[2]), np.uint8)
        hidden[:] = 0xEE if kind == "f32" else 0
        out = np.full((n_slots, n_out), np.nan, np.float32)
        matrices = [self.matrix(self.gate, n_in), self.matrix(self.up, n_in)]
        matrices.append(self.matrix(self.down, n_ff))
        lists_fields = (
            {"active": active, "offsets": offsets, "slot_tokens": tokens} if self.n_experts else {}
        )
        block = job_args(
            FEED_FORWARD, gate=matrices[0], up=matrices[1], down=matrices[2], n_ff=n_ff,
            n_out=n_out, gate_up_rows=gate_up_rows, down_rows=down_rows, x_gate=records,
            x_up=records, x_gate_stride=records.strides[0], x_up_stride=records.strides[0],
            hidden=hidden,
            hidden_stride=hidden.strides[0], hidden_group=ACTIVATION_GROUP[kind], out=out,
            out_stride=out.strides[0], **lists_fields,
        )  # fmt: skip
        chunks = [-(-n_ff // gate_up_rows), -(-n_out // down_rows)]
        count = np.array([len(x)], np.int64)
        scratch = aligned(FEED_FORWARD_SCRATCH_BYTES + SCRATCH_BYTES, np.uint8)
        role = "experts" if self.n_experts else "dense"
        fields = {role: block}
        if not self.n_experts:
            fields |= {"dense_gate_up_chunks": chunks[0], "dense_down_chunks": chunks[1]}
        args = job_args(FEED_FORWARDS, n_tokens=count, scratch=scratch, **fields)
        n_active = len(active) if self.n_experts else 1
        run_job(gate_up, args, chunks[0] * n_active)
        run_job(down, args, chunks[1] * n_active)
        return out


@pytest.mark.parametrize(
    ("name", "n_ff", "gate_up_rows"),
    [
        ("Q4_K", 512, 256),
        ("Q6_K", 256, 256),
        ("Q8_0", 96, 64),
        ("Q8_0", 96, 32),
        ("F32", 40, 16),
        ("MXFP4", 2880, 256),
    ],
)
def test_experts_have_the_bits_of_the_contract(name: str, n_ff: int, gate_up_rows: int) -> None:
    rng = np.random.default_rng(n_ff)
    n_in = 256 if FORMATS[name].activation == "q8_256" else 64
    experts = Experts(name, n_in, n_ff, 48, 3)
    x = rng.normal(size=(9, n_in)).astype(np.float32)
    lists = [[0, 3, 4, 8], [], [1, 3, 5]]
    out = experts.run(x, lists, gate_up_rows, 32)
    expected = np.concatenate([experts.expected(x[t], e) for e, t in enumerate(lists) if t])
    assert np.array_equal(out, expected)


def test_a_dense_block_of_more_tokens_than_a_batch() -> None:
    rng = np.random.default_rng(0)
    dense = Experts("Q8_0", 64, 96, 32, 0)
    x = rng.normal(size=(BATCH_TOKENS + 5, 64)).astype(np.float32)
    out = dense.run(x, [], 96, 32)
    assert np.array_equal(out, dense.expected(x, 0))


@njit
def run_activate(block, gate, up, n):
    activate(array(block, 1, FEED_FORWARD)[0], gate, up, n)


@pytest.mark.parametrize(
    ("activation", "name"), [(SWIGLU_CLAMPED, "swiglu_clamped"), (SWIGLU_OAI, "swiglu_oai")]
)
def test_other_activations(activation: int, name: str) -> None:
    """The bits of the definition, and what the formula says."""
    rng = np.random.default_rng(activation)
    gate, up = (rng.normal(size=(2, 43)) * 6).astype(np.float32)
    gate[3], up[5], gate[40] = np.nan, np.nan, -np.inf
    out, other = gate.copy(), up.copy()
    block = job_args(FEED_FORWARD, activation=activation, limit=7.0)
    run_activate(block.ctypes.data, out.ctypes.data, other.ctypes.data, 43)
    assert np.array_equal(out, activated(name, gate, up, 7.0), equal_nan=True)
    assert np.isnan(out[[3, 5]]).all()
    g, u = np.minimum(gate[6:40].astype(np.float64), 7), np.clip(up[6:40].astype(np.float64), -7, 7)
    expected = g / (1 + np.exp(-g)) * u
    if activation == SWIGLU_OAI:
        expected = g / (1 + np.exp(-1.702 * g)) * (u + 1)
    assert np.allclose(out[6:40], expected, rtol=1e-5, atol=1e-6)
