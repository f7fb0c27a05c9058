"""Which compiled kernels a model needs on the CPU."""

from __future__ import annotations

from ops.cpu.attention import attention, attention_end
from ops.cpu.compiling import Preparation, Progress, name_of, product_name
from ops.cpu.convolution import convolution
from ops.cpu.delta_net import delta_net
from ops.cpu.experts import down, gate_up
from ops.cpu.gated_heads import gate_heads, split_gates
from ops.cpu.general_attention import general_attention
from ops.cpu.heads import heads
from ops.cpu.indexer import index_keys, index_queries, score_blocks, select_blocks
from ops.cpu.job import JobKernel
from ops.cpu.latent import head_products, latent_heads
from ops.cpu.linear import products
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
from runtime.models.spec import AttentionSpec, LayerSpec, MoeSpec
from runtime.models.streams import GatedStreams, MeanStreams, SinkhornStreams

EVERY_MODEL: tuple[JobKernel, ...] = (norm, quantize, products, gate_up, down)
STREAM_KERNELS: dict[type, tuple[JobKernel, ...]] = {
    GatedStreams: (gated_low, gated_input),
    SinkhornStreams: (sinkhorn_input,),
    MeanStreams: (),
}


def kernels_of(model: Model) -> list[JobKernel]:
    """Of the jobs of its programs."""
    kernels = dict.fromkeys(EVERY_MODEL)
    for layer in model.spec.layers:
        kernels |= dict.fromkeys(_layer_kernels(layer))
    return list(kernels)


def compile_kernels(model: Model, progress: Progress | None = None) -> None:
    """Compile, or load from the cache, every kernel that `model` needs, and no other."""
    names = [name_of(kernel) for kernel in kernels_of(model)]
    names += [product_name(fmt) for fmt in sorted(_product_formats(model))]
    preparation = Preparation([*names, name_of(fill_function)])
    try:
        preparation.wait(progress)
    finally:
        preparation.close()


def _layer_kernels(layer: LayerSpec) -> tuple[JobKernel, ...]:
    """Those beside the ones of every model."""
    mixer = layer.mixer
    kernels: tuple[JobKernel, ...] = ()
    if layer.memory is not None:
        kernels += (gate_memory, convolution)
    if layer.mixer_streams is not None:
        kernels += (spread_streams, enter_streams, *STREAM_KERNELS[type(layer.mixer_streams)])
    if isinstance(layer.feed_forward, MoeSpec):
        kernels += (route, group)
    if isinstance(mixer, DeltaNetSpec):
        return (*kernels, convolution, delta_net)
    if isinstance(mixer, LatentAttentionSpec):
        kernels += (latent_heads, head_products)
    else:
        kernels += (heads, *((split_gates, gate_heads) if mixer.gated else ()))
    window = mixer.window if isinstance(mixer, AttentionSpec) else None
    is_plain = isinstance(mixer, AttentionSpec) and window is None and mixer.indexer is None
    kernels += (attention if is_plain else general_attention, attention_end)
    if mixer.indexer is not None:
        kernels += (index_keys, index_queries, score_blocks, select_blocks)
    return kernels


def _product_formats(model: Model) -> set[str]:
    """Names of the formats of all matrices that are multiplied."""
    return {model.weights[linear.weight].format.name for linear in model.spec.linears}
