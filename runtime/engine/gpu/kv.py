"""GPUPages: all layers' attention keys and values on a GPU, cut into pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ops.gpu.kv_layout import PAGE_TOKENS, GPUPageLayout
from runtime.cuda.device import Device, DeviceInfo
from runtime.cuda.memory import DeviceBuffer, PinnedBuffer, slot_bytes
from runtime.cuda.stream import Stream
from runtime.engine.gpu.weights import PLANNED_ADDRESS
from runtime.errors import ConfigError, EngineBug
from runtime.models.delta_net import DeltaNetSpec
from runtime.models.latent_attention import LatentAttentionSpec
from runtime.models.spec import AttentionSpec, Mixer, ModelSpec


@dataclass(frozen=True)
class LayerCache:
    """Where one layer's keys and values lie, for kernels; the names are those of `ops.gpu.heads`.

    k_pages, v_pages  addresses of u8[n_pages, n_head_kv, head_bytes]; v_pages 0: a value is the
                      first numbers of its key
    """

    k_pages: int
    v_pages: int
    keys: GPUPageLayout
    values: GPUPageLayout
    n_head_kv: int
    index_pages: int = 0
    index_page_bytes: int = 0

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


@dataclass(frozen=True)
class LayerSizes:
    """One layer's layouts.

    in_keys  values are the first numbers of f16 keys, and not kept apart
    """

    keys: GPUPageLayout
    values: GPUPageLayout
    n_head_kv: int
    in_keys: bool = False
    index_bytes: int = 0

    @property
    def side_bytes(self) -> tuple[int, ...]:
        """Bytes of a page's keys, of its values where they are apart, of keys of its blocks."""
        sides = (self.keys,) if self.in_keys else (self.keys, self.values)
        index = (self.index_bytes,) if self.index_bytes else ()
        return (*(self.n_head_kv * side.head_bytes for side in sides), *index)


class CacheSizes:
    """The layouts of every layer, and the bytes that they take; layers without a cache are None.

    Raises: ConfigError for a cache type that does not fit the model's heads.
    """

    def __init__(self, spec: ModelSpec, cache_type_k: str, cache_type_v: str) -> None:
        self.cache_types = (cache_type_k, cache_type_v)
        self.layers: list[LayerSizes | None] = []
        for layer in spec.layers:
            dims = cached_dims(layer.mixer)
            if dims is None:
                self.layers.append(None)
                continue
            dim_k, dim_v, n_head_kv, is_prefix = dims
            in_keys = is_prefix and cache_type_k == "f16"
            try:
                keys = GPUPageLayout("keys", cache_type_k, dim_k)
                values = GPUPageLayout("values", "f16" if in_keys else cache_type_v, dim_v)
            except ValueError as error:
                raise ConfigError(f"cache_type_k/cache_type_v: {error}") from error
            index_bytes = index_page_bytes(layer.mixer)
            self.layers.append(LayerSizes(keys, values, n_head_kv, in_keys, index_bytes))

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers together."""
        return sum(n for layer in self.layers if layer is not None for n in layer.side_bytes)

    def n_bytes(self, n_pages: int) -> int:
        """What the memory of so many pages takes."""
        layers = [layer for layer in self.layers if layer is not None]
        return sum(slot_bytes(n_pages * n) for layer in layers for n in layer.side_bytes)


def cached_dims(mixer: Mixer) -> tuple[int, int, int, bool] | None:
    """Dimensions of a key and of a value, how many of both a token has, and whether a value is the
    first part of its key; None: there are none."""
    if isinstance(mixer, AttentionSpec):
        return mixer.head_dim_k, mixer.head_dim_v, mixer.n_head_kv, False
    if isinstance(mixer, LatentAttentionSpec):
        return mixer.dim_k, mixer.dim_latent, 1, True
    return None


def index_page_bytes(mixer: Mixer) -> int:
    """Bytes of the keys of a page's blocks, by which attention chooses what it reads; f32."""
    indexer = None if isinstance(mixer, DeltaNetSpec) else mixer.indexer
    return 0 if indexer is None else 4 * PAGE_TOKENS * indexer.n_cached


class GPUPages:
    """Where the pages of one executor lie, if the first layer's lie at `base`."""

    page_tokens = PAGE_TOKENS

    def __init__(
        self, sizes: CacheSizes, n_pages: int, gpu: DeviceInfo, base: int = PLANNED_ADDRESS
    ) -> None:
        """gpu: in whose memory they are."""
        self.sizes, self.n_pages, self.gpu = sizes, n_pages, gpu
        self.n_bytes = sizes.n_bytes(n_pages)
        self._parts: list[tuple[int, int]] = []  # (address, bytes of a page) of every side
        self.layers: list[LayerCache | None] = []
        at = base
        for layer in sizes.layers:
            if layer is None:
                self.layers.append(None)
                continue
            addresses = []
            for n_bytes in layer.side_bytes:
                self._parts.append((at, n_bytes))
                addresses.append(at)
                at += slot_bytes(n_pages * n_bytes)
            index_pages = addresses.pop() if layer.index_bytes else 0
            k_pages, v_pages = (*addresses, 0)[:2]
            cache = LayerCache(
                k_pages,
                v_pages,
                layer.keys,
                layer.values,
                layer.n_head_kv,
                index_pages,
                layer.index_bytes,
            )
            self.layers.append(cache)

    def layer(self, index: int) -> LayerCache:
        """The cache of a layer.  Raises: EngineBug where it has none."""
        cache = self.layers[index]
        if cache is None:
            raise EngineBug(f"layer {index} has no keys and values")
        return cache


class PageMemory(GPUPages):
    """Pages of one executor.  Moving them is for the time between steps."""

    def __init__(self, device: Device, sizes: CacheSizes, n_pages: int) -> None:
        """Raises: OutOfDeviceMemory, CudaError."""
        n_bytes = max(sizes.n_bytes(n_pages), 1)
        self._buffer = DeviceBuffer(device, n_bytes, "keys and values")
        super().__init__(sizes, n_pages, device.info, self._buffer.address)

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
