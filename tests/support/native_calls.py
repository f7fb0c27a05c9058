"""The fake driver's functions as C functions: they call what Python calls by the same name."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from tests.support.cuda_constants import CUresult

UNKNOWN = 999

Native = Callable[..., int]


class NativeCalls:
    """Of a fake driver: addresses for `cuGetProcAddress`, made once each."""

    def __init__(self, fake: Any) -> None:
        self._fake = fake
        self._made: dict[str, tuple[Any, int]] = {}
        self._functions: dict[str, tuple[int, Native]] = {
            "cuCtxSetCurrent": (1, lambda context: self._code("cuCtxSetCurrent", context)),
            "cuEventQuery": (1, lambda event: self._code("cuEventQuery", event)),
            "cuEventRecord": (2, lambda event, stream: self._code("cuEventRecord", event, stream)),
            "cuEventElapsedTime": (3, self._elapsed),
            "cuMemcpyBatchAsync": (9, self._batch),
        }

    def address(self, name: str) -> int:
        """Raises: KeyError for a function that nobody has asked for yet."""
        if name not in self._made:
            n_args, function = self._functions[name]

            def called(*args: int) -> int:
                try:
                    return function(*args)
                except BaseException as error:  # C has no exceptions
                    self._fake.raised = error
                    return UNKNOWN

            made = ctypes.CFUNCTYPE(ctypes.c_int, *n_args * [ctypes.c_uint64])(called)
            self._made[name] = made, ctypes.cast(made, ctypes.c_void_p).value or 0
        return self._made[name][1]

    def _code(self, name: str, *args: Any) -> int:
        return int(getattr(self._fake, name)(*args)[0])

    def _elapsed(self, milliseconds: int, start: int, end: int) -> int:
        code, found = self._fake.cuEventElapsedTime(start, end)
        if code == CUresult.CUDA_SUCCESS:
            ctypes.c_float.from_address(milliseconds).value = found
        return int(code)

    def _batch(
        self, dsts: int, srcs: int, sizes: int, count: int, attrs: int, attrsIdxs: int,
        numAttrs: int, failIdx: int, hStream: int,
    ) -> int:  # fmt: skip
        lists = [list((ctypes.c_uint64 * count).from_address(at)) for at in (dsts, srcs, sizes)]
        pointer = self._fake.CUdeviceptr
        attributes = self._fake.CUmemcpyAttributes()
        attributes.srcAccessOrder = ctypes.c_int.from_address(attrs).value
        first = ctypes.c_size_t.from_address(attrsIdxs).value
        return self._code(
            "cuMemcpyBatchAsync", list(map(pointer, lists[0])), list(map(pointer, lists[1])),
            lists[2], count, [attributes], [first], numAttrs, hStream,
        )  # fmt: skip
