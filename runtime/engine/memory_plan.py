"""MemoryPlan: all that an engine allocates and what was chosen, each with its reason in words.

`hotexpert plan` prints it without loading anything, the server at its start, `/props` in short.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from runtime.config import BUNDLED_MODEL, ContextShape, EngineConfig
from runtime.engine.machine import GIB, MachineFacts

if TYPE_CHECKING:
    from runtime.engine.gpu.gpu_plan import GPUPlan
    from runtime.models.model import Model

ASKED_FOR = "asked for"


@dataclass(frozen=True)
class Choice:
    """A setting, what it is, and why."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True)
class MemoryPart:
    """Bytes of a memory, and what they are for."""

    name: str
    n_bytes: int
    what: str = ""


@dataclass(frozen=True)
class GPUMemoryPlan:
    """What a GPU will hold.

    layers        the first and the last one that it computes
    usable_bytes  of its memory; spare_bytes of them are left
    """

    index: int
    name: str
    layers: tuple[int, int]
    usable_bytes: int
    parts: tuple[MemoryPart, ...]

    @property
    def spare_bytes(self) -> int:
        return self.usable_bytes - sum(part.n_bytes for part in self.parts)


@dataclass(frozen=True)
class MemoryPlan:
    """device: cuda or cpu, with its reason among `choices`.

    host       what is taken of the machine's memory, the mapped model first
    ram_bytes  that may be taken; None: unknown
    """

    model: str
    device: str
    choices: tuple[Choice, ...]
    gpus: tuple[GPUMemoryPlan, ...]
    host: tuple[MemoryPart, ...]
    ram_bytes: int | None

    def lines(self) -> Iterator[str]:
        """One screen."""
        yield f"plan for {self.model}"
        for choice in self.choices:
            yield f"  {choice.name:15} {choice.value:26} {choice.reason}".rstrip()
        for gpu in self.gpus:
            layers = f"layers {gpu.layers[0]} to {gpu.layers[1]}"
            yield f"  GPU {gpu.index}: {gpu.name}, {layers}, {size(gpu.usable_bytes)} to use"
            yield from _part_lines(gpu.parts)
            yield f"    {size(gpu.spare_bytes):>11}  left"
        ram = "unknown" if self.ram_bytes is None else f"{size(self.ram_bytes)} to use"
        yield f"  RAM: {ram}"
        yield from _part_lines(self.host)
        missing = 0 if self.ram_bytes is None else self.host_bytes - self.ram_bytes
        if missing > self.host[0].n_bytes:
            missing -= self.host[0].n_bytes
            yield f"    {size(missing):>11}  do not fit without the model: will not start"
        elif missing > 0:
            yield f"    {size(missing):>11}  do not fit: read from the disk again and again"

    @property
    def host_bytes(self) -> int:
        return sum(part.n_bytes for part in self.host)

    def as_json(self) -> dict[str, object]:
        """All of it."""
        plan = asdict(self)
        for gpu, described in zip(self.gpus, plan["gpus"], strict=True):
            described["spare_bytes"] = gpu.spare_bytes
        return plan

    def describe(self) -> dict[str, object]:
        """For /props: the choices, and a line for each memory."""
        memory = {
            f"GPU {gpu.index}": _short(gpu.parts) + f"; {size(gpu.spare_bytes)} left"
            for gpu in self.gpus
        }
        memory["RAM"] = _short(self.host)
        choices = {c.name: f"{c.value} ({c.reason})" if c.reason else c.value for c in self.choices}
        return {**choices, "memory": memory}


def gpu_memory_plan(
    model: Model, config: EngineConfig, shape: ContextShape, plan: GPUPlan, machine: MachineFacts
) -> MemoryPlan:
    """Of a model on GPUs, as planned."""
    gpus = []
    for share, experts in zip(plan.shares, plan.experts, strict=True):
        first = share.share.first_layer
        parts = [
            MemoryPart("weights", share.weights.n_bytes, "all but the routed experts"),
            MemoryPart("keys and values", share.pages.n_bytes, f"{shape.n_ctx} tokens"),
            MemoryPart("states", share.state_bytes, f"{plan.limits.n_state_slots} sequences'"),
            MemoryPart("activations", share.activation_bytes, "of the largest step"),
            MemoryPart("hand-over", share.link_bytes, "from the GPU before"),
            MemoryPart("experts", experts.n_bytes, _held(experts.slots)),
            MemoryPart("fetched experts", experts.fetch_bytes, "of pieces of layers, for prompts"),
            MemoryPart("reserve", plan.settings.reserve_bytes, "graphs, kernels, the driver"),
        ]
        gpus.append(
            GPUMemoryPlan(
                share.gpu.info.index,
                share.gpu.info.name,
                (first, first + len(share.share.model.spec.layers) - 1),
                share.usable_bytes,
                tuple(part for part in parts if part.n_bytes),
            )
        )
    names = ", ".join(str(gpu.index) for gpu in gpus)
    choices = [
        Choice("device", "cuda", _why(config.device != "auto", "its kernels compute this model")),
        Choice("GPUs", names, plan.reason),
        *_context_choices(config, shape, on_gpu=True),
        _chunk_choice(config, plan.limits.max_step_tokens),
        _thread_choice(config, machine, 0 if plan.whole else len(gpus), whole=plan.whole),
        *_expert_choices(plan),
        *_policy_choices(config, plan),
    ]
    pinned = sum(
        share.expert_bytes
        for share, experts in zip(plan.shares, plan.experts, strict=True)
        if experts.moves
    )
    host = [MemoryPart("model", model.file.n_bytes, "mapped; pages that nobody reads can leave")]
    if pinned:
        pins = config.load_mode == "pin"
        what = (
            "of the model in the background, as far as memory allows"
            if pins
            else "--load-mode mmap"
        )
        choices.append(Choice("pinned", size(pinned) if pins else "nothing", what))
    return MemoryPlan(
        model_name(config), "cuda", tuple(choices), tuple(gpus), tuple(host), machine.ram_bytes
    )


def cpu_memory_plan(
    model: Model,
    config: EngineConfig,
    shape: ContextShape,
    machine: MachineFacts,
    reason: str,
    activation_bytes: int | None = None,
) -> MemoryPlan:
    """Of a model on the CPU; reason: why there; activation_bytes: where an executor knows them."""
    from ops.cpu.kv_layout import PAGE_TOKENS
    from runtime.engine.cpu_executor import cpu_limits, planned_activation_bytes
    from runtime.engine.kv_pages import kv_page_bytes
    from runtime.engine.proposals import CPU_BATCH
    from runtime.engine.state_slots import n_state_slots

    spec = model.spec
    page_bytes = kv_page_bytes(spec, config.cache_type_k, config.cache_type_v)
    snapshots = config.n_snapshots
    n_slots = n_state_slots(
        spec.state_bytes,
        shape.n_parallel,
        None if snapshots is None else snapshots * shape.n_parallel,
        machine.ram_bytes,
    )
    n_tokens = max(config.n_batch or CPU_BATCH, shape.n_parallel)
    if activation_bytes is None:
        n_ctx = shape.n_pages(PAGE_TOKENS) * PAGE_TOKENS
        limits = cpu_limits(spec, n_ctx, shape.n_parallel, n_tokens, n_slots)
        n_workers = config.n_threads or machine.n_cores
        types = config.cache_type_k, config.cache_type_v
        activation_bytes = planned_activation_bytes(model, limits, n_workers, types)
    host = (
        MemoryPart("model", model.file.n_bytes, "mapped; pages that nobody reads can leave"),
        MemoryPart(
            "keys and values", shape.n_pages(PAGE_TOKENS) * page_bytes, f"{shape.n_ctx} tokens"
        ),
        MemoryPart("states", n_slots * spec.state_bytes, f"{n_slots} sequences'"),
        MemoryPart("activations", activation_bytes, "of the largest step; norms, rope's tables"),
    )
    choices = (
        Choice("device", "cpu", reason),
        *_context_choices(config, shape, on_gpu=False),
        _chunk_choice(config, n_tokens),
        _thread_choice(config, machine, 0),
    )
    held = tuple(part for part in host if part.n_bytes)
    return MemoryPlan(model_name(config), "cpu", choices, (), held, machine.ram_bytes)


def model_name(config: EngineConfig) -> str:
    """The file's name."""
    path = config.model_path
    return f"{path.name} (the bundled demonstration)" if path == BUNDLED_MODEL else path.name


def size(n_bytes: int) -> str:
    """`n_bytes` in GiB or MiB."""
    if abs(n_bytes) >= GIB:
        return f"{n_bytes / GIB:.2f} GiB"
    return f"{n_bytes / 2**20:.1f} MiB"


def _context_choices(config: EngineConfig, shape: ContextShape, *, on_gpu: bool) -> list[Choice]:
    if config.n_ctx:
        reason = ASKED_FOR
    elif on_gpu:
        reason = "as the model was trained, or as long as it is cheap"
    else:
        reason = "as the model was trained, at most 8192 a sequence"
    sequences = f"{shape.n_parallel} at once"
    shared = "they share the context" if config.n_parallel is None else ASKED_FOR
    types = dict.fromkeys((config.cache_type_k, config.cache_type_v))
    is_default = list(types) == ["f16"]
    return [
        Choice("context", f"{shape.n_ctx} tokens", reason),
        Choice("sequences", sequences, shared),
        Choice("KV type", ", ".join(types), "q8_0 takes half" if is_default else ASKED_FOR),
    ]


def _chunk_choice(config: EngineConfig, n_tokens: int) -> Choice:
    reason = "weights are read, and missing experts fetched, once a chunk"
    return Choice("prompt chunk", f"{n_tokens} tokens", _why(config.n_batch is not None, reason))


def _thread_choice(
    config: EngineConfig, machine: MachineFacts, n_gpus: int, *, whole: bool = False
) -> Choice:
    if whole:
        return Choice("CPU workers", "none", "all weights are on a GPU")
    if config.n_threads is not None:
        return Choice("CPU workers", str(config.n_threads), ASKED_FOR)
    if not n_gpus:
        return Choice("CPU workers", str(machine.n_cores), "one a core")
    n = max(machine.n_cores - n_gpus, 1)
    reason = "for experts that no GPU holds: one a core, but one core for each GPU's launches"
    return Choice("CPU workers", str(n), reason)


def _expert_choices(plan: GPUPlan) -> Iterator[Choice]:
    for share, experts in zip(plan.shares, plan.experts, strict=True):
        if not experts.slots:
            continue
        name = "experts" if len(plan.shares) == 1 else f"experts, GPU {share.gpu.info.index}"
        yield Choice(name, f"{experts.holding}: {_held(experts.slots)}", experts.reason)


def _policy_choices(config: EngineConfig, plan: GPUPlan) -> Iterator[Choice]:
    from runtime.config import environment
    from runtime.engine.gpu.expert_plan import Holding
    from runtime.experts.policies import DEFAULT_POLICY

    if any(experts.holding is Holding.CACHE for experts in plan.experts):
        given = dict(config.moe_cache).get("policy") or environment("LLAMA_MOE_CACHE_POLICY")
        yield Choice("policy", given or DEFAULT_POLICY, ASKED_FOR if given else "docs/routing.md")
    if any(experts.holding is not Holding.ALL for experts in plan.experts):
        given = dict(config.moe_cache).get("misses") or environment("LLAMA_MOE_CACHE_MISSES")
        reason = (
            ASKED_FOR if given else "measured at the start: by the CPU, unless the link's help pays"
        )
        yield Choice("misses", given or "auto", reason)


def _held(slots: Sequence[int]) -> str:
    """How many experts that is."""
    each = sorted(set(slots))
    if not any(slots):
        return "none"
    if len(each) == 1:
        return f"{each[0]} a layer"
    return f"{sum(slots)} in {sum(n > 0 for n in slots)} layers"


def _why(is_given: bool, reason: str) -> str:
    return ASKED_FOR if is_given else reason


def _part_lines(parts: Sequence[MemoryPart]) -> Iterator[str]:
    for part in parts:
        yield f"    {size(part.n_bytes):>11}  {part.name:16} {part.what}".rstrip()


def _short(parts: Sequence[MemoryPart]) -> str:
    return ", ".join(f"{part.name} {size(part.n_bytes)}" for part in parts)
