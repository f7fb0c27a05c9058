"""`-mu URL`: one model file over HTTP into the user's cache; half a file is never used."""

from __future__ import annotations

import hashlib
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit
from urllib.request import urlopen

from runtime import ProgressBar
from runtime.config import user_cache
from runtime.errors import ConfigError

CHUNK_BYTES = 1 << 20
SILENCE_SECONDS = 60.0


def models_directory() -> Path:
    """Where downloaded models are kept; nothing is created."""
    return user_cache() / "models"


def fetch(url: str, folder: Path, *, offline: bool) -> Path:
    """The file of `url` in `folder`, downloaded where it is not there yet.

    Raises: ConfigError for another kind of address, offline without the file, a failing transfer.
    """
    address = urlsplit(url)
    name = PurePosixPath(unquote(address.path)).name
    if address.scheme not in ("http", "https") or not name.endswith(".gguf"):
        raise ConfigError(f"-mu {url}: use the http or https address of a .gguf file")
    target = folder / f"{hashlib.sha256(url.encode()).hexdigest()[:12]}-{name}"
    if target.is_file():
        return target
    if offline:
        raise ConfigError(f"-mu {url}: not downloaded yet, and --offline forbids it")
    partial = target.with_suffix(".partial")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _transfer(url, partial)
        partial.replace(target)
    except (OSError, HTTPException, ValueError) as error:
        partial.unlink(missing_ok=True)
        raise ConfigError(f"-mu {url}: {error}") from error
    return target


def _transfer(url: str, path: Path) -> None:
    """Raises: OSError where the transfer fails or ends early."""
    with (
        urlopen(url, timeout=SILENCE_SECONDS) as response,
        path.open("wb") as file,
        ProgressBar() as progress,
    ):
        total = int(response.headers.get("Content-Length") or 0)
        progress.start("downloading", total, "B")
        while chunk := response.read(CHUNK_BYTES):
            file.write(chunk)
            progress.advance(len(chunk))
        if total and file.tell() != total:
            raise OSError(f"the transfer ended after {file.tell()} of {total} bytes")
