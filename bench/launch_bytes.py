"""How many bytes of weights, keys or states a launch of a step has to read at least."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from ops.gpu.kv_layout import PAGE_TOKENS
from ops.gpu.linear import SEGMENT
from ops.gpu.streams import N_MIX, N_STREAM
from ops.quants import FORMATS, BlockFormat
from runtime.cuda.stream import Stream
from runtime.engine.gpu.launch_plan import PlannedLaunch
from runtime.engine.gpu.step_shape import StepShape

Read = Callable[[int, int], bytes]
F32_BYTES = 4
MOST_USED = 10
"""Experts of a token at most, in the models that are measured."""


def reader(stream: Stream) -> Read:
    """Reads the GPU's memory: address, bytes."""

    def read(address: int, n_bytes: int) -> bytes:
        out = np.empty(n_bytes, np.uint8)
        stream.download(out.ctypes.data, address, n_bytes)
        stream.synchronize()
        return out.tobytes()

    return read


def launch_bytes(launch: PlannedLaunch, shape: StepShape, position: int, read: Read) -> int:
    """Of one launch of a step whose tokens are at `position` or before it; 0: not known, or few."""
    entry = launch.kernel.entry
    fmt = _format_name(entry)
    count = COUNTS.get(entry.removesuffix(f"_{fmt.lower()}"))
    return 0 if count is None else count(launch, launch.arguments, shape, position, read)


def _linear(
    launch: PlannedLaunch, a: Mapping[str, float], shape: StepShape, position: int, read: Read
) -> int:
    """The matrices once: what further tokens read again comes from the cache."""
    raw = read(int(a["segments"]), int(a["n_segments"]) * SEGMENT.itemsize)
    rows = int(np.frombuffer(raw, SEGMENT)["n_rows"].sum())
    return rows * _format(launch).row_bytes(int(a["n"]))


def _router(
    launch: PlannedLaunch, a: Mapping[str, float], shape: StepShape, position: int, read: Read
) -> int:
    n_rows = int(a["n_expert"]) + int(a["n_ahead"]) + int(a["gate"] > 0)
    return n_rows * _format(launch).row_bytes(int(a["n"]))


def _gemm(
    launch: PlannedLaunch, a: Mapping[str, float], shape: StepShape, position: int, read: Read
) -> int:
    """Of grouped products every group, or one a slot where these are fewer."""
    n_groups = int(a.get("n_groups", 0)) or 1
    if ".experts." in launch.name or launch.name.startswith("experts."):
        n_groups = min(n_groups, shape.n_tokens * MOST_USED)
    return n_groups * int(a["n_rows"]) * _format(launch).row_bytes(int(a["n"]))


def _expert(
    launch: PlannedLaunch, a: Mapping[str, float], shape: StepShape, position: int, read: Read
) -> int:
    n_matrices = 2 if "gate_up" in launch.kernel.entry else 1
    n_slots = int(launch.grid[1])
    return n_slots * n_matrices * int(a["n_rows"]) * _format(launch).row_bytes(int(a["n"]))


def _attention(
    launch: PlannedLaunch, a: Mapping[str, float], shape: StepShape, position: int, read: Read
) -> int:
    """Keys and values of every sequence; those beside the window are not read."""
    window = int(a["window"])
    n_keys = min(position + 1, window) if window else position + 1
    page_bytes = int(a["k_page_bytes"])
    if a["v_pages"] != a["k_pages"]:  # latent attention: values are a part of the keys
        page_bytes += int(a["v_page_bytes"])
    return shape.n_sequences * n_keys * page_bytes // PAGE_TOKENS


def _delta_net(
    launch: PlannedLaunch, a: Mapping[str, float], shape: StepShape, position: int, read: Read
) -> int:
    """States, read and written."""
    n_state = int(a["n_value_head"]) * int(a["dim"]) ** 2
    return 2 * F32_BYTES * n_state * shape.n_sequences


def _dense(
    launch: PlannedLaunch, a: Mapping[str, float], shape: StepShape, position: int, read: Read
) -> int:
    """One matrix, or that of the gates and that of the decays."""
    n_matrices = 2 if "decay_matrix" in a else 1
    return n_matrices * int(a["n_rows"]) * _format(launch).row_bytes(int(a["n"]))


def _mix(
    launch: PlannedLaunch, a: Mapping[str, float], shape: StepShape, position: int, read: Read
) -> int:
    return F32_BYTES * N_MIX * N_STREAM * int(a["n"])


COUNTS = {
    "linear": _linear,
    "choose_experts": _router,
    "gemm": _gemm,
    "expert_gate_up": _expert,
    "expert_down": _expert,
    "attention": _attention,
    "delta_net": _delta_net,
    "delta_gates": _dense,
    "dense_down": _dense,
    "mix_streams": _mix,
}
"""By entry, without the format."""


def _format(launch: PlannedLaunch) -> BlockFormat:
    return FORMATS[_format_name(launch.kernel.entry)]


def _format_name(entry: str) -> str:
    """The format that an entry's name ends with, the longest; or nothing."""
    names = [name for name in FORMATS if entry.endswith(f"_{name.lower()}")]
    return max(names, key=len, default="")
