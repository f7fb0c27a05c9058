"""Which compiled kernels a model needs on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ops.cpu.attention import attention, attention_end
from ops.cpu.convolution import convolution
from ops.cpu.delta_net import delta_net
from ops.cpu.experts import down, gate_up
from ops.cpu.gated_heads import gate_heads, split_gates
from ops.cpu.general_attention import general_attention
from ops.cpu.heads import heads
from ops.cpu.indexer import index_keys, select_blocks
from ops.cpu.job import JobKernel
from ops.cpu.latent import head_products, latent_heads
from ops.cpu.linear import products
from ops.cpu.matmul import matmul_address
from ops.cpu.ngram_memory import gate_memory
from ops.cpu.norm import norm, quantize
from ops.cpu.router import group, route
from ops.cpu.step_inputs import fill_function
from ops.cpu.streams import (
    enter_streams,
    gated_input,
    gated_low,
    sinkhorn_input,
    spread_streams,
)
from runtime.models.delta_net import DeltaNetSpec
from runtime.models.latent_attention import LatentAttentionSpec
from runtime.models.model import Model
from runtime.models.spec import AttentionSpec, LayerSpec
from runtime.models.streams import GatedStreams, MeanStreams, SinkhornStreams

EVERY_MODEL: tuple[JobKernel, ...] = (
    norm, quantize, products, heads, attention, attention_end, route, group, gate_up, down,
)  # fmt: skip
STREAM_KERNELS: dict[type, tuple[JobKernel, ...]] = {
    GatedStreams: (gated_low, gated_input),
    SinkhornStreams: (sinkhorn_input,),
    MeanStreams: (),
}
Progress = Callable[[int, int], None]


def compile_kernels(model: Model, progress: Progress | None = None) -> None:
    """Compile, or load from the cache, every kernel that `model` needs."""
    kernels = dict.fromkeys(EVERY_MODEL)
    for layer in model.spec.layers:
        kernels |= dict.fromkeys(_layer_kernels(layer))
    steps: list[Callable[[], object]] = [kernel.compile for kernel in kernels]
    steps += [partial(matmul_address, name) for name in sorted(_product_formats(model))]
    steps.append(fill_function)
    for n_ready, step in enumerate(steps):
        if progress is not None:
            progress(n_ready, len(steps))
        step()
    if progress is not None:
        progress(len(steps), len(steps))


def _layer_kernels(layer: LayerSpec) -> tuple[JobKernel, ...]:
    """Those beside the ones of every model."""
    mixer = layer.mixer
    kernels: tuple[JobKernel, ...] = ()
    if layer.memory is not None:
        kernels += (gate_memory, convolution)
    if layer.mixer_streams is not None:
        kernels += (spread_streams, enter_streams, *STREAM_KERNELS[type(layer.mixer_streams)])
    if isinstance(mixer, DeltaNetSpec):
        return (*kernels, convolution, delta_net)
    if isinstance(mixer, LatentAttentionSpec):
        kernels += (latent_heads, head_products, general_attention)
    elif mixer.gated:
        kernels += (split_gates, gate_heads)
    if isinstance(mixer, AttentionSpec) and mixer.window is not None:
        kernels += (general_attention,)
    if mixer.indexer is not None:
        kernels += (index_keys, select_blocks, general_attention)
    return kernels


def _product_formats(model: Model) -> set[str]:
    """Names of the formats of all matrices that are multiplied."""
    return {model.weights[linear.weight].format.name for linear in model.spec.linears}
