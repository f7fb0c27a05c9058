"""MachineFacts: what there is to plan with, as it is now or as somebody describes it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from runtime.cuda.device import DeviceInfo
from runtime.errors import ConfigError
from runtime.experts.host_memory import HostMemory

GIB = 1 << 30


@dataclass(frozen=True)
class GPUFacts:
    """A GPU, and the bytes of its memory that no process holds."""

    info: DeviceInfo
    free_bytes: int


@dataclass(frozen=True)
class MachineFacts:
    """ram_bytes: that a process may take; None: unknown.  n_cores: physical ones."""

    gpus: tuple[GPUFacts, ...]
    ram_bytes: int | None
    n_cores: int


@dataclass(frozen=True)
class GPUModel:
    """A row of `GPU_MODELS`.

    context_gib  what the driver keeps of the memory for itself and a process
    """

    capability: tuple[int, int]
    n_multiprocessors: int
    memory_gib: float
    l2_mib: int
    context_gib: float = 0.5


GPU_MODELS = {
    "RTX 3060": GPUModel((8, 6), 28, 12, 3),
    "RTX 3080": GPUModel((8, 6), 68, 10, 5),
    "RTX 3090": GPUModel((8, 6), 82, 24, 6),
    "RTX A6000": GPUModel((8, 6), 84, 48, 6),
    "A10": GPUModel((8, 6), 72, 24, 6),
    "A100": GPUModel((8, 0), 108, 80, 40),
    "RTX 4060 Ti": GPUModel((8, 9), 34, 16, 32),
    "RTX 4070": GPUModel((8, 9), 46, 12, 36),
    "RTX 4080": GPUModel((8, 9), 76, 16, 64),
    "RTX 4090": GPUModel((8, 9), 128, 24, 72),
    "L4": GPUModel((8, 9), 58, 24, 48),
    "L40S": GPUModel((8, 9), 142, 48, 96),
    "H100": GPUModel((9, 0), 132, 80, 50),
    "H200": GPUModel((9, 0), 132, 141, 60),
    "B200": GPUModel((10, 0), 148, 180, 126),
    "RTX 5070 Ti": GPUModel((12, 0), 70, 16, 48),
    "RTX 5080": GPUModel((12, 0), 84, 16, 64),
    "RTX 5090": GPUModel((12, 0), 170, 32, 96),
}
"""Sold GPUs as far as plans need them: for machines that are only described."""

UNKNOWN_MODEL = GPUModel((8, 6), 60, 0, 6)

BLOCK_SHARED_KIB = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}
"""Shared memory that a block may ask for."""


def described_gpus(text: str) -> list[GPUFacts]:
    """`RTX 3090`, `RTX 3090:20GiB` or `24GiB`, each with ` x2` behind it if there are two.

    Raises: ConfigError.
    """
    found = re.fullmatch(
        r"\s*(?P<name>[A-Za-z][A-Za-z0-9 ]*?)?\s*:?\s*(?P<size>[0-9.]+\s*Gi?B)?"
        r"(?:\s+x(?P<count>[0-9]{1,2}))?\s*",
        text,
    )
    if found is None or not (found["name"] or found["size"]):
        raise ConfigError(f"--gpu {text!r}: use a name, a size or both, as in 'RTX 3090:24GiB x2'")
    name = (found["name"] or "").upper().removeprefix("NVIDIA ").removeprefix("GEFORCE ")
    known = {model.upper(): model for model in GPU_MODELS}
    if name and name not in known and not found["size"]:
        raise ConfigError(
            f"--gpu {text!r}: not a known name; say how large it is, as in '{found['name']}:24GiB'"
        )
    model = GPU_MODELS[known[name]] if name in known else UNKNOWN_MODEL
    memory = gibibytes(found["size"]) if found["size"] else int(model.memory_gib * GIB)
    label = known.get(name) or found["name"] or "GPU"
    info = DeviceInfo(
        index=0,
        name=label,
        capability=model.capability,
        memory_bytes=memory,
        n_multiprocessors=model.n_multiprocessors,
        block_shared_bytes=BLOCK_SHARED_KIB[model.capability] << 10,
        l2_bytes=model.l2_mib << 20,
        n_copy_engines=2,
        registers_host=True,
        registers_read_only=True,
    )
    free = max(memory - int(model.context_gib * GIB), 0)
    return [GPUFacts(info, free)] * int(found["count"] or 1)


def numbered(gpus: list[GPUFacts]) -> tuple[GPUFacts, ...]:
    """With the indices that they have together."""
    return tuple(
        replace(gpu, info=replace(gpu.info, index=index)) for index, gpu in enumerate(gpus)
    )


def gibibytes(text: str) -> int:
    """`24`, `7.5GiB` or `64 GB` (read as GiB) in bytes.  Raises: ConfigError."""
    found = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]+)?)\s*(?:Gi?B?)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise ConfigError(f"{text!r}: use a number of GiB, as in 24GiB")
    return int(float(found[1]) * GIB)


def available_ram() -> int | None:
    """Bytes that this process may take: free ones of the machine, within its control groups.

    None: the system does not say.
    """
    reading = HostMemory().read()
    return None if reading is None else reading.available
