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
from runtime.models.spec import ModelSpec

U8 = NDArray[np.uint8]


class KVPages:
    """Pages of one executor; the memory is touched, and so taken, only as pages are written.

    keys, values          u8[n_pages, n_head_kv, head_bytes] of each layer
    key_layout, ..        how one kv head's page is laid out, by layer

    Raises: ConfigError for a cache type that does not fit the model's heads.
    """

    def __init__(self, spec: ModelSpec, n_pages: int, cache_type_k: str, cache_type_v: str) -> None:
        self.n_pages = n_pages
        self.cache_types = (cache_type_k, cache_type_v)
        self.keys: list[U8] = []
        self.values: list[U8] = []
        self.key_layouts: list[PageLayout] = []
        self.value_layouts: list[PageLayout] = []
        for layer in spec.layers:
            heads = layer.mixer
            try:
                k = PageLayout(cache_type_k, heads.head_dim_k)
                v = PageLayout(cache_type_v, heads.head_dim_v)
            except ValueError as error:
                raise ConfigError(f"cache_type_k/cache_type_v: {error}") from error
            self.key_layouts.append(k)
            self.value_layouts.append(v)
        check_memory(spec, n_pages, self.key_layouts, self.value_layouts)
        for layer, k, v in zip(spec.layers, self.key_layouts, self.value_layouts, strict=True):
            heads = layer.mixer
            self.keys.append(aligned((n_pages, heads.n_head_kv, k.head_bytes), np.uint8))
            self.values.append(aligned((n_pages, heads.n_head_kv, v.head_bytes), np.uint8))

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers together."""
        return sum(a[0].nbytes for a in (*self.keys, *self.values))

    @property
    def n_bytes(self) -> int:
        return self.n_pages * self.page_bytes

    def fields(self, layer: int) -> dict[str, int]:
        """The cache fields that the attention jobs of `layer` share."""
        fields = {}
        for side, memory, layout in (
            ("k", self.keys[layer], self.key_layouts[layer]),
            ("v", self.values[layer], self.value_layouts[layer]),
        ):
            fields[f"{side}_cache"] = layout.code
            fields[f"{side}_pages"] = address_of(memory)
            fields[f"{side}_page_bytes"] = memory[0].nbytes
            fields[f"{side}_head_bytes"] = layout.head_bytes
        fields["dim_v_padded"] = self.value_layouts[layer].padded_dim
        return fields

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages, in order."""
        for source, target in copies:
            for memory in (*self.keys, *self.values):
                memory[target] = memory[source]

    def save(self, pages: Sequence[int]) -> bytes:
        """The bytes of `pages`, page after page."""
        parts: list[NDArray[Any]] = [
            memory[page] for page in pages for memory in (*self.keys, *self.values)
        ]
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
            for memory in (*self.keys, *self.values):
                n_bytes = memory[page].nbytes
                part = np.frombuffer(image, np.uint8, n_bytes, position)
                memory[page] = part.reshape(memory[page].shape)
                position += n_bytes


def check_memory(
    spec: ModelSpec, n_pages: int, keys: Sequence[PageLayout], values: Sequence[PageLayout]
) -> None:
    """Raises: ConfigError where `n_pages` pages do not fit the memory that is available now."""
    page_bytes = sum(
        layer.mixer.n_head_kv * (k.head_bytes + v.head_bytes)
        for layer, k, v in zip(spec.layers, keys, values, strict=True)
    )
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
