"""What the cache of experts costs Python between and beside steps, with a driver that does nothing.

    python -m bench cache_calls --layers 24 --uploads 6 --out result.json

Routing is that of a router that does not exist (`bench/routing/synthetic.py`), half of the experts
have slots, and every upload has arrived by the next step. `--cold` reads more memory between the
calls than a core's own caches hold, as the CPU's workers do on the same machine.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from bench.machine import machine
from bench.routing.synthetic import ROUTERS, synthetic_trace
from ops.cpu.memory import store_f32
from ops.quants import FORMATS
from runtime.cuda.driver import Driver
from runtime.experts.cache_settings import CacheSettings
from runtime.experts.cached_experts import CachedExperts
from runtime.experts.host_experts import HostExperts
from runtime.models.linear import Linear
from runtime.models.spec import MoeSpec, RouterScore, RouterSpec

CALLS = ("before_step", "while_running", "after_step")
FORMAT, N_EMBD, N_FF = FORMATS["Q8_0"], 64, 32
"""Small: what an expert weighs makes no difference here."""
WARM_TOKENS = 200
TRASH_BYTES = 24 << 20


def main(argv: list[str]) -> int:
    """Measure, print, and write the result file if one is named."""
    parser = argparse.ArgumentParser(prog="python -m bench cache_calls", description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--uploads", type=int, default=6, help="in a step, at most")
    parser.add_argument("--share", type=float, default=0.5, help="of the experts that have a slot")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    rows = [measured(args, seed) for seed in range(args.repeats)]
    for row in rows:
        print(json.dumps(row), flush=True)
    if args.out:
        settings = {k: str(v) for k, v in vars(args).items()}
        report = {"machine": machine(), "settings": settings, "rows": rows}
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def measured(args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Microseconds of each call a token, medians of a run, and what the cache did."""
    router = replace(ROUTERS["local-128"], n_layers=args.layers, skew=0.6, drift=1.2)
    choices = synthetic_trace("a model", args.tokens, seed, router).choices
    experts = experts_of(router.n_expert, args.layers, args.share, args.uploads)
    trash = np.zeros(TRASH_BYTES if args.cold else 1, np.uint8)
    times = np.array([_step(experts, token[:, None], trash) for token in choices])
    kept, usage = 1e6 * times[WARM_TOKENS:], experts.usage
    medians = {name: round(float(np.median(kept[:, i])), 1) for i, name in enumerate(CALLS)}
    row = {
        **medians,
        "together": round(float(np.median(kept.sum(axis=1))), 1),
        "least": round(float(kept.min(axis=0).sum()), 1),
        "uploads_a_token": round(usage.uploads / len(choices), 2),
        "hit_rate": round(usage.hits / max(usage.hits + usage.cpu_misses, 1), 4),
    }
    experts.close()
    return row


def experts_of(n_expert: int, n_layers: int, share: float, uploads: int) -> CachedExperts:
    """A cache over a GPU that is not there."""
    weights, specs = dict[str, Any](), list[MoeSpec]()
    router = RouterSpec(Linear("router", N_EMBD, n_expert), RouterScore.SOFTMAX, True)
    for layer in range(n_layers):
        shapes = {"gate": (N_EMBD, N_FF), "up": (N_EMBD, N_FF), "down": (N_FF, N_EMBD)}
        linears = []
        for role, (n_in, n_out) in shapes.items():
            linear = Linear(f"{layer}.{role}", n_in, n_out, n_expert=n_expert)
            row_bytes = FORMAT.row_bytes(n_in)
            data = np.zeros((n_expert, n_out, row_bytes), np.uint8)
            weights[linear.weight] = SimpleNamespace(
                format=FORMAT, data=data, row_bytes=row_bytes, address=data.ctypes.data
            )
            linears.append(linear)
        gate, up, down = linears
        specs.append(MoeSpec(n_expert, 8, N_FF, router, (gate, up), down))
    device: Any = NoDevice()
    host = HostExperts(weights, specs)
    host.pin(device)
    spec: Any = SimpleNamespace(moe_layers=tuple(enumerate(specs)), n_expert_max=n_expert)
    settings = CacheSettings(int(share * n_expert), uploads_a_step=uploads)
    experts = CachedExperts(device, spec, host, settings)
    experts.load(lambda n_bytes: None)
    return experts


def _step(
    experts: CachedExperts, choices: NDArray[np.int32], trash: NDArray[np.uint8]
) -> list[float]:
    """Seconds of each of the cache's calls; choices i32[n_layers, 1, n_used]."""
    seconds = []
    calls = (experts.before_step, experts.while_running, lambda: experts.after_step(choices))
    for call in calls:
        trash[::64] += 1
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return seconds


@numba.cfunc("i4(i8)")
def nothing(address: int) -> int:
    """Whatever the driver's function does, it has succeeded."""
    return 0


@numba.cfunc("i4(i8)")
def no_time(address: int) -> int:
    """As cuEventElapsedTime, whose first argument is the address of the milliseconds."""
    store_f32(address, 0.001)
    return 0


class NoDevice:
    """Takes every call, and has done it by then."""

    def __init__(self) -> None:
        self.driver = Driver(NoDriver(), 13000)
        self.info = SimpleNamespace(
            index=0, name="no GPU", registers_host=True, registers_read_only=True
        )

    def call(self, name: str, *args: Any, asked: int | None = None) -> Any:
        self.driver.call("cuCtxSetCurrent", 0)
        return self.driver.call(name, *args)

    def staying(self) -> AbstractContextManager[None]:
        """No thread has a context to stay in."""
        return nullcontext()

    def native(self, name: str, n_args: int, version: int = 12000) -> Callable[..., bool]:
        enter, function = (
            self.driver.native(called, n, version)
            for called, n in (("cuCtxSetCurrent", 1), (name, n_args))
        )

        def call(*args: int) -> bool:
            enter(1)
            return not function(*args)

        return call

    def track(self, resource: object) -> None:
        """Nothing is released."""

    def forget(self, resource: object) -> None:
        """As `track`."""


class NoDriver:
    """Functions of the driver, which do nothing; what they return is good enough for a cache."""

    CUevent_flags = SimpleNamespace(CU_EVENT_DEFAULT=0, CU_EVENT_DISABLE_TIMING=2)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_DEVICEMAP = 1, 2
    CU_MEMHOSTREGISTER_READ_ONLY = 8
    RETURNED: dict[str, tuple[Any, ...]] = {  # noqa: RUF012  nobody changes it
        "cuMemAlloc": (1 << 40,),
        "cuEventCreate": (1,),
        "cuStreamCreateWithPriority": (1,),
    }

    @staticmethod
    def cuMemHostGetDevicePointer(address: int, flags: int) -> tuple[int, int]:
        return 0, address

    @staticmethod
    def cuGetProcAddress(symbol: bytes, version: int, flags: int) -> tuple[int, int, int]:
        function = no_time if symbol == b"cuEventElapsedTime" else nothing
        return 0, function.address, 0

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)
        answer = (0, *self.RETURNED.get(name, ()))
        setattr(self, name, lambda *_: answer)
        return getattr(self, name)
