"""Which instruction set the matrix kernels are emitted for.

What counts is the target of Numba's compiler, not the processor: an instruction that the target
lacks does not fail to compile, it ends the process.
"""

from __future__ import annotations

from typing import Literal, get_args

from ops.cpu.contexts import TARGET

Isa = Literal["avx512", "avxvnni", "avx2", "portable"]
"""avx512: F, BW, VL, DQ, VNNI, VBMI and GFNI together, BMI2; avxvnni: AVX2 with 256-bit VNNI."""

AVX2 = frozenset({"avx2", "fma", "f16c", "ssse3"})
AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni"})
REQUIRED: dict[Isa, tuple[frozenset[str], ...]] = {
    "avx512": (AVX2 | AVX512 | {"avx512vbmi", "gfni", "bmi2"},),
    "avxvnni": (AVX2 | {"avxvnni"}, AVX2 | AVX512),
    "avx2": (AVX2,),
    "portable": (frozenset(),),
}
"""Target features that each instruction set needs, any one of the sets; the fastest first."""


class UnsupportedIsa(LookupError):
    """An instruction set that is unknown, or that the compiler's target cannot run."""


def runnable_isas() -> list[Isa]:
    """The instruction sets this process can use, the fastest first."""
    features = target_features()
    return [isa for isa, sets in REQUIRED.items() if any(needed <= features for needed in sets)]


def choose_isa(wanted: str | None = None) -> Isa:
    """The instruction set to emit: the fastest runnable one, or `wanted`.

    Raises:
        UnsupportedIsa: `wanted` cannot run here.
    """
    runnable = runnable_isas()
    if wanted is None:
        return runnable[0]
    for isa in runnable:
        if isa == wanted:
            return isa
    if wanted not in get_args(Isa):
        raise UnsupportedIsa(f"unknown instruction set {wanted!r}; known: {', '.join(REQUIRED)}")
    raise UnsupportedIsa(
        f"instruction set {wanted!r} cannot run here; these can: {', '.join(runnable)}"
    )


def target_features() -> frozenset[str]:
    """Names of the features that Numba's compiler target has."""
    _, _, features = TARGET.codegen().magic_tuple()
    return frozenset(name[1:] for name in features.split(",") if name.startswith("+"))
