"""A few instructions in a kernel of their own: inputs from arrays, one result a thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.ptx.frame import DTYPES
from tests.support.ptx.kernel import load
from tests.support.ptx.memory import Memory

Array = NDArray[Any]

_TEMPLATE = """.version 8.0
.target {target}
.address_size 64
.visible .entry snippet(.param .u64 result, .param .u32 n{parameters})
{{
    .reg .u64 %address, %at;
    .reg .u32 %thread, %block, %n;
    .reg .pred %p, %q, %beyond;
    .reg .{register_type} %d;
{declarations}
    mov.u32 %thread, %tid.x;
    mov.u32 %block, %ctaid.x;
    mad.lo.u32 %thread, %block, {block}, %thread;
    ld.param.u32 %n, [n];
    setp.ge.u32 %beyond, %thread, %n;
@%beyond ret;
{loads}
{code}
    ld.param.u64 %address, [result];
    mad.wide.u32 %at, %thread, {size}, %address;
    st.global.{result_type} [%at], %d;
    ret;
}}
"""


@dataclass(frozen=True)
class Snippet:
    """`code` computes %d of type `out` from registers named and typed by `inputs`."""

    code: str
    out: str
    inputs: dict[str, tuple[str, Array]]
    target: str = "sm_80"

    @property
    def n(self) -> int:
        return len(next(iter(self.inputs.values()))[1])

    @property
    def block(self) -> int:
        return min(128, -(-self.n // 32) * 32)

    @property
    def text(self) -> str:
        loads = "\n".join(
            f"    ld.param.u64 %address, [{name}];\n"
            f"    mad.wide.u32 %at, %thread, {np.dtype(DTYPES[type_]).itemsize}, %address;\n"
            f"    ld.global.{_bits(type_)} %{name}, [%at];"
            for name, (type_, _) in self.inputs.items()
        )
        return _TEMPLATE.format(
            parameters="".join(f", .param .u64 {name}" for name in self.inputs),
            register_type=_register(self.out),
            declarations="\n".join(
                f"    .reg .{_register(type_)} %{name};" for name, (type_, _) in self.inputs.items()
            ),
            loads=loads,
            target=self.target,
            code=self.code,
            block=self.block,
            size=np.dtype(DTYPES[self.out]).itemsize,
            result_type=_bits(self.out),
        )

    def arrays(self) -> list[Array]:
        return [np.asarray(values, DTYPES[type_]) for type_, values in self.inputs.values()]

    def interpret(self, max_steps: int = 100_000) -> Array:
        """One result a thread, from the interpreter."""
        memory = Memory(1 << 21)
        result = memory.reserve(self.n * np.dtype(DTYPES[self.out]).itemsize)
        args = [result, self.n, *(memory.place(array) for array in self.arrays())]
        kernel = load(self.text, "snippet.ptx")["snippet"]
        grid = -(-self.n // self.block)
        kernel.launch(memory, (grid,), (self.block,), args, max_steps=max_steps)
        return memory.read(result, DTYPES[self.out], self.n)


def _register(type_: str) -> str:
    return {"f16": "b16", "f16x2": "b32"}.get(type_, type_)


def _bits(type_: str) -> str:
    return f"b{8 * np.dtype(DTYPES[type_]).itemsize}"


def edge_values(type_: str, n: int, seed: int) -> Array:
    """n values of the type: the ends of its range, small ones, then random bits."""
    generator = np.random.default_rng([seed, *type_.encode()])
    dtype = np.dtype(DTYPES[type_])
    values: Array = generator.integers(0, 256, n * dtype.itemsize, np.uint8).view(dtype)
    if dtype.kind == "f":
        half = generator.normal(size=n) * 2.0 ** generator.integers(-12, 12, n)
        values = np.where(generator.random(n) < 0.7, half.astype(dtype), values)
        tiny = np.finfo(dtype).smallest_subnormal
        edges = [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, np.inf, -np.inf, np.nan]
        edges += [tiny, -tiny, np.finfo(dtype).max, np.finfo(dtype).tiny]
    else:
        limits = np.iinfo(dtype)
        small = generator.integers(0, 64, n)
        values = np.where(generator.random(n) < 0.3, small.astype(dtype), values)
        edges = [0, 1, 2, 31, 32, 33, limits.max, limits.min, limits.max - 1, limits.max // 2]
    order = generator.permutation(n)
    values[order[: len(edges)]] = np.array(edges, dtype)
    return values


def same(actual: NDArray[Any], expected: Any, relative: float = 0) -> None:
    """Equal on the bits, any NaN being equal to any other, or within `relative`."""
    expected = np.asarray(expected, actual.dtype)
    if actual.dtype.kind == "f":
        assert np.array_equal(np.isnan(actual), np.isnan(expected))
        numbers = ~np.isnan(actual)
        actual, expected = actual[numbers], expected[numbers]
        if relative:
            np.testing.assert_allclose(actual, expected, rtol=relative, atol=1e-37)
            return
        bits = DTYPES[f"u{8 * actual.dtype.itemsize}"]
        actual, expected = actual.view(bits), expected.view(bits)
    np.testing.assert_array_equal(actual, expected)
