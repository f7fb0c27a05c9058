"""Lifetime use of a model's experts: found at the start, kept in a file while the engine runs.

The start looks in the model's profile, else in the model's own file (`moe_cache.expert_usage`).
Several engines, and processes, may share a profile: saving adds what is new to what the file holds
by then, one after the other. Where one file is named for several models, the first keeps it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ops.user_cache import user_cache
from profiles import (
    ModelIdentity,
    ProfileError,
    RecentUse,
    UsageProfile,
    alone_with,
    load_profile,
    save_profile,
    scaled_down,
    tensor_hash,
)
from runtime.config import environment
from runtime.experts.known_use import KnownUse
from runtime.models.gguf import GGUFFile
from runtime.models.gguf_header import MetadataValue
from runtime.models.model import Model
from runtime.models.spec import ModelSpec, MoeSpec

logger = logging.getLogger(__name__)

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]

USAGE_KEY = "moe_cache.expert_usage"
SAVE_SECONDS = 180.0
HEAT_UNIT = 1e6
OFF = "0"


def model_identity(file: GGUFFile) -> ModelIdentity:
    """Of an open model.  Raises: ProfileError for an architecture without a usable name."""
    rows = [(name, tensor.format.name, tensor.shape) for name, tensor in file.tensors.items()]
    architecture = str(file.metadata.get("general.architecture"))
    return ModelIdentity(architecture, file.n_bytes, tensor_hash(rows))


def profile_path(identity: ModelIdentity) -> Path | None:
    """Where the model's profile is: LLAMA_MOE_CACHE_PROFILE, or in the user's cache; None: 0."""
    chosen = environment("LLAMA_MOE_CACHE_PROFILE")
    if chosen == OFF:
        return None
    if chosen is not None:
        return Path(chosen)
    return user_cache() / "usage" / identity.file_name


def own_path(path: Path, identity: ModelIdentity) -> Path:
    """Where the model's profile is or will be: `path`, or beside it, where another model's is."""
    try:
        of_another = load_profile(path).model != identity
    except (ProfileError, OSError):
        return path
    return path.with_name(f"{path.name}.{identity.file_name}") if of_another else path


def file_usage(
    metadata: Mapping[str, MetadataValue],
    spec: ModelSpec,
    tell: Callable[[str], object] = logger.warning,
) -> U64 | None:
    """The table that the model's file has, u64[n_moe_layers, n_expert]; None: it has none, or one
    that does not fit the model.

    In the file it has a row for every layer, those without experts included.
    """
    values = metadata.get(USAGE_KEY)
    if values is None:
        return None
    n_layers, n_expert = len(spec.layers), spec.n_expert_max
    whole = isinstance(values, list) and all(
        type(value) is int and 0 <= value < 1 << 32 for value in values
    )
    if not whole or not isinstance(values, list) or len(values) != n_layers * n_expert:
        tell(f"{USAGE_KEY} is not a count for each of {n_layers} x {n_expert}")
        return None
    table = np.array(values, np.uint64).reshape(n_layers, n_expert)
    routed = [isinstance(layer.feed_forward, MoeSpec) for layer in spec.layers]
    return scaled_down(table[np.array(routed, np.bool_)])


@dataclass
class LifetimeUsage:
    """What is known at the start, and where it goes.

    known     u64[n_moe_layers, n_expert]: uses by known_tokens tokens; all 0: nothing is known
    source    where that came from, for people
    path      None: nothing is saved; see `own_path`
    recent    use by the last tokens; None: not known
    tell      gets the reason where nothing could be saved, from any thread
    """

    identity: ModelIdentity
    known: U64
    known_tokens: int
    source: str
    path: Path | None
    saved_at: float = 0.0
    recent: RecentUse | None = None
    tell: Callable[[str], object] = logger.warning

    @property
    def for_plan(self) -> KnownUse:
        """What plans are made with."""
        return KnownUse(self.known, None if self.recent is None else self.recent.served)

    @property
    def heat(self) -> U64:
        """How early the experts are wanted, u64[n_moe_layers, n_expert]: a number to sort by."""
        if self.recent is None:
            return self.known
        rates: U64 = (HEAT_UNIT * self.recent.rates.max(axis=0)).astype(np.uint64)
        return rates

    def due(self, now: float) -> bool:
        """Whether it is time to save, by a clock in seconds."""
        return self.path is not None and now - self.saved_at >= SAVE_SECONDS

    def save(self, uses: I64, n_tokens: int, now: float, recent: RecentUse | None = None) -> None:
        """Add uses by n_tokens tokens that were not saved before, and keep what is known of the
        last ones.  Blocks for a disk.

        A damaged profile is replaced; where something else is, or nothing can be written, that is
        told.
        """
        self.saved_at = now
        if self.path is None or not uses.any():
            return
        counts = scaled_down(np.asarray(uses, np.uint64).reshape(self.known.shape))
        profile = UsageProfile(self.identity, counts, n_tokens, recent)
        try:
            with alone_with(self.path):
                path = own_path(self.path, self.identity)
                base = _loaded(path, self.identity, self.known.shape)
                save_profile(path, profile if base is None else base.merged(profile))
        except OSError as error:
            self.tell(f"{self.path}: expert usage was not saved: {error.strerror}")


def refused(why: str) -> None:
    """Tell that a profile is not used."""
    logger.warning("expert usage is not used: %s", why)


def lifetime_usage(
    model: Model, path: Path | None = None, tell: Callable[[str], object] = refused
) -> LifetimeUsage:
    """What is known of a model with routed experts.

    path: the profile, if not the usual one;  tell: gets the reason where it is not used
    """
    identity = model_identity(model.file)
    path = profile_path(identity) if path is None else path
    blocks = [layer.feed_forward for layer in model.spec.layers]
    n_layers = sum(isinstance(block, MoeSpec) for block in blocks)
    shape = n_layers, model.spec.n_expert_max
    own = None if path is None else own_path(path, identity)
    if own != path:
        tell(f"{path} is another model's: {own} is")
    profile = None if own is None else _loaded(own, identity, shape, tell)
    if profile is not None:
        found = identity, profile.counts, profile.n_tokens, str(own), path
        return LifetimeUsage(*found, recent=profile.recent)
    table = file_usage(model.metadata, model.spec, tell)
    if table is not None and table.any():
        used = max((block.n_used for block in blocks if isinstance(block, MoeSpec)), default=1)
        n_tokens = int(table[0].sum()) // used
        return LifetimeUsage(identity, table, n_tokens, "the model's file", path)
    return LifetimeUsage(identity, np.zeros(shape, np.uint64), 0, "nothing", path)


def _loaded(
    path: Path,
    identity: ModelIdentity,
    shape: tuple[int, int],
    tell: Callable[[str], object] = refused,
) -> UsageProfile | None:
    """The profile, if there is one and it is this model's; else the reason is told."""
    try:
        profile = load_profile(path)
    except FileNotFoundError:
        return None
    except (ProfileError, OSError) as error:
        tell(str(error))
        return None
    if profile.model != identity or profile.counts.shape != shape:
        tell(f"{path} is another model's")
        return None
    return profile
