"""Show, export, import or forget how often a model's experts were used.

The profile is what lets the next start put the right experts on the GPU at once. An exported file
can be imported where the same model runs: it is added to what is known there.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.commands.options import add_model
from runtime.config import BUNDLED_MODEL
from runtime.errors import ConfigError

if TYPE_CHECKING:
    from profiles import UsageProfile
    from runtime.models.model import Model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--export", dest="exported", metavar="OUT", help="write a copy")
    action.add_argument("--import", dest="imported", metavar="IN", help="add what IN holds")
    action.add_argument(
        "--decay", type=float, metavar="SHARE", help="keep this share of every count, 0 to 1"
    )
    action.add_argument("--forget", action="store_true", help="delete the profile")


def run(settings: argparse.Namespace) -> int:
    from profiles import ProfileError
    from runtime.experts.usage import model_identity, profile_path
    from runtime.models.model import open_model

    with open_model(settings.model or BUNDLED_MODEL) as model:
        try:
            path = profile_path(model_identity(model.file))
            if path is None:
                raise ConfigError("LLAMA_MOE_CACHE_PROFILE = 0: profiles are switched off")
            return act(settings, model, path)
        except ProfileError as error:
            raise ConfigError(str(error)) from error
        except OSError as error:
            raise ConfigError(f"{error.filename or path}: {error.strerror}") from error


def act(settings: argparse.Namespace, model: Model, path: Path) -> int:
    """Do what was asked for.  Raises: ProfileError, OSError, ConfigError."""
    from profiles import load_profile, save_profile
    from runtime.experts.usage import model_identity

    if settings.forget:
        path.unlink(missing_ok=True)
        print(f"{path}: forgotten")
        return 0
    if settings.imported is not None:
        added = load_profile(Path(settings.imported))
        if added.model != model_identity(model.file):
            raise ConfigError(f"--import {settings.imported}: of another model, {added.model}")
        save_profile(path, load_profile(path).merged(added) if path.exists() else added)
    if not path.exists():
        print(f"{path}: nothing is known of this model yet")
        return 0
    profile = load_profile(path)
    if settings.decay is not None:
        profile = profile.decayed(settings.decay)
        save_profile(path, profile)
    if settings.exported is not None:
        save_profile(Path(settings.exported), profile)
        print(f"{settings.exported}: written")
    print("\n".join([str(path), *profile_lines(profile)]))
    return 0


def profile_lines(profile: UsageProfile) -> list[str]:
    """The tokens, and how unevenly each layer uses its experts."""
    import numpy as np

    n_expert = profile.counts.shape[1]
    lines = [f"{profile.n_tokens} tokens; share of each layer's uses that the most used have:"]
    parts = [max(1, n_expert // 10), max(1, n_expert // 4), max(1, n_expert // 2)]
    lines.append("  layer" + "".join(f"{f'{part} of {n_expert}':>12}" for part in parts))
    for layer, counts in enumerate(profile.counts):
        most = np.cumsum(np.sort(counts)[::-1])
        total = max(int(most[-1]), 1)
        shares = "".join(f"{100 * int(most[part - 1]) / total:>10.1f} %" for part in parts)
        lines.append(f"  {layer:5}{shares}")
    return lines
