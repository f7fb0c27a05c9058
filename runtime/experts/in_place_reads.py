"""InPlaceReads: some of a token's missed experts, read by the GPU where the host has them.

Which ones `route` decides, token by token, by the fourth word of an expert's row in the table: see
`ops.gpu.router.in_place_word`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ops.gpu.expert import ADDRESSES
from ops.gpu.router import in_place_word
from runtime.cuda.device import Device
from runtime.cuda.memory import DeviceBuffer
from runtime.engine.gpu.expert_launches import are_slot_formats
from runtime.engine.gpu.transfer import Transfer, flat, transfer_all
from runtime.experts.host_experts import HostExperts, HostPart
from runtime.experts.served import InPlaceRule

U64 = NDArray[np.uint64]


class InPlaceReads:
    """Of the experts of `host`; n_expert: rows of a layer, n_tokens: of a step that may do so.

    `rule` is what steps follow from the next one on.
    """

    def __init__(
        self, device: Device, host: HostExperts | HostPart, n_expert: int, n_tokens: int
    ) -> None:
        """Raises: OutOfDeviceMemory."""
        self._device, self._host = device, host
        self._n_expert, self._n_tokens = n_expert, n_tokens
        n_bytes = 8 * ADDRESSES * max(len(host.layers) * n_expert, 1)
        self._rows = DeviceBuffer(device, n_bytes, "host rows")
        self._is_loaded = False
        self.set(0)

    def set(self, every: int) -> bool:
        """Each `every`th of a token's misses of a layer from now on; 0: none.

        False, and none, where not all experts are pinned or no kernel reads them so.
        """
        wanted = every > 0 and self._host.pinned
        may = [wanted and are_slot_formats(layer.formats) for layer in self._host.layers]
        self.rule = InPlaceRule(every, np.array(may, np.bool_), self._n_tokens)
        return every == 0 or any(may)

    def words(self) -> U64:
        """u64[n_layers, n_expert]: the fourth words of the table.  Raises: CudaError."""
        found = np.zeros((len(self._host.layers), self._n_expert), np.uint64)
        layers = np.flatnonzero(self.rule.by_slot)
        if len(layers) and not self._is_loaded:
            self._load()
        for layer in layers.tolist():
            for expert in range(self._host.layers[layer].n_expert):
                at = self._rows.address + 8 * ADDRESSES * (layer * self._n_expert + expert)
                found[layer, expert] = in_place_word(at, self.rule.every)
        return found

    def _load(self) -> None:
        """Where kernels find every expert in the host's memory, in rows like the table's."""
        rows = np.zeros((len(self._host.layers), self._n_expert, ADDRESSES), np.uint64)
        for layer, experts in enumerate(self._host.layers):
            for column, m in enumerate(experts.matrices):
                rows[layer, :, column] = m.host + m.stride * np.arange(self._n_expert)
        transfer_all(self._device, [Transfer(self._rows.address, flat(rows))])
        self._is_loaded = True

    def close(self) -> None:
        self._rows.close()
