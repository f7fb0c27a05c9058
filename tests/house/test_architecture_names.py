"""Architectures are data: their names are in their files and in the table, and nowhere else."""

from __future__ import annotations

import ast
from pathlib import Path

from runtime.models.architectures import ARCHITECTURES

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "runtime" / "models" / "architectures.py"
OTHER_MEANINGS = {
    # Kinds of tokenizers in GGUF files, too.
    "llama": ("runtime/text/", "server/routes/models.py"),
    "qwen35": ("runtime/text/",),
}


def test_no_code_asks_for_an_architecture() -> None:
    own = {module.split(".")[-1] for module in _modules()}
    found = []
    for folder in ("ops", "ptx", "profiles", "runtime", "server"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path == TABLE or (path.parent == TABLE.parent and path.stem in own):
                continue
            name = str(path.relative_to(ROOT))
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Constant) or node.value not in ARCHITECTURES:
                    continue
                if not name.startswith(OTHER_MEANINGS.get(str(node.value), ("-",))):
                    found.append(f"{name}:{node.lineno} {node.value}")
    assert not found, found


def _modules() -> set[str]:
    return {build.__module__ for build in ARCHITECTURES.values()}
