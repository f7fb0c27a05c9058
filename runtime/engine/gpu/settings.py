"""GPUSettings: what a GPU executor is opened with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GPUSettings:
    """See `EngineConfig`.

    n_ctx       KV cells, rounded up to whole pages
    vram_limit  bytes to use at most of each GPU; None: all that is free
    n_threads   CPU workers that compute experts the GPUs do not hold
    n_snapshots states kept beside those of running sequences, where the model has states; None:
                what the memory suggests
    split       layers are split over all GPUs; else main_gpu has all of them
    tensor_split  the GPUs' shares, in their order, 0 for those that are not to be used; None: by
                their free memory
    exchange_rounds  answers in the start-up test of handing experts over to them; 0: no test
    """

    n_ctx: int
    max_sequences: int
    max_step_tokens: int
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    vram_limit: int | None = None
    moe_expert_cache: int = -1
    n_threads: int | None = None
    n_snapshots: int | None = None
    split: bool = True
    main_gpu: int = 0
    tensor_split: tuple[float, ...] | None = None
    exchange_rounds: int = 10_000
