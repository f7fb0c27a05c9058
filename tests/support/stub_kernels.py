"""Kernels that compute nothing, for tests of everything around them.

A step over them ends at once: all logits and tokens are 0, no expert is missed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from ops import exchange
from ops.gpu.mailbox import mailbox
from ops.gpu.step_io import REPORT_PARAMS

MAILBOX_NAMES = [name for name, _ in mailbox().params]
REPORT_NAMES = [name for name, _ in REPORT_PARAMS]


class StubKernels(dict[str, Callable[..., None]]):
    """For `FakeDriver.kernels`: every kernel but `report` does nothing.

    patient_steps  after so many more steps the mailboxes of one give up, as they do after two
                   seconds without a sign of the CPU team; below 0: they never do
    """

    def __init__(self) -> None:
        super().__init__(report=self._report, mailbox=self._mailbox)
        self.patient_steps = -1

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> Callable[..., None]:
        return lambda span, *values: None

    def _report(self, span: Callable[[int, int], Any], *values: int) -> None:
        given = dict(zip(REPORT_NAMES, values, strict=True))
        epoch = span(given["epoch"], 4).view(np.uint32)
        ctypes.c_uint32.from_address(given["done"]).value = int(epoch[0])
        epoch += np.uint32(1)
        self.patient_steps -= 1

    def _mailbox(self, span: Callable[[int, int], Any], *values: int) -> None:
        given = dict(zip(MAILBOX_NAMES, values, strict=True))
        if self.patient_steps == 0:
            epoch = int(span(given["epoch"], 4).view(np.uint32)[0])
            place = given["exchange"] + exchange.FAILED + 8 * (epoch % 2)
            failed = (ctypes.c_uint32 * 2).from_address(place)
            failed[:] = exchange.failed_number(epoch), given["layer"]
