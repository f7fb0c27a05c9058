"""Vectors of a model that spoil every text without a trace, or with one that names no tensor.

NaN in a norm ends in logits that are not finite.  In what only chooses (the router's bias, an
indexer's norms, the gate of an n-gram memory) it ends in other experts and other keys: text that
looks like the model's.
"""

from __future__ import annotations

import numpy as np

from runtime.errors import CorruptModel
from runtime.models.model import Model
from runtime.models.rope import RopeSpec
from runtime.models.weights import F32


def check_vectors(model: Model) -> None:
    """Read the tensors of `model` that are no matrices: 64 layers have some megabytes of them.

    Raises: CorruptModel naming the first one that has a NaN.
    """
    spec = model.spec
    names = [name for layer in spec.layers for name in layer.vectors]
    names += [linear.bias for linear in spec.linears if linear.bias and linear.n_expert is None]
    for name in dict.fromkeys([*names, spec.output_norm]):
        values = model.weights[name].to_f32().reshape(-1)
        wrong = np.isnan(values)
        if wrong.any():
            raise CorruptModel(
                model.path, f"tensor '{name}' is NaN at {int(wrong.argmax())} of {values.size}"
            )


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
