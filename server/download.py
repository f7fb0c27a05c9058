"""`-hf user/repo[:quant]`: a plain download through huggingface_hub, into its own cache."""

from __future__ import annotations

import re
from pathlib import Path

from runtime.errors import ConfigError

PREFERRED = ("Q4_K_M", "Q8_0")
NOT_MODELS = ("mmproj", "imatrix", "mtp-", "eagle3-")
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


def choose_files(names: list[str], quant: str | None, wanted: str | None) -> list[str]:
    """The GGUF files to fetch, first shard first: `wanted` by name, else by `quant`, else Q4_K_M,
    Q8_0, any.

    Raises: ConfigError listing what the repository has.
    """
    models = sorted(
        name for name in names
        if name.endswith(".gguf") and not any(word in name.lower() for word in NOT_MODELS)
    )  # fmt: skip
    if wanted is not None:
        chosen = [name for name in names if name == wanted]
    else:
        chosen = []
        for tag in (quant,) if quant else PREFERRED:
            pattern = re.compile(re.escape(tag) + r"[.-]", re.IGNORECASE)
            chosen = chosen or [name for name in models if pattern.search(name)]
        chosen = chosen or ([] if quant else models)
    if not chosen:
        listed = ", ".join(models[:20]) or "no GGUF file at all"
        raise ConfigError(f"nothing in the repository matches {wanted or quant}; it has {listed}")
    first = chosen[0]
    shard = _SHARD.search(first)
    if shard is None:
        return [first]
    stem, count = first[: shard.start()], int(shard.group(2))
    return [f"{stem}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]


def download(repository: str, wanted: str | None, token: str | None, *, offline: bool) -> Path:
    """Fetch the model of `user/repo[:quant]` (all shards) and return the path of its first file.

    Raises: ConfigError when the extra is missing, the name is wrong or the hub refuses.
    """
    try:
        import huggingface_hub as hub
    except ImportError as error:
        raise ConfigError(
            "-hf needs the package huggingface_hub: pip install 'hotexpert[hf]', "
            "or download the GGUF file yourself and give it with -m"
        ) from error
    name, _, quant = repository.partition(":")
    if name.count("/") != 1:
        raise ConfigError(f"-hf {repository}: use USER/REPO or USER/REPO:QUANT")
    try:
        if offline:
            folder = Path(hub.snapshot_download(name, local_files_only=True))
            names = [path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf")]
        else:
            names = list(hub.HfApi(token=token).list_repo_files(name))
        paths = [
            Path(hub.hf_hub_download(name, file, token=token, local_files_only=offline))
            for file in choose_files(names, quant or None, wanted)
        ]
    except ConfigError:
        raise
    except Exception as error:  # the hub lets through whatever its HTTP library of the day raises
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigError(
            f"-hf {repository}: {reason}; with --offline only what is already downloaded is used"
        ) from error
    return paths[0]


def cached_files() -> list[str]:
    """GGUF files in the Hugging Face cache of this user, as `repo file` lines."""
    try:
        import huggingface_hub as hub
    except ImportError as error:
        raise ConfigError(
            "--cache-list needs huggingface_hub: pip install 'hotexpert[hf]'"
        ) from error
    try:
        repositories = hub.scan_cache_dir().repos
    except hub.errors.CacheNotFound:
        return []
    return sorted(
        {
            f"{repository.repo_id} {file.file_name}"
            for repository in repositories
            for revision in repository.revisions
            for file in revision.files
            if file.file_name.endswith(".gguf")
        }
    )
