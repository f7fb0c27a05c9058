"""Where compiled CPU kernels are kept between runs.

Numba notices a changed file only if it holds the compiled function itself, not the files that the
function was built from.  So every state of the sources has its own directory, named by a hash.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import llvmlite
import numba

SOURCES = Path(__file__).resolve().parents[1]
KEPT_DIRECTORIES = 8
HASH_DIGITS = 16


@dataclass(frozen=True)
class KernelCache:
    """The directory in use, and why it is not the wanted one ("" when it is)."""

    directory: Path
    reason: str


def use_directory(base: Path | None = None) -> KernelCache:
    """Keep kernels decorated from now on below `base` (default: the user's cache directory).

    Each state of the sources has its own directory there; the oldest ones are removed.  If
    `base` cannot be written a fresh temporary directory serves this process alone.
    """
    wanted = base if base is not None else default_directory()
    directory = wanted / source_hash()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
        os.utime(directory)
    except OSError as error:
        temporary = Path(tempfile.mkdtemp(prefix="hotexpert-kernels-"))
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        cache = KernelCache(temporary, str(error))
    else:
        _remove_oldest(wanted, keep=directory)
        cache = KernelCache(directory, "")
    numba.config.CACHE_DIR = str(cache.directory)
    return cache


def default_directory() -> Path:
    """The user's cache directory for kernels; nothing is created."""
    return Path.home() / ".cache" / "hotexpert" / "kernels"


def source_hash() -> str:
    """Hex digest of the sources of `ops` and of the compiler's versions."""
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    for path in sorted(SOURCES.rglob("*.py")):
        digest.update(str(path.relative_to(SOURCES)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:HASH_DIGITS]


def _remove_oldest(base: Path, keep: Path) -> None:
    """Remove all but the most recently used kernel directories of `base`.

    Another process may use or remove them at the same time: Numba takes a missing file as a miss.
    """
    used: list[tuple[float, Path]] = []
    for entry in base.iterdir():
        name = entry.name
        if entry == keep or len(name) != HASH_DIGITS or set(name) - set("0123456789abcdef"):
            continue
        try:
            used.append((entry.stat().st_mtime, entry))
        except OSError:
            continue
    for _, entry in sorted(used, reverse=True)[KEPT_DIRECTORIES - 1 :]:
        shutil.rmtree(entry, ignore_errors=True)
