"""FetchedExperts: room on the GPU for experts that long prompts use and the cache does not hold.

A step of many tokens uses nearly every expert of every layer. Those that are not on the GPU cross
the link once a step, a piece of a layer at a time, ahead of the tensor cores. Pieces take turns in
a few buffers: more and smaller ones take less of the memory that decoding would rather have for its
cache, and still keep the link busy while a layer attends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ops.gpu.expert import ADDRESSES
from ops.gpu.fetch import FetchLayout
from runtime.cuda.device import Device
from runtime.cuda.memory import DeviceBuffer, slot_bytes
from runtime.experts.host_experts import LayerExperts

BUFFERS = 4
PIECES = 8
"""Of a layer of the average size; larger ones have more."""
LEAST_PIECE_BYTES = 32 << 20
"""Of layers that have so much: it takes a link about half a millisecond."""
ROW_BYTES = 8 * ADDRESSES
FETCHED_TOKENS = 128
"""Steps of classes from this one on fetch experts; the CPU computes what smaller ones miss.

With 8 layers of Qwen3-30B-A3B in host memory (an H200, 51 GB/s of link, 16 cores) steps of 31, 64
and 128 tokens took 28, 41 and 68 ms by the CPU, and 62 ms of up to 512 tokens were the link's.
"""


@dataclass(frozen=True)
class Piece:
    """Experts `first` to `first + n` of a layer, counted among those with experts; `number` among
    the pieces of all layers."""

    number: int
    layer: int
    first: int
    n: int


def pieces_of(layers: Sequence[LayerExperts]) -> list[Piece]:
    """The pieces of all layers, in the order in which they are needed."""
    room, pieces = _room(layers), list[Piece]()
    for index, layer in enumerate(layers):
        n_pieces = -(-layer.n_expert // min(room // _layout(layer).pitch, layer.n_expert))
        each = -(-layer.n_expert // n_pieces)
        for first in range(0, layer.n_expert, each):
            n = min(each, layer.n_expert - first)
            pieces.append(Piece(len(pieces), index, first, n))
    return pieces


def fetch_bytes(layers: Sequence[LayerExperts]) -> int:
    """What `FetchedExperts` allocates."""
    return BUFFERS * (_table_bytes(layers) + _room(layers)) if layers else 0


class FetchedExperts:
    """layers: the MoE layers' experts, which outlive this; all are pinned when a step fetches.

    ahead  pieces that may be on their way while one is multiplied
    """

    ahead = BUFFERS - 1

    def __init__(self, device: Device, layers: Sequence[LayerExperts]) -> None:
        """Raises: OutOfDeviceMemory, CudaError."""
        self._layers, self.pieces = layers, pieces_of(layers)
        self._table_bytes = _table_bytes(layers)
        self.n_bytes = fetch_bytes(layers)
        self._stride = self.n_bytes // BUFFERS
        self._buffer = DeviceBuffer(device, self.n_bytes, "fetched experts")

    def of_layer(self, layer: int) -> list[Piece]:
        """The pieces of a layer."""
        return [piece for piece in self.pieces if piece.layer == layer]

    def buffer(self, piece: Piece) -> int:
        """The number of the buffer that the piece goes to, and `BUFFERS` pieces later another."""
        return piece.number % BUFFERS

    def table(self, piece: Piece) -> int:
        """Address of u64[n, 4], where the piece's experts are once it was fetched."""
        return self._buffer.address + self.buffer(piece) * self._stride

    def arguments(self, piece: Piece, table: int) -> dict[str, int]:
        """Those of `fetch_experts` for the piece; table: the model's, of the piece's layer."""
        experts = self._layers[piece.layer]
        layout = _layout(experts)
        arguments = {
            "table": table + ROW_BYTES * piece.first,
            "n_expert": piece.n,
            "buffer": self.table(piece) + self._table_bytes,
            "place_1": layout.places[1],
            "place_2": layout.places[2],
            "pitch": layout.pitch,
            "fetched": self.table(piece),
        }
        for i, matrix in enumerate(experts.matrices):
            arguments |= {
                f"host_{i}": matrix.host + piece.first * matrix.stride,
                f"stride_{i}": matrix.stride,
                f"bytes_{i}": matrix.n_bytes,
            }
        return arguments

    def close(self) -> None:
        """No step that fetches is in flight.  Raises: CudaError."""
        self._buffer.close()


def _layout(layer: LayerExperts) -> FetchLayout:
    return FetchLayout.of([matrix.n_bytes for matrix in layer.matrices])


def _room(layers: Sequence[LayerExperts]) -> int:
    """Bytes of experts that a buffer has room for: of one expert of any layer at least."""
    sizes = [layer.n_expert * _layout(layer).pitch for layer in layers]
    usual = max(sum(sizes) // len(sizes) // PIECES, min(LEAST_PIECE_BYTES, max(sizes)))
    return slot_bytes(max(usual, *(_layout(layer).pitch for layer in layers)))


def _table_bytes(layers: Sequence[LayerExperts]) -> int:
    return slot_bytes(ROW_BYTES * max(piece.n for piece in pieces_of(layers)))
