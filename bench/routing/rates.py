"""What a step costs: from the bytes of its hits, misses and uploads to milliseconds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


@dataclass(frozen=True)
class Rates:
    """A machine, in GB/s, ms and us.

    cpu       experts that the CPU computes
    link      uploads
    vram      experts that the GPU computes
    dram      of host memory, for the CPU and uploads together
    dense_ms  everything of a token that is not routed experts
    hand_us   a layer that misses something: GPU to CPU and back
    share     of a step's time that uploads may take
    """

    cpu: float
    link: float
    vram: float
    dram: float
    dense_ms: float
    hand_us: float
    share: float = 0.5

    def step_ms(self, hit_bytes: F64, miss_bytes: F64, link_share: float) -> float:
        """A token's time; bytes f64[n_layers] of each layer's experts.

        link_share  of this step's time that an upload takes host memory's bandwidth
        Within a layer the GPU and the CPU work at the same time; layers follow each other.
        """
        cpu = self.cpu * (1.0 - link_share) + min(self.cpu, self.dram - self.link) * link_share
        on_gpu, on_cpu = hit_bytes / (self.vram * 1e6), miss_bytes / (cpu * 1e6)
        on_cpu = on_cpu + (miss_bytes > 0) * (self.hand_us / 1e3)
        return self.dense_ms + float(np.maximum(on_gpu, on_cpu).sum())


MACHINES = {
    # Two channels of DDR4-3200 and one RTX 3090 on 16 lanes of PCIe 4.
    "desktop": Rates(40.0, 13.2, 800.0, 44.0, 6.0, 20.0),
    # 16 cores of a server with one H200, measured.
    "h200": Rates(62.0, 45.0, 3700.0, 110.0, 2.0, 8.0),
}
