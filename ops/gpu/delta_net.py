"""The GPU kernels of delta nets: what the recurrence takes, the recurrence, the gated output norm.

Three launches a layer between its products: `delta_inputs` (convolution, unit length of queries and
keys, decays, betas), the recurrence, `gated_norm`.  Of the recurrence there are two: `delta_net`,
token by token in one block for 32 columns of a head; for prompts `delta_chunk`, on tensor cores,
`CHUNK` tokens at a time, whose bits do not depend on where a prompt is cut as long as that is at
positions that are multiples of it.  `runtime.models.delta_net` has the formulas, the headers of the
texts the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ops.gpu.kernel import WARP, Kernel, launch_defines
from ops.quants.block import F32

N_TAPS = 4
"""Of the convolution: the kernel's text has a register for each."""

DIMS = (16, 32, 64, 128)
"""Values of a head that the recurrence and the norm take."""

INPUTS_BLOCK = 128
INPUTS_RUN = 8
"""Tokens that a warp of `delta_inputs` takes where a step has many: their inputs are read once."""
COLUMNS = 32
"""Value channels of a head that a block of the recurrence has."""

NET_BLOCK = 64
CHUNK = 16
"""Tokens that `delta_chunk` takes at a time, from positions that are multiples of it."""
CHUNK_BLOCK = 384
"""Two warps for 16 columns, one for each 64 keys; four more for pairs of tokens."""
CHUNK_COLUMNS = 64
CHUNK_SHARED_BYTES = 113792
NORM_BLOCK = 128
NORM_VALUES = 8
"""Values of a row that a thread of `gated_norm` takes."""

INPUTS_PARAMS = (
    *((name, "u64") for name in ("counts", "rows", "spans", "states", "x")),
    *((name, "u64") for name in ("taps_q", "taps_k", "taps_v", "qkv")),
    *((name, "u64") for name in ("decays", "decay_bias", "decay_rate", "decay")),
    *((name, "u64") for name in ("betas", "beta")),
    *((name, "u32") for name in ("slot_bytes", "x_stride", "n_key_head", "n_value_head", "dim")),
    *((name, "u32") for name in ("decays_stride", "decay_width", "has_floor", "betas_stride")),
    ("run", "u32"),
    ("late", "u32"),
    *((name, "f32") for name in ("decay_floor", "q_scale", "l2_eps")),
)
NET_PARAMS = (
    *((name, "u64") for name in ("counts", "spans", "states", "qkv", "decay", "beta", "out")),
    *((name, "u32") for name in ("slot_bytes", "n_key_head", "n_value_head", "dim")),
    ("decay_width", "u32"),
)
NORM_PARAMS = (
    *((name, "u64") for name in ("counts", "x", "gates", "weight", "out_f32", "q8_256", "q8_32")),
    *((name, "u32") for name in ("gates_stride", "n", "dim", "is_sigmoid")),
    ("eps", "f32"),
)


def delta_inputs(*, overlapped: bool = False) -> Kernel:
    """Products of a layer -> queries, keys, values, decays and betas; grid `delta_inputs_grid`."""
    return Kernel(
        entry="delta_inputs",
        source="delta_inputs.ptx",
        defines=launch_defines(INPUTS_BLOCK, 4, overlapped),
        params=INPUTS_PARAMS,
        block=INPUTS_BLOCK,
        reference=delta_inputs_reference,
    )


def delta_inputs_grid(
    n_key_head: int, n_value_head: int, decay_width: int, n_tokens: int, run: int = 1
) -> tuple[int, int]:
    """A warp a head, and one for 32 decays or betas, of `run` tokens."""
    n_warps = 2 * n_key_head + n_value_head
    n_warps += -(-n_value_head * decay_width // WARP) + -(-n_value_head // WARP)
    return -(-n_warps // (INPUTS_BLOCK // WARP)), -(-n_tokens // run)


def delta_net(*, overlapped: bool = False) -> Kernel:
    """The recurrence, one token or many of each sequence; grid `delta_net_grid`."""
    return Kernel(
        entry="delta_net",
        source="delta_net.ptx",
        defines=launch_defines(NET_BLOCK, 4, overlapped),
        params=NET_PARAMS,
        block=NET_BLOCK,
        reference=delta_net_reference,
    )


def delta_net_grid(n_value_head: int, dim: int, n_sequences: int) -> tuple[int, int]:
    """A block for `COLUMNS` columns of a head."""
    return n_value_head * -(-dim // COLUMNS), n_sequences


def delta_chunk(*, overlapped: bool = False) -> Kernel:
    """The recurrence of many tokens of each sequence; grid `delta_chunk_grid`.

    Dynamic shared memory: `CHUNK_SHARED_BYTES`.
    """
    return Kernel(
        entry="delta_chunk",
        source="delta_chunk.ptx",
        defines=launch_defines(CHUNK_BLOCK, 1, overlapped),
        params=NET_PARAMS,
        block=CHUNK_BLOCK,
        reference=delta_net_reference,
    )


def delta_chunk_grid(n_value_head: int, dim: int, n_sequences: int) -> tuple[int, int]:
    """A block for `CHUNK_COLUMNS` columns of a head."""
    return n_value_head * -(-dim // CHUNK_COLUMNS), n_sequences


def gated_norm(*, overlapped: bool = False) -> Kernel:
    """Norm of each head times its gate, as f32 and as records; grid `gated_norm_grid`."""
    return Kernel(
        entry="gated_norm",
        source="gated_norm.ptx",
        defines=launch_defines(NORM_BLOCK, 4, overlapped),
        params=NORM_PARAMS,
        block=NORM_BLOCK,
        reference=gated_norm_reference,
    )


def gated_norm_grid(n: int, n_tokens: int) -> tuple[int, int]:
    return -(-n // (NORM_VALUES * NORM_BLOCK)), n_tokens


def delta_inputs_reference(
    x: F32, history: F32, taps: F32, n_key_head: int, dim: int, l2_eps: float
) -> tuple[F32, F32]:
    """(queries, keys and values f32[n_tokens, n_channels]; history after them) of one sequence.

    x f32[n_tokens, n_channels]; history f32[3, n_channels]: the inputs before x, the oldest first;
    taps f32[n_channels, 4].  Queries are not scaled.
    """
    window = np.concatenate([history, x]).astype(np.float64)
    n = len(x)
    mixed = sum(window[i : i + n] * taps[:, i] for i in range(N_TAPS))
    mixed = mixed / (1 + np.exp(-mixed))
    heads = mixed.reshape(n, -1, dim)
    keys = heads[:, : 2 * n_key_head]
    keys /= np.sqrt((keys * keys).sum(axis=-1, keepdims=True) + l2_eps)
    return mixed.astype(np.float32), window[n:].astype(np.float32)


def decay_reference(x: F32, rate: F32, floor: float | None) -> F32:
    """Decays of x f32[n_tokens, n_value_head, width], bias included."""
    wide, rates = x.astype(np.float64), rate.astype(np.float64)[:, None]
    log = np.logaddexp(0, wide) * rates if floor is None else floor / (1 + np.exp(wide * rates))
    result: F32 = np.exp(log).astype(np.float32)
    return result


def delta_net_reference(
    qkv: F32, decay: F32, beta: F32, state: F32, n_key_head: int
) -> tuple[F32, F32]:
    """(out f32[n_tokens, n_value_head, dim], state after them) of one sequence, in f64.

    qkv f32[n_tokens, heads, dim], decay f32[n_tokens, n_value_head, 1 or dim], beta
    f32[n_tokens, n_value_head], state f32[n_value_head, dim, dim] ([key][value]).
    """
    m = state.astype(np.float64)
    n_value_head = len(state)
    out = np.zeros((len(qkv), n_value_head, state.shape[-1]))
    key_heads = np.arange(n_value_head) % n_key_head
    for t, heads in enumerate(qkv.astype(np.float64)):
        q, k, v = heads[key_heads], heads[n_key_head + key_heads], heads[2 * n_key_head :]
        m *= decay[t][..., None]
        delta = beta[t][:, None] * (v - np.einsum("hkv,hk->hv", m, k))
        m += k[..., None] * delta[:, None]
        out[t] = np.einsum("hkv,hk->hv", m, q)
    return out.astype(np.float32), m.astype(np.float32)


def gated_norm_reference(x: F32, weight: F32, gates: F32, is_sigmoid: bool, eps: float) -> F32:
    """Rows f32[n_tokens, heads, dim] normalised a head, times the function of their gates."""
    wide, wide_gates = x.astype(np.float64), gates.astype(np.float64)
    y = wide / np.sqrt((wide * wide).mean(axis=-1, keepdims=True) + eps) * weight
    y = y / (1 + np.exp(-wide_gates))
    result: F32 = (y if is_sigmoid else y * wide_gates).astype(np.float32)
    return result


def variants() -> Iterator[tuple[str, Kernel]]:
    """All four, alone and overlapped."""
    for make in (delta_inputs, delta_net, delta_chunk, gated_norm):
        for overlapped in (False, True):
            kernel = make(overlapped=overlapped)
            yield f"{kernel.entry}{' (overlapped)' if overlapped else ''}", kernel
