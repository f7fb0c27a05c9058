"""How often a model's experts were used: show, export, import, merge, fade or forget it.

The profile is what lets the next start put the right experts on the GPU at once. An exported file
can be imported where the same model runs: it is added to what is known there.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.commands.options import CommandParser, add_model, file_name
from runtime.config import BUNDLED_MODEL
from runtime.errors import ConfigError

if TYPE_CHECKING:
    from profiles import ModelIdentity, UsageProfile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(
        dest="action", metavar="ACTION", required=True, parser_class=CommandParser
    )
    add_model(actions.add_parser("show", help="what is known of a model"))
    for name, metavar, what in (
        ("export", "OUT", "write what is known of a model to a file"),
        ("import", "IN", "add what a file holds to what is known of its model"),
    ):
        action = of_model(actions.add_parser(name, help=what))
        action.add_argument("file", metavar=metavar)
    merge = actions.add_parser("merge", help="write the sum of several files, of one model")
    merge.add_argument("file", metavar="OUT")
    merge.add_argument("parts", nargs="+", metavar="IN")
    merge.set_defaults(model=None, model_argument=None)
    decay = of_model(actions.add_parser("decay", help="let the past count less"))
    decay.add_argument("share", type=float, metavar="SHARE", help="of every count, 0 to 1, stays")
    of_model(actions.add_parser("forget", help="delete what is known of a model"))


def of_model(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """With -m alone: the action has a positional argument of its own, or deletes."""
    parser.add_argument(
        "-m", "--model", type=file_name, metavar="FILE", help="default: the bundled model"
    )
    parser.set_defaults(model_argument=None)
    return parser


def run(settings: argparse.Namespace) -> int:
    from profiles import ProfileError

    try:
        ACTIONS[settings.action](settings)
    except ProfileError as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        raise ConfigError(f"{error.filename or error}: {error.strerror}") from error
    return 0


def show(settings: argparse.Namespace) -> None:
    path, _ = profile_of(settings)
    profile = known(path)
    if profile is None:
        print(f"{path}: nothing is known of this model yet")
    else:
        print("\n".join([str(path), *profile_lines(profile)]))


def export(settings: argparse.Namespace) -> None:
    """Raises: ConfigError where there is nothing to export."""
    from profiles import save_profile

    path, _ = profile_of(settings)
    profile = known(path)
    if profile is None:
        raise ConfigError(f"{path}: nothing is known of this model yet")
    save_profile(Path(settings.file), profile)
    print(f"{settings.file}: {profile.n_tokens} tokens")


def import_(settings: argparse.Namespace) -> None:
    """Raises: ConfigError for a file of another model."""
    from profiles import alone_with, load_profile, save_profile

    path, identity = profile_of(settings)
    added = load_profile(Path(settings.file))
    if added.model != identity:
        raise ConfigError(f"{settings.file}: of another model, {added.model}")
    with alone_with(path):
        base = known(path)
        profile = added if base is None else base.merged(added)
        save_profile(path, profile)
    print("\n".join([str(path), *profile_lines(profile)]))


def merge(settings: argparse.Namespace) -> None:
    """Raises: ConfigError for files of several models."""
    from profiles import load_profile, save_profile

    first, *others = settings.parts
    profile = load_profile(Path(first))
    for name in others:
        added = load_profile(Path(name))
        if added.model != profile.model:
            raise ConfigError(f"{name}: of another model than {first}, {added.model}")
        profile = profile.merged(added)
    save_profile(Path(settings.file), profile)
    print(f"{settings.file}: {profile.n_tokens} tokens")


def decay(settings: argparse.Namespace) -> None:
    from profiles import alone_with, save_profile

    path, _ = profile_of(settings)
    with alone_with(path):
        profile = known(path)
        if profile is None:
            raise ConfigError(f"{path}: nothing is known of this model yet")
        profile = profile.decayed(settings.share)
        save_profile(path, profile)
    print("\n".join([str(path), *profile_lines(profile)]))


def forget(settings: argparse.Namespace) -> None:
    from profiles import check_own

    path, _ = profile_of(settings)
    check_own(path)
    path.unlink(missing_ok=True)
    print(f"{path}: forgotten")


ACTIONS: dict[str, Callable[[argparse.Namespace], None]] = {
    "show": show,
    "export": export,
    "import": import_,
    "merge": merge,
    "decay": decay,
    "forget": forget,
}


def profile_of(settings: argparse.Namespace) -> tuple[Path, ModelIdentity]:
    """Where the model's profile is or will be.  Raises: ConfigError, ModelError."""
    from runtime.experts.usage import model_identity, own_path, profile_path
    from runtime.models.model import open_model

    with open_model(settings.model or BUNDLED_MODEL) as model:
        identity = model_identity(model.file)
    path = profile_path(identity)
    if path is None:
        raise ConfigError("LLAMA_MOE_CACHE_PROFILE = 0: profiles are switched off")
    return own_path(path, identity), identity


def known(path: Path) -> UsageProfile | None:
    """What is known; None: nothing.  Raises: ProfileError."""
    from profiles import load_profile

    return load_profile(path) if path.exists() else None


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
    recent = profile.recent
    if recent is None:
        lines.append("what the last tokens used is not known: the most used experts are first")
    elif recent.served is not None:
        held, served = (100 * share for share in recent.served)
        lines.append(f"lately a cache of {held:.0f} % of them served {served:.1f} % of the uses")
    return lines
