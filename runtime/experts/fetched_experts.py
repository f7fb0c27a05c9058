"""FetchedExperts: room on the GPU for experts that long prompts use and the cache does not hold.

A step of many tokens uses nearly every expert of every layer. Those that are not on the GPU cross
the link once a step, a layer ahead of the tensor cores: two buffers, each for all of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence

from ops.gpu.expert import ADDRESSES
from ops.gpu.fetch import FetchLayout
from runtime.cuda.device import Device
from runtime.cuda.memory import DeviceBuffer, slot_bytes
from runtime.experts.host_experts import LayerExperts

BUFFERS = 2
FETCHED_TOKENS = 128
"""Steps of classes from this one on fetch experts; the CPU computes what smaller ones miss.

With 8 layers of Qwen3-30B-A3B in host memory (an H200, 51 GB/s of link, 16 cores) steps of 31, 64
and 128 tokens took 28, 41 and 68 ms by the CPU, and 62 ms of up to 512 tokens were the link's.
"""


def fetch_bytes(layers: Sequence[LayerExperts]) -> int:
    """What `FetchedExperts` allocates."""
    buffers = max((_buffer_bytes(layer) for layer in layers), default=0)
    return BUFFERS * (buffers + max((_table_bytes(layer) for layer in layers), default=0))


class FetchedExperts:
    """layers: the MoE layers' experts, which outlive this; all are pinned when a step fetches."""

    def __init__(self, device: Device, layers: Sequence[LayerExperts]) -> None:
        """Raises: OutOfDeviceMemory, CudaError."""
        self._layers = layers
        self._table_bytes = max(_table_bytes(layer) for layer in layers)
        self._stride = fetch_bytes(layers) // BUFFERS
        self.n_bytes = fetch_bytes(layers)
        self._buffer = DeviceBuffer(device, self.n_bytes, "fetched experts")

    def __len__(self) -> int:
        """Layers."""
        return len(self._layers)

    def table(self, layer: int) -> int:
        """Address of u64[n_expert, 4], where the experts of the layer are once it was fetched."""
        return self._buffer.address + layer % BUFFERS * self._stride

    def arguments(self, layer: int) -> dict[str, int]:
        """Those of `fetch_experts` for the layer; `table`, the model's, is missing."""
        experts = self._layers[layer]
        layout = _layout(experts)
        arguments = {
            "n_expert": experts.n_expert,
            "buffer": self.table(layer) + self._table_bytes,
            "place_1": layout.places[1],
            "place_2": layout.places[2],
            "pitch": layout.pitch,
            "fetched": self.table(layer),
        }
        for i, matrix in enumerate(experts.matrices):
            arguments |= {
                f"host_{i}": matrix.host,
                f"stride_{i}": matrix.stride,
                f"bytes_{i}": matrix.n_bytes,
            }
        return arguments

    def close(self) -> None:
        """No step that fetches is in flight.  Raises: CudaError."""
        self._buffer.close()


def _layout(layer: LayerExperts) -> FetchLayout:
    return FetchLayout.of([matrix.n_bytes for matrix in layer.matrices])


def _buffer_bytes(layer: LayerExperts) -> int:
    return slot_bytes(layer.n_expert * _layout(layer).pitch)


def _table_bytes(layer: LayerExperts) -> int:
    return slot_bytes(8 * ADDRESSES * layer.n_expert)
