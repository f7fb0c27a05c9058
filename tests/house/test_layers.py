"""Who may import whom: our own layers, and the one home of each foreign library."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("ptx", "ops", "profiles", "runtime", "server")

MAY_IMPORT = {
    "ptx": {"ptx"},
    "ops": {"ptx", "ops"},
    "profiles": {"profiles"},
    "runtime": {"ptx", "ops", "profiles", "runtime"},
    "server": {"runtime", "server"},
}
# `python -m runtime.server` has to start the server, so this one file may look up.
EXCEPTIONS = {("runtime/server.py", "server")}

HOMES = {
    "numba": ("ops/cpu/",),
    "llvmlite": ("ops/cpu/",),
    "gguf": ("ops/quants/codebooks.py",),
    "cuda": ("runtime/cuda/driver.py",),
    "aiohttp": ("server/",),
    "msgspec": ("server/",),
    "prometheus_client": ("server/",),
    "msgpack": ("profiles/",),
    "jinja2": ("runtime/text/chat_template.py", "runtime/text/sandbox.py"),
    "tokenizers": ("runtime/text/",),
    "tqdm": ("runtime/progress.py",),
    "huggingface_hub": ("server/download.py", "runtime/download.py"),
    "nvtx": ("runtime/profiling/nvtx_ranges.py",),
    "numpy": ("ops/", "runtime/", "profiles/"),
}


def sources(folders: tuple[str, ...] = PACKAGES) -> Iterator[tuple[str, ast.Module]]:
    """Every Python file of the folders: its path relative to the root, and its tree."""
    for package in folders:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())


def imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, top-level package) of every import statement, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module.split(".")[0]


def test_our_layers_import_downwards_only() -> None:
    wrong = [
        f"{path}:{line} imports {name}; {path.split('/')[0]} may import only "
        f"{sorted(MAY_IMPORT[path.split('/')[0]])}: move the code down or pass the object in"
        for path, tree in sources()
        for line, name in imported(tree)
        if name in PACKAGES
        and name not in MAY_IMPORT[path.split("/")[0]]
        and (path, name) not in EXCEPTIONS
    ]
    assert not wrong, "\n".join(wrong)


def test_every_foreign_library_has_one_home() -> None:
    wrong = [
        f"{path}:{line} imports {name}, whose home is {HOMES.get(name, 'undecided: add a row')}"
        for path, tree in sources()
        for line, name in imported(tree)
        if name not in PACKAGES
        and name not in sys.stdlib_module_names
        and not path.startswith(HOMES.get(name, ("-",)))
    ]
    assert not wrong, "\n".join(wrong)


def test_the_environment_is_read_in_one_place() -> None:
    wrong = [
        f"{path}:{node.lineno} reads the environment: use runtime.config.environment"
        for path, tree in sources()
        if path != "runtime/config.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    ]
    assert not wrong, "\n".join(wrong)
