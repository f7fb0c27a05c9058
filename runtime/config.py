"""Settings of an engine: what the caller may choose, and nothing that depends on the model."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ops.user_cache import user_cache as user_cache  # the server's, too
from runtime.checks import is_number, shown
from runtime.errors import ConfigError

CACHE_TYPES = ("f16", "f32", "q8_0")
DEVICES = ("auto", "cpu", "cuda", "fake")
SPLIT_MODES = ("auto", "layer", "none")
LOAD_MODES = ("pin", "mmap")
CHOICES = {
    "cache_type_k": CACHE_TYPES,
    "cache_type_v": CACHE_TYPES,
    "device": DEVICES,
    "split_mode": SPLIT_MODES,
    "load_mode": LOAD_MODES,
}
GPU_SETTINGS = (
    *("vram_limit", "vram_reserve", "split_mode", "main_gpu", "tensor_split"),
    *("moe_expert_cache", "moe_cache"),
)
"""That change nothing on the CPU."""
AUTO_PARALLEL = 4
AUTO_CONTEXT = 8192  # tokens: room for a conversation; trained contexts can be a hundred times that
MIN_CONTEXT = 2  # one prompt token and one generated one
BUNDLED_MODEL = Path(__file__).with_name("data") / "tiny-olmoe-Q4_K_M.gguf"


# What a setting may be at all; what fits the memory depends on the model and is checked with it.
RANGES = {
    "n_ctx": (MIN_CONTEXT, 1 << 30),
    "n_parallel": (1, 1024),
    "n_threads": (1, 1024),
    "n_batch": (1, 1 << 14),
    "moe_expert_cache": (-1, 1 << 16),
    "n_snapshots": (0, 1024),
    "main_gpu": (0, 1024),
    "vram_reserve": (0, 1 << 20),
}
MOST_GIB = 1 << 20


MOE_SETTINGS = {
    "mode": "mode",
    "misses": "misses",
    "policy": "policy",
    "window": "window",
    "recent": "window",
    "admit": "admit",
    "margin": "margin",
    "swap_lead": "margin",
    "sticky": "sticky",
    "stay_bonus": "sticky",
    "global_weight": "global_weight",
    "halve_every": "halve_every",
}
"""Names of a setting of the expert cache, and which of LLAMA_MOE_CACHE_... it is; `mode` is
LLAMA_MOE_AUTO_MODE: cache, or layers (the seed's stock) for whole layers; `misses` who serves them:
auto, cpu, or N for each N'th over the link."""

MOE_VARIABLES = frozenset(
    f"LLAMA_MOE_CACHE_{name.upper()}" for name in (*MOE_SETTINGS.values(), "profile", "margin_mb")
) - {"LLAMA_MOE_CACHE_MODE"}
"""Environment variables of the expert cache that are read."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How to open an engine; every `None` is chosen from the model and the machine.

    model           GGUF file (first shard of a split one); None: the bundled demonstration model
    n_ctx           KV cells shared by all sequences; None: the model's trained context, at most
                    8192 per sequence, or 32768 where a GPU holds that in a twentieth of its memory
    n_parallel      sequences decoded together; None: 4, sharing the whole context
    n_threads       CPU workers; None: those of the engine that runs already, else one per core
    n_batch         tokens of one prompt chunk; None: 2048 on a GPU, 512 on the CPU
    cache_type_k/v  storage of attention keys and values: f16, f32 or q8_0
    device          auto (cuda where a GPU can compute the model, else cpu), cpu, cuda, or fake
                    (pretends to compute: tests of everything around it)
    vram_limit      GiB of each GPU's memory to use at most, as if the card were smaller; None: all
    split_mode      layer: the layers are split over all visible GPUs; none: main_gpu has them all;
                    auto: none where one GPU holds the whole model, else layer
    tensor_split    the GPUs' shares of the model, in their order, 0: not used; None: by free memory
    moe_expert_cache  routed experts of a layer that the GPU holds; -1: as many as fit, 0: none
    moe_cache       how the GPUs' experts follow use: (name, value) by the names of `MOE_SETTINGS`
    vram_reserve    MiB of each GPU's memory to leave free beside all that is planned; None: 256
    n_snapshots     of a model with recurrent layers: states kept for each parallel sequence, for
                    prompts that start alike; None: what an eighth of the free memory holds, 2 to 32
                    in all
    load_mode       pin: experts that GPUs do not hold are pinned where the file is mapped, in the
                    background, as far as the machine's memory allows; mmap: they are not
    prefix_cache    keep the KV of finished sequences and reuse it for prompts that start alike
    name_bus_errors for main programs: end the process with one line that names the model file when
                    the file is truncated under its map (the SIGBUS handler is the process's)
    """

    model: str | Path | None = None
    n_ctx: int | None = None
    n_parallel: int | None = None
    n_threads: int | None = None
    n_batch: int | None = None
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    device: str = "auto"
    vram_limit: float | None = None
    split_mode: str = "auto"
    main_gpu: int = 0
    tensor_split: tuple[float, ...] | None = None
    moe_expert_cache: int = -1
    moe_cache: tuple[tuple[str, str], ...] = ()
    vram_reserve: int | None = None
    n_snapshots: int | None = None
    load_mode: str = "pin"
    prefix_cache: bool = True
    name_bus_errors: bool = False

    def __post_init__(self) -> None:
        """Raises: ConfigError."""
        for name, (lowest, highest) in RANGES.items():
            value = getattr(self, name)
            fits = type(value) is int and lowest <= value <= highest
            optional = getattr(EngineConfig, name) is None
            self._check(
                name,
                fits or (optional and value is None),
                f"a whole number of {lowest} to {highest}",
            )
        for name, known in CHOICES.items():
            value = getattr(self, name)
            is_known = isinstance(value, str) and value in known
            self._check(name, is_known, f"one of {', '.join(known)}")
        for name in ("prefix_cache", "name_bus_errors"):
            self._check(name, isinstance(getattr(self, name), bool), "True or False")
        self._check(
            "model",
            self.model is None or names_a_file(self.model),
            "the path of a GGUF file, or None",
        )
        limit = self.vram_limit
        self._check("vram_limit", limit is None or is_gib(limit), "GiB, a number above 0")
        wanted = "numbers from 0, not all of them 0"
        self._check("tensor_split", _are_shares(self.tensor_split), wanted)
        names = ", ".join(dict.fromkeys(MOE_SETTINGS.values()))
        fits = _are_moe_settings(self.moe_cache)
        self._check("moe_cache", fits, f"pairs of a name ({names}) and a text")
        if self.n_ctx and self.n_parallel and self.n_ctx // self.n_parallel < MIN_CONTEXT:
            raise ConfigError(
                f"n_ctx = {self.n_ctx} with n_parallel = {self.n_parallel} leaves "
                f"{self.n_ctx // self.n_parallel} tokens a sequence: "
                f"use n_ctx of at least {MIN_CONTEXT * self.n_parallel} or fewer sequences"
            )

    def _check(self, name: str, fits: bool, wanted: str) -> None:
        """Raises: ConfigError where the setting does not fit."""
        if not fits:
            raise ConfigError(f"{name} = {shown(getattr(self, name))}: use {wanted}")

    @property
    def given_for_gpus(self) -> list[str]:
        """The settings that only a GPU has a use for, where they are not the defaults."""
        return [name for name in GPU_SETTINGS if getattr(self, name) != getattr(EngineConfig, name)]

    @property
    def model_path(self) -> Path:
        """The file to open: the named model, else the bundled demonstration model."""
        return BUNDLED_MODEL if self.model is None else Path(self.model)


def is_gib(value: object) -> bool:
    """Whether it can be a size of memory."""
    return is_number(value) and 0 < value < MOST_GIB


def names_a_file(path: object) -> bool:
    """Whether a file can be called so."""
    name = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
    return isinstance(name, str) and name != "" and "\0" not in name


def _are_shares(shares: object) -> bool:
    if not isinstance(shares, tuple | list):
        return shares is None
    return all(is_number(share) and 0 <= share < MOST_GIB for share in shares) and any(shares)


def _are_moe_settings(settings: object) -> bool:
    return isinstance(settings, tuple | list) and all(
        isinstance(pair, tuple | list)
        and len(pair) == 2
        and all(isinstance(part, str) for part in pair)
        and pair[0] in MOE_SETTINGS.values()
        for pair in settings
    )


@dataclass(frozen=True)
class ContextShape:
    """`n_ctx` KV cells for `n_parallel` sequences of at most `n_ctx_sequence` tokens."""

    n_ctx: int
    n_parallel: int
    n_ctx_sequence: int

    def n_pages(self, page_tokens: int) -> int:
        """KV pages: for every sequence at its limit, or one at the limit of a shared pool."""
        sequences = self.n_ctx // self.n_ctx_sequence
        return sequences * -(-self.n_ctx_sequence // page_tokens)


def context_shape(
    config: EngineConfig, n_ctx_train: int, auto_context: int = AUTO_CONTEXT
) -> ContextShape:
    """The context sizes for a model that was trained on `n_ctx_train` tokens.

    With automatic `n_parallel` the sequences share one pool and each may fill it; an explicit one
    splits it evenly.  auto_context: tokens of a sequence at most where n_ctx is not set.
    """
    if config.n_parallel is None:
        n_ctx = config.n_ctx or min(n_ctx_train, auto_context)
        return ContextShape(n_ctx, AUTO_PARALLEL, n_ctx)
    n_parallel = config.n_parallel
    n_ctx_sequence = config.n_ctx // n_parallel if config.n_ctx else min(n_ctx_train, auto_context)
    return ContextShape(n_ctx_sequence * n_parallel, n_parallel, n_ctx_sequence)


def moe_settings_in(text: str) -> tuple[tuple[str, str], ...]:
    """`window=32,policy=lru` as `moe_cache`, in any case, with - or _.  Raises: ConfigError."""
    settings: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        key = MOE_SETTINGS.get(name.lower().replace("-", "_"))
        if key is None or not equals or not value:
            raise ConfigError(
                f"--moe {part.strip()[:40]!r}: use NAME=VALUE with one of {', '.join(MOE_SETTINGS)}"
            )
        settings[key] = value
    return tuple(settings.items())


def shares_in(text: str) -> tuple[float, ...]:
    """`3,1` as `tensor_split`.  Raises: ConfigError."""
    try:
        return tuple(float(part) for part in text.replace("/", ",").split(","))
    except ValueError:
        raise ConfigError(f"{text[:60]!r}: use a number for each GPU, as in 3,1") from None


def environment(name: str) -> str | None:
    """The variable `name`, or None where it is unset or empty; nothing else reads os.environ."""
    return os.environ.get(name) or None


def environment_names(prefix: str) -> list[str]:
    """The variables that are set and begin with `prefix`, sorted."""
    return sorted(name for name in os.environ if name.startswith(prefix) and environment(name))
