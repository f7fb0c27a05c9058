"""`import runtime` is light, and importing has no effects."""

from __future__ import annotations

import subprocess
import sys

HEAVY = [
    *("numba", "llvmlite", "cuda", "aiohttp", "jinja2", "tokenizers"),
    *("gguf", "msgspec", "prometheus_client", "tqdm"),
]


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout


def test_import_runtime_loads_nothing_heavy() -> None:
    loaded = run(
        "import sys, runtime; from runtime import EngineConfig, SamplingParams; "
        f"print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    assert loaded.strip() == "[]", f"import runtime loads {loaded}: import it where it is used"


def test_import_runtime_is_quick() -> None:
    code = "import time; t = time.perf_counter(); import runtime; print(time.perf_counter() - t)"
    best = min(float(run(code)) for _ in range(3))
    assert best < 0.25, f"import runtime took {best:.3f} s: something heavy is imported at the top"


def test_importing_starts_no_thread() -> None:
    assert run("import threading, runtime; print(threading.active_count())").strip() == "1"


def test_public_names_resolve() -> None:
    code = "import runtime; print([n for n in runtime.__all__ if not hasattr(runtime, n)])"
    assert run(code).strip() == "[]"
