"""Attention by lists of keys beside attention that reads all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ops.gpu.attention import attention, attention_grid, attention_shared_bytes
from ops.gpu.attention_copies import LIST_KEYS
from ops.gpu.attention_shape import AttentionShape
from ops.gpu.kernel import Kernel
from ops.gpu.kv_layout import PAGE_TOKENS
from ops.gpu.latent_attention import (
    DIM_V,
    LatentDecodeShape,
    LatentPromptShape,
    latent_decode,
    latent_decode_grid,
    latent_prompt,
    latent_prompt_grid,
)
from tests.support.cases.attention import Placed, Setting
from tests.support.machines import InterpretedMachine

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

STEP = Setting(6, 1, ((0, 70), (1, 139)), most=2)
WIDE_STEP = Setting(64, 1, STEP.tokens)
N_TOKENS = len(STEP.tokens) + 1


@dataclass(frozen=True)
class Decoding:
    """A kernel without lists and with them, what it computes, the cache it reads."""

    step: Setting
    shape: AttentionShape
    kernel: Callable[[bool], Kernel]
    grid: tuple[int, ...]
    shared_bytes: int


def paged(shape: AttentionShape) -> Decoding:
    return Decoding(
        STEP,
        shape,
        lambda chooses: attention(replace(shape, chooses=chooses)),
        attention_grid(STEP.n_splits, STEP.n_head, 1, N_TOKENS),
        attention_shared_bytes(shape),
    )


def latent(dim_k: int) -> Decoding:
    shape = LatentDecodeShape(dim_k, 1)
    return Decoding(
        STEP,
        AttentionShape(dim_k, DIM_V, row_buffers=1),
        lambda chooses: latent_decode(LatentDecodeShape(dim_k, 1, chooses=chooses)),
        latent_decode_grid(STEP.n_splits, STEP.n_head, N_TOKENS),
        shape.shared_bytes,
    )


def latent_chunk() -> Decoding:
    shape = LatentPromptShape(576)
    return Decoding(
        WIDE_STEP,
        AttentionShape(576, DIM_V, row_buffers=1),
        lambda chooses: latent_prompt(LatentPromptShape(576, listed=chooses)),
        latent_prompt_grid(shape.rows, WIDE_STEP.n_head, N_TOKENS),
        shape.shared_bytes,
    )


@pytest.mark.parametrize(
    "decoding",
    [paged(AttentionShape(64, 64, "q8_0", "q8_0")), latent(576), latent(512), latent_chunk()],
)
def test_a_list_of_all_keys_has_the_bits_of_no_list(decoding: Decoding) -> None:
    expected = _partials(decoding, all_listed=False)
    assert np.array_equal(_partials(decoding, all_listed=True), expected)


def _partials(decoding: Decoding, *, all_listed: bool) -> NDArray[Any]:
    """Bits of the results."""
    m, kernel, step = InterpretedMachine(), decoding.kernel(all_listed), decoding.step
    placed = Placed(step, decoding.shape, m)
    arguments = placed.arguments | {"max_splits": step.max_splits}
    if all_listed:
        tables = placed.sequences.tables
        lists = np.zeros((N_TOKENS, PAGE_TOKENS // LIST_KEYS * tables.shape[1]), np.uint32)
        for i, (sequence, position) in enumerate(step.tokens):
            firsts = np.arange(0, position + 1, LIST_KEYS)
            cells = PAGE_TOKENS * tables[sequence, firsts // PAGE_TOKENS] + firsts % PAGE_TOKENS
            lists[i, : len(firsts)] = cells
        arguments["lists"] = m.place(lists, writable=False)
        arguments["list_stride"] = lists.shape[1]
    head = (N_TOKENS, step.n_splits, step.n_head)
    dim_v = decoding.shape.dim_v
    sizes = {"partials": (*head, dim_v), "states": (*head, 2), "out": (N_TOKENS, head[2], dim_v)}
    arguments |= {name: m.place(np.zeros(size, np.float32)) for name, size in sizes.items()}
    taken = {name: arguments[name] for name, _ in kernel.params}
    m.launch(kernel, decoding.grid, taken, shared_bytes=decoding.shared_bytes)
    written = [name for name in sizes if name in taken]
    read = [m.read(int(arguments[name]), np.uint32, sizes[name]) for name in written]
    assert all(part[:-1].any() for part in read)
    return np.concatenate([part[:-1].reshape(-1) for part in read])
