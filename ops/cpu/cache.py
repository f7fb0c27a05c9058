"""Where compiled CPU kernels are kept between runs.

Numba notices a changed file only if it holds the compiled function itself, not the files that the
function was built from.  So every state of the sources has its own directory, named by a hash, and
so has every kind of processor.  Within it a kernel's files are named by what it is and not by where
its source lies: all copies of the same sources share them, and no two kernels write to one file,
so any number of processes may compile at the same time.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding
import numba
from numba.core import caching
from numba.core.runtime import rtsys

from ops.user_cache import user_cache

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).resolve().parents[1]
KERNEL_SOURCES = ("cpu", "quants", "*.py")
"""Patterns of what CPU kernels are made of: the GPU's change nothing about them."""
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
    return user_cache() / "kernels"


def source_hash() -> str:
    """Hex digest of what kernels are made of, of the compiler's versions and of the processor."""
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    features = llvmlite.binding.get_host_cpu_features().flatten()
    digest.update(f"{llvmlite.binding.get_host_cpu_name()} {features}".encode())
    found = [path for pattern in KERNEL_SOURCES for path in SOURCES.glob(pattern)]
    files = [f for path in found for f in (path.rglob("*.py") if path.is_dir() else [path])]
    for path in sorted(files):
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


BASE: Any = getattr(caching, "_CacheLocator", object)


class KernelLocator(BASE):  # type: ignore[misc]
    """Numba's question where it keeps a function, answered for those of these sources."""

    def __init__(self, function: Callable[..., object], file: Path) -> None:
        folder = file.relative_to(SOURCES).parent
        self._directory = Path(numba.config.CACHE_DIR) / "-".join((SOURCES.name, *folder.parts))
        values = [cell.cell_contents for cell in function.__closure__ or ()]
        numbers = [function.__code__.co_firstlineno, *values]
        self._what = "-".join(str(number) for number in numbers)

    def get_cache_path(self) -> str:
        return str(self._directory)

    def get_source_stamp(self) -> str:
        """The directory's name is one already."""
        return ""

    def get_disambiguator(self) -> str:
        return self._what

    @classmethod
    def from_function(cls, function: Callable[..., object], file: str) -> KernelLocator | None:
        """None where this does not know the function: then Numba asks others."""
        path = Path(file).resolve()
        if not numba.config.CACHE_DIR or SOURCES not in path.parents:
            return None
        locator = cls(function, path)
        try:
            locator.ensure_cache_path()
        except OSError:
            return None
        return locator


FILES: Any = getattr(caching, "IndexDataCacheFile", object)


class KernelFiles(FILES):  # type: ignore[misc]
    """Numba's files of one kernel.  One that a crash left cut off, or that finds no room, costs a
    compilation, not the start; other functions' files are left to Numba.
    """

    def load(self, key: object) -> object:
        """What was kept for `key`, or None."""
        try:
            return super().load(key)
        except Exception as error:  # of pickle, whatever the bytes make it do
            if not self._is_ours():
                raise
            _warn_once(f"compiling a kernel anew, its file is damaged: {error!r}")
            with suppress(OSError):
                os.unlink(self._index_path)
            return None

    def save(self, key: object, data: object) -> None:
        """Keep `data`, where there is room."""
        try:
            super().save(key, data)
        except OSError as error:
            if not self._is_ours():
                raise
            _warn_once(f"compiled kernels are not kept, the next start compiles again: {error}")
            with suppress(OSError):
                os.unlink(self._index_path)

    def _is_ours(self) -> bool:
        return Path(numba.config.CACHE_DIR) in Path(self._cache_path).parents


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning("%s", text)


def register(implementation: Any) -> None:
    """Have Numba ask `KernelLocator` first, and use `KernelFiles`; a Numba that is made otherwise
    keeps its own way.
    """
    known = getattr(implementation, "_locator_classes", None)
    if known is not None and BASE is not object and KernelLocator not in known:
        known.insert(0, KernelLocator)
        if FILES is not object:
            caching.IndexDataCacheFile = KernelFiles


def load_plainly(cache: Any) -> None:
    """Have Numba load kernels that are compiled without reading all that it can compile, a quarter
    of a second of every start; it does so before it compiles. Other functions, and a Numba that is
    made otherwise, keep their way."""
    usual, load = getattr(cache, "load_overload", None), getattr(cache, "_load_overload", None)
    if usual is None or load is None:
        return

    def load_overload(self: Any, sig: object, target_context: object) -> object:
        found = None
        if isinstance(getattr(getattr(self, "_impl", None), "locator", None), KernelLocator):
            rtsys.initialize(target_context)
            found = load(self, sig, target_context)
        return usual(self, sig, target_context) if found is None else found

    cache.load_overload = load_overload


register(getattr(caching, "CacheImpl", getattr(caching, "_CacheImpl", None)))
load_plainly(getattr(caching, "Cache", None))
