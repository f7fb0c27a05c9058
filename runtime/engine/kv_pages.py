"""KVPages: the memory of all layers' attention keys and values, cut into pages of 32 tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ops.cpu.kv_layout import PAGE_TOKENS, PageLayout
from ops.cpu.program import address_of, aligned
from runtime.errors import ConfigError
from runtime.models.kv_shape import KVShape
from runtime.models.spec import ModelSpec

U8 = NDArray[np.uint8]


class LayerPages:
    """One layer's pages: u8[n_pages, n_head, head_bytes] of keys, and of values.

    Where the values are the keys' first numbers there are keys alone, laid out as values are.
    index: f32 keys of blocks, where the layer chooses among blocks.

    Raises: ValueError for a cache type that does not fit the layer's heads.
    """

    def __init__(self, shape: KVShape, key_type: str, value_type: str) -> None:
        self._shape = shape
        self._keys = PageLayout(key_type, shape.dim_k)
        self._values = PageLayout(value_type, shape.dim_v) if shape.dim_v else self._keys
        self.memories: list[U8] = []
        self.index = aligned((0, 0), np.uint8)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        stored = sum(self._shape.n_head * layout.head_bytes for layout in self._stored)
        return stored + self._index_bytes

    @property
    def _index_bytes(self) -> int:
        return 4 * PAGE_TOKENS * self._shape.n_index

    @property
    def _stored(self) -> tuple[PageLayout, ...]:
        return (self._keys, self._values) if self._shape.dim_v else (self._keys,)

    def allocate(self, n_pages: int) -> None:
        """Take the memory."""
        self.memories = [
            aligned((n_pages, self._shape.n_head, layout.head_bytes), np.uint8)
            for layout in self._stored
        ]
        self.index = aligned((n_pages, self._index_bytes), np.uint8)

    def fields(self) -> dict[str, int]:
        """The cache fields that the attention jobs of the layer share."""
        fields = {"dim_v_padded": self._values.padded_dim}
        for side, memory, layout in (
            ("k", self.memories[0], self._keys),
            ("v", self.memories[-1], self._values),
        ):
            fields[f"{side}_cache"] = layout.code
            fields[f"{side}_pages"] = address_of(memory)
            fields[f"{side}_page_bytes"] = memory[0].nbytes
            fields[f"{side}_head_bytes"] = layout.head_bytes
        return fields


class KVPages:
    """Pages of one executor; the memory is touched, and so taken, only as pages are written.

    layers   by layer number, those that keep something of each token

    Raises: ConfigError for a cache type that does not fit the model's heads.
    """

    def __init__(self, spec: ModelSpec, n_pages: int, cache_type_k: str, cache_type_v: str) -> None:
        self.n_pages = n_pages
        self.cache_types = (cache_type_k, cache_type_v)
        self.layers = _layer_pages(spec, *self.cache_types)
        check_memory(n_pages, sum(layer.page_bytes for layer in self.layers.values()))
        for layer in self.layers.values():
            layer.allocate(n_pages)
        self._memories = [m for layer in self.layers.values() for m in layer.memories]
        self._memories += [la.index for la in self.layers.values() if la.index.size]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers together."""
        return sum(layer.page_bytes for layer in self.layers.values())

    @property
    def n_bytes(self) -> int:
        return self.n_pages * self.page_bytes

    def fields(self, layer: int) -> dict[str, int]:
        """The cache fields that the attention jobs of layer number `layer` share."""
        return self.layers[layer].fields()

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages, in order."""
        for source, target in copies:
            for memory in self._memories:
                memory[target] = memory[source]

    def save(self, pages: Sequence[int]) -> bytes:
        """The bytes of `pages`, page after page."""
        parts: list[NDArray[Any]] = [memory[page] for page in pages for memory in self._memories]
        return b"".join(part.tobytes() for part in parts)

    def load(self, pages: Sequence[int], image: bytes) -> None:
        """Put back what `save` returned.

        Raises: ValueError when the image is not of as many pages.
        """
        if len(image) != len(pages) * self.page_bytes:
            raise ValueError(
                f"an image of {len(image)} bytes is not {len(pages)} pages of {self.page_bytes}"
            )
        position = 0
        for page in pages:
            for memory in self._memories:
                n_bytes = memory[page].nbytes
                part = np.frombuffer(image, np.uint8, n_bytes, position)
                memory[page] = part.reshape(memory[page].shape)
                position += n_bytes


def kv_page_bytes(spec: ModelSpec, cache_type_k: str, cache_type_v: str) -> int:
    """Bytes of one page in all layers together; nothing is allocated.  Raises: ConfigError."""
    layers = _layer_pages(spec, cache_type_k, cache_type_v)
    return sum(layer.page_bytes for layer in layers.values())


def _layer_pages(spec: ModelSpec, cache_type_k: str, cache_type_v: str) -> dict[int, LayerPages]:
    """By layer number, without memory.  Raises: ConfigError."""
    shapes = enumerate(layer.mixer.cached for layer in spec.layers)
    try:
        return {
            i: LayerPages(shape, cache_type_k, cache_type_v)
            for i, shape in shapes
            if shape is not None
        }
    except ValueError as error:
        raise ConfigError(f"cache_type_k/cache_type_v: {error}") from error


def check_memory(n_pages: int, page_bytes: int) -> None:
    """Raises: ConfigError where `n_pages` pages do not fit the memory that is available now."""
    available = available_bytes()
    if available is not None and n_pages * page_bytes > available:
        raise ConfigError(
            f"n_ctx = {n_pages * PAGE_TOKENS} takes {n_pages * page_bytes / 2**30:.1f} GiB of keys "
            f"and values, and {available / 2**30:.1f} GiB of memory is available: use at most "
            f"{available // page_bytes * PAGE_TOKENS}, or cache_type_k/cache_type_v q8_0"
        )


def available_bytes() -> int | None:
    """What the system says can be taken without swapping; None where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    values = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(values[0]) * 1024 if values else None
