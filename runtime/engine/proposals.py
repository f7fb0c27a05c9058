"""Proposals: settings for a GPU to choose from, best first; what the caller set is the same in all.

Keys and values take memory that could hold experts, so an automatic context is long only where it
is cheap. Where not even the usual one fits, shorter prompt chunks and contexts come before the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ops.gpu.kv_layout import PAGE_TOKENS
from runtime.config import AUTO_CONTEXT, ContextShape, EngineConfig, context_shape
from runtime.notices import Notices

if TYPE_CHECKING:
    from runtime.engine.gpu.settings import GPUSettings

CPU_BATCH, GPU_BATCH = 512, 2048
"""Tokens of a prompt chunk where none are asked for: a GPU reads every weight once a chunk, and all
experts that it does not hold cross the link once a chunk."""

SMALL_GPU_BATCHES = (512, 128)
LONG_CONTEXTS = (32768, 16384)
LONG_SHARE = 0.05
"""Of the GPUs' memory: what keys and values of a long automatic context may take."""
SHORT_CONTEXTS = (4096, 2048)


@dataclass(frozen=True)
class Proposal:
    """shape: of the context that the settings make."""

    shape: ContextShape
    settings: GPUSettings


def gpu_proposals(
    config: EngineConfig, n_ctx_train: int, notices: Notices | None = None
) -> list[Proposal]:
    """Settings of a GPU executor for a model that was trained on n_ctx_train tokens."""
    batches = [config.n_batch or GPU_BATCH]
    batches += [] if config.n_batch else SMALL_GPU_BATCHES
    choices: list[tuple[int, int, float | None]] = []
    if config.n_ctx:
        choices += [(AUTO_CONTEXT, n_batch, None) for n_batch in batches]
    else:
        long = [n for n in LONG_CONTEXTS if n < n_ctx_train or n == LONG_CONTEXTS[0]]
        choices += [(n, batches[0], LONG_SHARE) for n in long if n_ctx_train > AUTO_CONTEXT]
        choices += [(AUTO_CONTEXT, n_batch, None) for n_batch in batches]
        shorter = [n for n in SHORT_CONTEXTS if n < n_ctx_train]
        choices += [(n, n_batch, None) for n in shorter for n_batch in batches[-2:]]
    return [_proposal(config, n_ctx_train, *choice, notices or Notices()) for choice in choices]


def _proposal(
    config: EngineConfig,
    n_ctx_train: int,
    auto_context: int,
    n_batch: int,
    kv_share: float | None,
    notices: Notices,
) -> Proposal:
    from runtime.engine.gpu.settings import MARGIN_BYTES, GPUSettings

    shape = context_shape(config, n_ctx_train, auto_context)
    snapshots = config.n_snapshots
    settings = GPUSettings(
        n_ctx=shape.n_pages(PAGE_TOKENS) * PAGE_TOKENS,
        max_sequences=shape.n_parallel,
        max_step_tokens=max(n_batch, shape.n_parallel),
        cache_type_k=config.cache_type_k,
        cache_type_v=config.cache_type_v,
        vram_limit=None if config.vram_limit is None else int(config.vram_limit * 2**30),
        moe_expert_cache=config.moe_expert_cache,
        load_mode=config.load_mode,
        n_threads=config.n_threads,
        n_snapshots=None if snapshots is None else snapshots * shape.n_parallel,
        split={"auto": None, "layer": True, "none": False}[config.split_mode],
        main_gpu=config.main_gpu,
        tensor_split=config.tensor_split,
        moe_cache=config.moe_cache,
        reserve_bytes=MARGIN_BYTES if config.vram_reserve is None else config.vram_reserve << 20,
        kv_share=kv_share,
        notices=notices,
    )
    return Proposal(shape, settings)
