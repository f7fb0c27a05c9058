"""Files that outlive a run: routing traces and expert usage.  Imports numpy and msgpack only."""

from __future__ import annotations

from profiles.container import check_own
from profiles.errors import ProfileError
from profiles.file_lock import alone_with
from profiles.recent_use import HALF_LIVES, RecentUse
from profiles.routing_trace import Phase, RoutingTrace, join, load_trace, save_trace
from profiles.usage_profile import (
    ModelIdentity,
    UsageProfile,
    load_profile,
    save_profile,
    scaled_down,
    tensor_hash,
)

__all__ = [
    "HALF_LIVES",
    "ModelIdentity",
    "Phase",
    "ProfileError",
    "RecentUse",
    "RoutingTrace",
    "UsageProfile",
    "alone_with",
    "check_own",
    "join",
    "load_profile",
    "load_trace",
    "save_profile",
    "save_trace",
    "scaled_down",
    "tensor_hash",
]
