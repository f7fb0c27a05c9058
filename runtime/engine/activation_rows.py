"""ActivationRows: rows that one stage hands to the products of the next, in each stored form."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ops.arithmetic import activation_layout
from ops.cpu.program import address_of, aligned
from ops.quants import ActivationKind

I64 = NDArray[np.int64]


class Rows:
    """`n_rows` rows of `stride` bytes, and the table of their addresses."""

    def __init__(self, n_rows: int, stride: int) -> None:
        self.memory = aligned((n_rows, stride), np.uint8)
        self.stride = stride
        self.pointers = aligned(n_rows, np.int64)
        self.pointers[:] = self.address + stride * np.arange(n_rows)

    @property
    def address(self) -> int:
        return address_of(self.memory)


class ActivationRows:
    """f32[n_rows, width], and activation records of the kinds that `want` was called with."""

    def __init__(self, n_rows: int, width: int) -> None:
        self.n_rows, self.width = n_rows, width
        self._rows: dict[ActivationKind, Rows] = {}
        self.want("f32")

    def want(self, kind: ActivationKind) -> Rows:
        """The rows of this kind, made when first asked for."""
        if kind not in self._rows:
            self._rows[kind] = Rows(self.n_rows, activation_layout(kind, self.width)[2])
        return self._rows[kind]

    @property
    def f32(self) -> Rows:
        return self._rows["f32"]

    def record_fields(self) -> dict[str, int]:
        """The out_* fields of `ops.cpu.norm` for the quantized kinds."""
        fields = {}
        for kind in ("q8_256", "q8_32"):
            rows = self._rows.get(kind)  # type: ignore[call-overload]
            fields[f"out_{kind}"] = rows.address if rows else 0
            fields[f"out_{kind}_stride"] = rows.stride if rows else 0
        return fields

    @property
    def row_bytes(self) -> int:
        """Of one row in all its forms."""
        return sum(rows.stride for rows in self._rows.values())

    @property
    def quantized(self) -> bool:
        """Whether any kind but f32 is wanted."""
        return len(self._rows) > 1
