"""GPUPages: the memory of all layers' attention keys and values on a GPU, cut into pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ops.gpu.kv_layout import PAGE_TOKENS, GPUPageLayout
from runtime.cuda.device import Device
from runtime.cuda.memory import DeviceBuffer, PinnedBuffer, slot_bytes
from runtime.cuda.stream import Stream
from runtime.errors import ConfigError
from runtime.models.spec import AttentionSpec, ModelSpec


@dataclass(frozen=True)
class LayerCache:
    """Where one layer's keys and values lie, for kernels; the names are those of `ops.gpu.heads`.

    Addresses of u8[n_pages, n_head_kv, head_bytes], and the layouts' numbers.
    """

    k_pages: int
    v_pages: int
    keys: GPUPageLayout
    values: GPUPageLayout
    n_head_kv: int

    @property
    def k_page_bytes(self) -> int:
        return self.n_head_kv * self.keys.head_bytes

    @property
    def v_page_bytes(self) -> int:
        return self.n_head_kv * self.values.head_bytes

    def fields(self) -> dict[str, int]:
        """The arguments that kernels share."""
        return {
            "k_pages": self.k_pages,
            "v_pages": self.v_pages,
            "k_cache": self.keys.code,
            "k_page_bytes": self.k_page_bytes,
            "k_head_bytes": self.keys.head_bytes,
            "v_cache": self.values.code,
            "v_page_bytes": self.v_page_bytes,
            "v_head_bytes": self.values.head_bytes,
        }


class CacheSizes:
    """The layouts of every layer, and the bytes that they take; layers without a cache are None.

    Raises: ConfigError for a cache type that does not fit the model's heads.
    """

    def __init__(self, spec: ModelSpec, cache_type_k: str, cache_type_v: str) -> None:
        self.cache_types = (cache_type_k, cache_type_v)
        self.layers: list[tuple[GPUPageLayout, GPUPageLayout, int] | None] = []
        for layer in spec.layers:
            mixer = layer.mixer
            if not isinstance(mixer, AttentionSpec):
                self.layers.append(None)
                continue
            try:
                keys = GPUPageLayout("keys", cache_type_k, mixer.head_dim_k)
                values = GPUPageLayout("values", cache_type_v, mixer.head_dim_v)
            except ValueError as error:
                raise ConfigError(f"cache_type_k/cache_type_v: {error}") from error
            self.layers.append((keys, values, mixer.n_head_kv))

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers together."""
        return sum(n_bytes for layer in self.layers for n_bytes in _side_bytes(layer))

    def n_bytes(self, n_pages: int) -> int:
        """What the memory of so many pages takes."""
        return sum(slot_bytes(n_pages * b) for layer in self.layers for b in _side_bytes(layer))


def _side_bytes(layer: tuple[GPUPageLayout, GPUPageLayout, int] | None) -> tuple[int, ...]:
    """Bytes of a page's keys and values in one layer."""
    if layer is None:
        return ()
    keys, values, n_head_kv = layer
    return n_head_kv * keys.head_bytes, n_head_kv * values.head_bytes


class GPUPages:
    """Pages of one executor.  Moving them is for the time between steps."""

    page_tokens = PAGE_TOKENS

    def __init__(self, device: Device, sizes: CacheSizes, n_pages: int) -> None:
        """Raises: OutOfDeviceMemory, CudaError."""
        self.sizes, self.n_pages = sizes, n_pages
        self.n_bytes = sizes.n_bytes(n_pages)
        self._buffer = DeviceBuffer(device, max(self.n_bytes, 1), "keys and values")
        self._parts: list[tuple[int, int]] = []  # (address, bytes of a page) of every side
        self.layers: list[LayerCache | None] = []
        at = self._buffer.address
        for layer in sizes.layers:
            addresses = []
            for n_bytes in _side_bytes(layer):
                self._parts.append((at, n_bytes))
                addresses.append(at)
                at += slot_bytes(n_pages * n_bytes)
            cache = None
            if layer is not None:
                cache = LayerCache(addresses[0], addresses[1], *layer)
            self.layers.append(cache)

    def clear(self, stream: Stream) -> None:
        """Zeros everywhere, so that nothing in a page is ever not a number by chance."""
        stream.fill(self._buffer.address, 0, self._buffer.nbytes)

    def copy(self, copies: Sequence[tuple[int, int]], stream: Stream) -> None:
        """Put copies of whole pages into the stream, in order."""
        for source, target in copies:
            for address, n_bytes in self._parts:
                stream.copy(address + target * n_bytes, address + source * n_bytes, n_bytes)

    def save(self, pages: Sequence[int], stream: Stream) -> bytes:
        """The bytes of `pages`, page after page.  Blocks: not on a thread that runs a loop."""
        if not pages:
            return b""
        page_bytes = self.sizes.page_bytes
        with PinnedBuffer(self._buffer.device, len(pages) * page_bytes, "page image") as image:
            at = image.host
            for page in pages:
                for address, n_bytes in self._parts:
                    stream.download(at, address + page * n_bytes, n_bytes)
                    at += n_bytes
            stream.synchronize()
            return image.view.tobytes()

    def load(self, pages: Sequence[int], image: bytes, stream: Stream) -> None:
        """Put back what `save` returned.  Blocks, as `save`.

        Raises: ValueError when the image is not of as many pages.
        """
        page_bytes = self.sizes.page_bytes
        if len(image) != len(pages) * page_bytes:
            raise ValueError(
                f"an image of {len(image)} bytes is not {len(pages)} pages of {page_bytes}"
            )
        if not pages:
            return
        with PinnedBuffer(self._buffer.device, len(image), "page image") as pinned:
            pinned.view[:] = np.frombuffer(image, np.uint8)
            at = pinned.host
            for page in pages:
                for address, n_bytes in self._parts:
                    stream.upload(address + page * n_bytes, at, n_bytes)
                    at += n_bytes
            stream.synchronize()

    def close(self) -> None:
        self._buffer.close()
