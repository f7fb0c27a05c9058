"""Planning an engine without opening it: for this machine, or for one that somebody describes."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from runtime.config import EngineConfig, context_shape
from runtime.engine.machine import GPUFacts, MachineFacts, available_ram
from runtime.engine.memory_plan import ASKED_FOR, MemoryPlan, cpu_memory_plan, gpu_memory_plan
from runtime.engine.proposals import gpu_proposals
from runtime.errors import DeviceError, DeviceUnavailable

if TYPE_CHECKING:
    from runtime.models.model import Model


def plan_engine(model: Model, config: EngineConfig, machine: MachineFacts) -> MemoryPlan:
    """What opening `model` as `config` says would take and choose on the machine.

    Raises: ConfigError; DeviceError where `config` names a device that cannot compute it.
    """
    n_ctx_train = model.spec.n_ctx_train
    reason = ASKED_FOR
    if config.device in ("auto", "cuda"):
        try:
            return _on_gpus(model, config, machine, n_ctx_train)
        except DeviceError as error:
            if config.device == "cuda":
                raise
            reason = str(error)
    shape = context_shape(config, n_ctx_train)
    return cpu_memory_plan(model, config, shape, machine, reason)


def _on_gpus(
    model: Model, config: EngineConfig, machine: MachineFacts, n_ctx_train: int
) -> MemoryPlan:
    from runtime.engine.gpu.devices import described_gpus
    from runtime.engine.gpu.gpu_plan import plan_gpus
    from runtime.engine.gpu.share import parts_of
    from runtime.engine.gpu.support import obstacles
    from runtime.experts.usage import lifetime_usage

    lacking = obstacles(model)
    if lacking:
        raise DeviceUnavailable(f"the GPU's kernels lack: {', '.join(lacking)}")
    proposals = gpu_proposals(config, n_ctx_train)
    settings = [proposal.settings for proposal in proposals]
    gpus = described_gpus(machine.gpus, settings[0], len(parts_of(model.spec)))
    known = lifetime_usage(model).for_plan if model.spec.n_expert_max else None
    planned = plan_gpus(model, settings, gpus, known)
    shape = proposals[settings.index(planned.settings)].shape
    return gpu_memory_plan(model, config, shape, planned, machine)


def machine_here(*, with_gpus: bool = True) -> MachineFacts:
    """This machine, with what its GPUs have free now; without those that cannot be used."""
    from ops.cpu.cores import default_threads

    gpus = tuple(_gpus_here()) if with_gpus else ()
    return MachineFacts(gpus, available_ram(), default_threads())


def _gpus_here() -> list[GPUFacts]:
    from runtime.cuda.driver import open_driver

    try:
        driver = open_driver()
        from runtime.cuda.device import Device

        found: list[GPUFacts] = []
        for index in range(int(driver.call("cuDeviceGetCount"))):
            with ExitStack() as resources:
                try:
                    device = resources.enter_context(Device(driver, index))
                except DeviceError:
                    continue
                found.append(GPUFacts(device.info, device.free_bytes()))
    except DeviceUnavailable:
        return []
    return found
