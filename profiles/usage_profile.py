"""UsageProfile: how often each expert of a model was used, kept from run to run."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from profiles import container
from profiles.errors import ProfileError
from profiles.recent_use import RecentUse

KIND = "expert usage"
MAX_BYTES = 64 << 20
MAX_LAYERS = 4096
MAX_EXPERTS = 1 << 16
LARGEST_COUNT = 1 << 31
"""A layer with more is halved until it fits: what matters is which expert is used more."""

U64 = NDArray[np.uint64]
TensorRow = tuple[str, str, Sequence[int]]
"""(name, format, shape)"""


@dataclass(frozen=True)
class ModelIdentity:
    """Which model was used: its architecture, its files' bytes, its table of tensors."""

    architecture: str
    file_bytes: int
    tensor_hash: str

    def __post_init__(self) -> None:
        """Raises: ProfileError."""
        if not _matches(r"[0-9a-z_.-]{1,64}", self.architecture):
            raise ProfileError(f"an architecture called {str(self.architecture)[:64]!r}")
        is_size = type(self.file_bytes) is int and 0 < self.file_bytes < 1 << 60
        if not is_size or not _matches(r"[0-9a-f]{32}", self.tensor_hash):
            raise ProfileError("a model without a size or the hash of its tensors")

    @property
    def file_name(self) -> str:
        """Of the profile in the folder of profiles."""
        return f"{self.architecture}-{self.tensor_hash[:16]}-{self.file_bytes}.usage"


def _matches(pattern: str, value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(pattern, value) is not None


def tensor_hash(tensors: Iterable[TensorRow]) -> str:
    """Of a table of tensors, in any order: 32 hexadecimal digits."""
    digest = hashlib.sha256()
    for name, kind, shape in sorted((name, kind, tuple(shape)) for name, kind, shape in tensors):
        digest.update(f"{name}\0{kind}\0{shape}\n".encode())
    return digest.hexdigest()[:32]


@dataclass(frozen=True)
class UsageProfile:
    """counts  u64[n_layers, n_expert]: uses of each expert of each MoE layer, in the layers' order
    n_tokens   tokens that were counted
    recent     by the last of them; None: not known
    """

    model: ModelIdentity
    counts: U64
    n_tokens: int
    recent: RecentUse | None = None

    def __post_init__(self) -> None:
        """Raises: ProfileError for counts of a shape or size that no model has."""
        if not isinstance(self.model, ModelIdentity) or not isinstance(self.counts, np.ndarray):
            raise ProfileError("model: use a ModelIdentity; counts: use an array u64")
        shape = self.counts.shape
        if len(shape) != 2 or not 0 < shape[0] <= MAX_LAYERS or not 0 < shape[1] <= MAX_EXPERTS:
            raise ProfileError(f"counts of shape {shape}")
        if self.counts.dtype != np.uint64 or int(self.counts.max()) > LARGEST_COUNT:
            raise ProfileError(f"a count above {LARGEST_COUNT}, or counts of another type")
        if type(self.n_tokens) is not int or not 0 <= self.n_tokens < 1 << 60:
            raise ProfileError(f"n_tokens: {str(self.n_tokens)[:40]!r} is no number of tokens")
        if not isinstance(self.recent, RecentUse | None):
            raise ProfileError("recent: use a RecentUse, or None")
        if self.recent is not None and self.recent.rates.shape[1:] != shape:
            raise ProfileError(f"rates of shape {self.recent.rates.shape}, counts of {shape}")

    def merged(self, other: UsageProfile) -> UsageProfile:
        """Both together, `other` the later one: recent use is what it says, or not known.

        Raises: ProfileError for profiles of models of different shapes.
        """
        if not isinstance(other, UsageProfile):
            raise ProfileError(f"a {type(other).__name__} is no UsageProfile")
        if self.counts.shape != other.counts.shape:
            raise ProfileError(
                f"{self.counts.shape} experts and {other.counts.shape} do not belong to one model"
            )
        counts = scaled_down(self.counts + other.counts)
        n_tokens = self.n_tokens + other.n_tokens
        return replace(self, counts=counts, n_tokens=n_tokens, recent=other.recent)

    def decayed(self, share: float) -> UsageProfile:
        """With `share` (0 to 1) of every count, rounded to the nearest; what the last tokens used
        stays, unless nothing does.  Raises: ProfileError."""
        if type(share) not in (int, float) or not 0.0 <= share <= 1.0:
            raise ProfileError(f"a share of {str(share)[:40]!r}: use 0 to 1")
        counts = np.rint(self.counts * share).astype(np.uint64)
        recent = self.recent if share else None
        return replace(self, counts=counts, n_tokens=round(self.n_tokens * share), recent=recent)


def scaled_down(counts: U64) -> U64:
    """With the counts of each layer halved until they fit."""
    counts, largest = counts.copy(), counts.max(axis=1, initial=0).tolist()
    for layer, most in enumerate(largest):
        shift = max(0, most.bit_length() - LARGEST_COUNT.bit_length() + 1)
        counts[layer] >>= np.uint64(shift)
    return counts


def save_profile(path: str | Path, profile: UsageProfile) -> None:
    """Write the file, or leave what was there.  Raises: OSError; ProfileError for no path."""
    model = profile.model
    facts: dict[str, Any] = {
        "architecture": model.architecture,
        "file_bytes": model.file_bytes,
        "tensor_hash": model.tensor_hash,
        "n_tokens": profile.n_tokens,
    }
    arrays: dict[str, NDArray[Any]] = {"counts": profile.counts}
    if profile.recent is not None:
        facts.update(profile.recent.facts())
        arrays["rates"] = profile.recent.rates
    container.write(path, KIND, facts, arrays)


def load_profile(path: str | Path) -> UsageProfile:
    """Raises: ProfileError for a file that is no profile; OSError where it cannot be read."""
    contents = container.read(path, KIND, MAX_BYTES)
    facts, counts = contents.facts, contents.arrays.get("counts")
    architecture, file_bytes = facts.get("architecture"), facts.get("file_bytes")
    hashed, n_tokens = facts.get("tensor_hash"), facts.get("n_tokens")
    if (
        not isinstance(architecture, str)
        or not isinstance(hashed, str)
        or type(file_bytes) is not int
        or type(n_tokens) is not int
        or counts is None
    ):
        raise ProfileError(f"{path}: a fact or the counts are missing")
    try:
        identity = ModelIdentity(architecture, file_bytes, hashed)
        rates = contents.arrays.get("rates")
        recent = None if rates is None else RecentUse.read(facts, rates)
        return UsageProfile(identity, counts, n_tokens, recent)
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from error
