"""GPUSettings: what a GPU executor is opened with."""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.notices import Notices

MARGIN_BYTES = 256 << 20
"""VRAM left for graphs, modules and the driver's own needs, where nothing else is asked for."""


@dataclass(frozen=True)
class GPUSettings:
    """See `EngineConfig`.

    n_ctx       KV cells, rounded up to whole pages
    vram_limit  bytes to use at most of each GPU; None: all that is free
    moe_cache   how experts follow use; see `EngineConfig`
    n_threads   CPU workers that compute experts the GPUs do not hold
    n_snapshots states kept beside those of running sequences, where the model has states; None:
                what the memory suggests
    split       True: layers are split over all GPUs; False: main_gpu has all of them; None: over
                all, unless one holds the whole model
    tensor_split  the GPUs' shares, in their order, 0 for those that are not to be used; None: by
                their free memory
    load_mode   pin: experts that the GPUs do not hold are pinned where they lie; mmap: they are not
    exchange_rounds  answers in the start-up test of handing experts over to them; 0: no test
    reserve_bytes  of each GPU's memory that are left for graphs, kernels and the driver's needs
    kv_share    of the GPUs' memory that keys and values may take; None: any
    notices     where whatever falls back, shrinks or stays off is told
    """

    n_ctx: int
    max_sequences: int
    max_step_tokens: int
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    vram_limit: int | None = None
    moe_expert_cache: int = -1
    moe_cache: tuple[tuple[str, str], ...] = ()
    n_threads: int | None = None
    n_snapshots: int | None = None
    split: bool | None = None
    main_gpu: int = 0
    tensor_split: tuple[float, ...] | None = None
    load_mode: str = "pin"
    exchange_rounds: int = 10_000
    reserve_bytes: int = MARGIN_BYTES
    kv_share: float | None = None
    notices: Notices = field(default_factory=Notices, compare=False, repr=False)
