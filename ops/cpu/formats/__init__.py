"""The weight formats that the CPU kernels compute, by name."""

from __future__ import annotations

from ops.cpu.formats.floats import BFloat16, Float16, Float32
from ops.cpu.formats.fp4 import MXFP4, NVFP4
from ops.cpu.formats.iq1 import IQ1M, IQ1S
from ops.cpu.formats.iq2 import IQ2S, IQ2XS, IQ2XXS
from ops.cpu.formats.iq3 import IQ3S, IQ3XXS
from ops.cpu.formats.iq4 import IQ4NL, IQ4XS
from ops.cpu.formats.kernel_format import KernelFormat
from ops.cpu.formats.legacy import Q40, Q41, Q50, Q51, Q80
from ops.cpu.formats.low_bit import Q1, Q2
from ops.cpu.formats.q2_k import Q2K, Q3K
from ops.cpu.formats.q4_k import Q4K, Q5K
from ops.cpu.formats.q6_k import Q6K

KERNEL_FORMATS: dict[str, KernelFormat] = {
    "F32": Float32(),
    "F16": Float16(),
    "BF16": BFloat16(),
    "Q4_0": Q40(),
    "Q4_1": Q41(),
    "Q5_0": Q50(),
    "Q5_1": Q51(),
    "Q8_0": Q80(),
    "Q2_K": Q2K(),
    "Q3_K": Q3K(),
    "Q4_K": Q4K(),
    "Q5_K": Q5K(),
    "Q6_K": Q6K(),
    "IQ1_S": IQ1S(),
    "IQ1_M": IQ1M(),
    "IQ2_XXS": IQ2XXS(),
    "IQ2_XS": IQ2XS(),
    "IQ2_S": IQ2S(),
    "IQ3_XXS": IQ3XXS(),
    "IQ3_S": IQ3S(),
    "IQ4_NL": IQ4NL(),
    "IQ4_XS": IQ4XS(),
    "MXFP4": MXFP4(),
    "NVFP4": NVFP4(),
    "Q1_0": Q1(),
    "Q2_0": Q2(),
}
