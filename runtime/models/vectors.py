"""Numbers of a model that spoil every text without a trace, or with one that names no tensor.

NaN in a norm ends in logits that are not finite.  In what only chooses (a router, an indexer, what
asks an n-gram memory, and their vectors) it ends in other experts and other keys: text that looks
like the model's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.errors import CorruptModel
from runtime.models.latent_attention import LatentAttentionSpec
from runtime.models.mapped_file import are_pages_here, want_pages
from runtime.models.model import Model
from runtime.models.rope import RopeSpec
from runtime.models.spec import AttentionSpec, LayerSpec, Linear, MoeSpec
from runtime.models.weights import F32, Weight

INFINITY = {"f": 0x7C00, "u": 0x7F80}
"""The bits of 16-bit numbers by the kind of their dtype: F16, and BF16 kept as words.  NaN of
either sign is beyond."""


def check_numbers(model: Model) -> None:
    """Read the tensors of `model` that are no matrices, some megabytes, and the matrices that only
    choose: 200 MB of a large model's routers take 7 ms where they are in memory.

    Raises: CorruptModel naming the first one that has a NaN.
    """
    spec = model.spec
    names = [name for layer in spec.layers for name in layer.vectors]
    names += [linear.bias for linear in spec.linears if linear.bias and linear.n_expert is None]
    names += [linear.weight for layer in spec.layers for linear in _choosing(layer)]
    weights = [model.weights[name] for name in dict.fromkeys([*names, spec.output_norm])]
    for weight in weights:  # what is on the disk comes together, not one after the other
        if weight.mapped and not are_pages_here(weight.address, 1):
            want_pages(weight.address, weight.n_bytes)
    for weight in weights:
        if has_nan(weight):
            wrong = np.isnan(weight.to_f32().reshape(-1))
            raise CorruptModel(
                model.path,
                f"tensor '{weight.name}' is NaN at {int(wrong.argmax())} of {wrong.size}",
            )


def has_nan(weight: Weight) -> bool:
    """Whether a stored number is NaN: of blocks a scale that is a field of its own (MXFP4 and NVFP4
    have none, the one of IQ1_M lies in pieces).  Nothing is converted or copied."""
    layout = weight.format.layout
    stored: NDArray[Any] = weight.data.view(layout)
    if layout.names is None:
        return _has_nan(stored)
    return any(_has_nan(stored[name]) for name in layout.names if layout[name].kind == "f")


def _has_nan(numbers: NDArray[Any]) -> bool:
    if numbers.itemsize != 2:
        with np.errstate(invalid="ignore"):
            return bool(np.isnan(numbers.min()))
    infinity = INFINITY[numbers.dtype.kind]  # NumPy converts F16 one by one to compare it
    above, below = numbers.view(np.int16).max(), numbers.view(np.uint16).max()
    return bool(above > infinity or below > infinity | 0x8000)


def _choosing(layer: LayerSpec) -> Iterator[Linear]:
    """The matrices whose products choose, and are part of no sum."""
    mixer, feed_forward = layer.mixer, layer.feed_forward
    if isinstance(mixer, AttentionSpec | LatentAttentionSpec) and mixer.indexer is not None:
        yield from mixer.indexer.linears
    if isinstance(feed_forward, MoeSpec):
        yield feed_forward.router.linear
    if layer.memory is not None:
        yield layer.memory.key


def rope_factors(model: Model, rope: RopeSpec) -> F32 | None:
    """The divisors of the angles of `rope`, f32[n_rot / 2]; None: it has none.

    Raises: CorruptModel where one of them is not a finite number above 0.
    """
    if rope.factors is None:
        return None
    values = model.weights[rope.factors].to_f32().reshape(-1)
    wrong = ~(np.isfinite(values) & (values > 0))
    if wrong.any():
        raise CorruptModel(
            model.path,
            f"tensor '{rope.factors}' is {values[wrong][0]} at {int(wrong.argmax())}: "
            "use finite numbers above 0",
        )
    return values
