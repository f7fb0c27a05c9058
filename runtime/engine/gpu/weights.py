"""DeviceWeights: where all tensors but the routed experts' lie, in one allocation of the GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from runtime.cuda.device import Device
from runtime.cuda.memory import DeviceBuffer, slot_bytes
from runtime.engine.gpu.transfer import Refused, Transfer, flat, transfer_all, transfer_of
from runtime.models.model import Model
from runtime.models.spec import Linear, ModelSpec, MoeSpec

PLANNED_ADDRESS = 1 << 20
"""Of memory that is only planned: not 0, which means that a part is not there."""


def expert_linears(spec: ModelSpec) -> Iterator[Linear]:
    """Every stack of routed experts."""
    for layer in spec.layers:
        if isinstance(layer.feed_forward, MoeSpec):
            yield from layer.feed_forward.expert_linears


def multiplied(spec: ModelSpec, *, outputs: bool = True) -> Iterator[Linear]:
    """Every matrix that is multiplied, without those behind the layers if there are no outputs."""
    if outputs:
        yield from spec.linears
        return
    for layer in spec.layers:
        yield from layer.linears


def dense_matrices(
    spec: ModelSpec, *, embeds: bool = True, outputs: bool = True
) -> tuple[str, ...]:
    """Tensors that are used as they lie in the file."""
    experts = {linear.weight for linear in expert_linears(spec)}
    names = [spec.token_embedding] if embeds else []
    names += [linear.weight for linear in multiplied(spec, outputs=outputs)]
    return tuple(dict.fromkeys(name for name in names if name not in experts))


def vectors(spec: ModelSpec, *, outputs: bool = True) -> tuple[str, ...]:
    """Tensors that kernels read as f32 values: norms, biases, scales of experts."""
    names = [spec.output_norm] if outputs else []
    names += [name for layer in spec.layers for name in layer.vectors]
    for linear in multiplied(spec, outputs=outputs):
        names += [name for name in (linear.bias, linear.scale) if name is not None]
    return tuple(dict.fromkeys(names))


class DeviceWeights:
    """Addresses of the tensors named by `dense_matrices` and `vectors`, if they lie at `base`.

    embeds, outputs  the embedding table, and what comes behind the layers, are needed here
    n_bytes          that they take together
    """

    def __init__(
        self,
        model: Model,
        block_shared_bytes: int,
        *,
        embeds: bool = True,
        outputs: bool = True,
        base: int = PLANNED_ADDRESS,
    ) -> None:
        self.block_shared_bytes = block_shared_bytes
        self._base = base
        self._matrices = dense_matrices(model.spec, embeds=embeds, outputs=outputs)
        self._vectors = vectors(model.spec, outputs=outputs)
        sizes = {name: model.weights[name].n_bytes for name in self._matrices}
        for name in self._vectors:
            sizes[_vector(name)] = 4 * math.prod(model.weights[name].shape)
        self._offsets, end = {}, 0
        for name, n_bytes in sizes.items():
            self._offsets[name] = end
            end += slot_bytes(n_bytes)
        self.n_bytes = end

    def matrix(self, name: str) -> int:
        """Where the tensor lies, in the format that it has in the file."""
        return self._base + self._offsets[name]

    def vector(self, name: str | None) -> int:
        """Where the f32 values of the tensor lie; 0 for None."""
        return 0 if name is None else self._base + self._offsets[_vector(name)]


class WeightMemory(DeviceWeights):
    """The tensors of a share of the model on its GPU."""

    def __init__(
        self, device: Device, model: Model, *, embeds: bool = True, outputs: bool = True
    ) -> None:
        """Allocates; `load` fills.  Raises: OutOfDeviceMemory, CudaError."""
        super().__init__(model, device.info.block_shared_bytes, embeds=embeds, outputs=outputs)
        self._weights = model.weights
        self._buffer = DeviceBuffer(device, max(self.n_bytes, 1), "weights")
        self._base = self._buffer.address

    def load(self, moved: Callable[[int], None]) -> Refused:
        """Move everything to the GPU; `moved` gets the bytes of each piece.  See `transfer_all`.

        Raises: PinningFailed, CudaError; whatever `moved` raises.
        """
        transfers = [transfer_of(self.matrix(name), self._weights[name]) for name in self._matrices]
        for name in self._vectors:
            values = self._weights[name].to_f32().astype(np.float32)
            transfers.append(Transfer(self.vector(name), flat(values)))
        return transfer_all(self._buffer.device, transfers, moved)

    def close(self) -> None:
        self._buffer.close()


def _vector(name: str) -> str:
    return f"{name} as f32"
