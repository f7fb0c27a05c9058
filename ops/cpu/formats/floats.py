"""F32, F16 and BF16."""

from __future__ import annotations

from ops.cpu.emitter import F32, I16, I32, Emitter, Value, vector
from ops.cpu.formats.kernel_format import FloatFormat


class Float32(FloatFormat):
    name = "F32"
    elem_bytes = 4

    def values(self, e: Emitter, address: Value, lanes: int) -> Value:
        return e.load(vector(F32, lanes), address)


class Float16(FloatFormat):
    name = "F16"
    elem_bytes = 2

    def values(self, e: Emitter, address: Value, lanes: int) -> Value:
        return e.half_to_f32(e.load(vector(I16, lanes), address))


class BFloat16(FloatFormat):
    """The upper half of an f32."""

    name = "BF16"
    elem_bytes = 2

    def values(self, e: Emitter, address: Value, lanes: int) -> Value:
        wide = e.widen(e.load(vector(I16, lanes), address), I32, signed=False)
        return e.cast(e.shift_left(wide, 16), F32)
