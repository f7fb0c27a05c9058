"""Links: the memory through which one GPU's graph hands the residual stream to the next one's.

`ops.gpu.handover` says what the kernels do with it.  Where the two GPUs reach each other's memory,
each waits for a word of its own memory that the other one stores; else all of it is pinned memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import ClassVar

import numpy as np

from ops.gpu.handover import BEAT, FAILED, PATIENCE_NS, STOP, WORDS_BYTES
from runtime.cuda.device import Device
from runtime.cuda.memory import DeviceBuffer, PinnedBuffer, slot_bytes
from runtime.cuda.stream import Stream
from runtime.errors import CudaError, EngineBug, HandOverStalled
from runtime.experts.lost_steps import LostSteps

WORD = slot_bytes(4)
"""Bytes between words that different GPUs look at."""

GIVEN, TAKEN, COUNTER = 0, WORD, 2 * WORD


class Link:
    """From one GPU to the next.

    direct  the GPUs reach each other's memory
    stride  bytes of the rows of one step; two such places take turns
    """

    def __init__(
        self, number: int, giver: Device, taker: Device, stride: int, words: PinnedBuffer
    ) -> None:
        """Raises: OutOfDeviceMemory, PinningFailed, CudaError."""
        self._number, self._stride = number, slot_bytes(stride)
        self._giver, self._taker, self._words = giver, taker, words
        self.direct = giver.reach(taker) and taker.reach(giver)
        n_bytes = 3 * WORD + 2 * self._stride
        with ExitStack() as resources:
            self._given_side = _zeros(giver, 3 * WORD, resources)
            self._taken_side = _zeros(taker, n_bytes if self.direct else 3 * WORD, resources)
            self._host = None
            if not self.direct:
                self._host = resources.enter_context(PinnedBuffer(giver, n_bytes, "hand-over"))
            self._resources = resources.pop_all()

    @staticmethod
    def n_bytes(stride: int) -> int:
        """Of the taking GPU's memory, at most."""
        return 3 * WORD + 2 * slot_bytes(stride)

    def giving(self) -> dict[str, int]:
        """Arguments of `hand_over` but the step's."""
        arriving = self._arriving(self._giver)
        taken = arriving if self._host is not None else self._given_side.address
        return {
            "target": arriving + 3 * WORD,
            "given": arriving + GIVEN,
            "taken": taken + TAKEN,
            **self._shared(self._giver, self._given_side),
        }

    def taking(self) -> dict[str, int]:
        """Arguments of `take_over` but the step's."""
        arriving = self._arriving(self._taker)
        taken = arriving if self._host is not None else self._given_side.address
        return {
            "source": arriving + 3 * WORD,
            "given": arriving + GIVEN,
            "taken": taken + TAKEN,
            **self._shared(self._taker, self._taken_side),
        }

    def close(self) -> None:
        self._resources.close()

    def _arriving(self, device: Device) -> int:
        """Where rows arrive, as `device` addresses it."""
        if self._host is not None:
            return self._host.address_on(device)
        return self._taken_side.address

    def _shared(self, device: Device, own: DeviceBuffer) -> dict[str, int]:
        return {
            "stride": self._stride,
            "counter": own.address + COUNTER,
            "words": self._words.address_on(device),
            "patience": PATIENCE_NS,
            "link": self._number,
        }


class Links:
    """All links of an executor, and the host's side of them.

    done  addresses for the GPUs but the last: the u32 that gets the number of a step that ended
    """

    PLANNED: ClassVar[Mapping[str, int]] = dict.fromkeys(
        ("source", "target", "given", "taken", "stride", "counter", "words", "patience", "link"), 0
    )
    """Arguments of links that are only planned, and of those of tokens."""

    PLANNED_TOKENS: ClassVar[Mapping[str, int]] = dict.fromkeys(("words", "patience", "link"), 0)

    def __init__(self, devices: Sequence[Device], stride: int) -> None:
        """devices in the order of their layers.  Raises: as `Link`."""
        with ExitStack() as resources:
            n_bytes = WORDS_BYTES + 4 * len(devices)
            words = resources.enter_context(PinnedBuffer(devices[0], n_bytes, "hand-over"))
            self.between: list[Link] = []
            for number, giver in enumerate(devices[:-1]):
                link = Link(number, giver, devices[number + 1], stride, words)
                resources.callback(link.close)
                self.between.append(link)
            self.done = [
                words.address_on(device) + WORDS_BYTES + 4 * number
                for number, device in enumerate(devices[:-1])
            ]
            self._words_at = words.address_on(devices[0])
            self._words = words.view.view(np.uint32)
            self._done = self._words[WORDS_BYTES // 4 :][: len(self.done)]
            self._lost = LostSteps(self._words[FAILED // 4 :][:4])
            self._parted: CudaError | None = None
            self._resources = resources.pop_all()

    def tokens(self) -> dict[str, int]:
        """Arguments of `take_tokens` but the step's."""
        return {
            "words": self._words_at,
            "patience": PATIENCE_NS,
            "link": len(self.between),
        }

    def ended(self, epoch: int) -> bool:
        """Whether the GPUs but the last have ended step `epoch`.

        Looking shows them that somebody does, so that they wait for each other.
        """
        self._words[BEAT // 4] += 1
        return all((done - epoch) & 0xFFFFFFFF < 1 << 31 for done in self._done.tolist())

    def stop(self) -> None:
        """The steps in flight will not end well: nobody is to wait any longer."""
        self._words[STOP // 4] = 1

    def resume(self) -> None:
        """No step is in flight; the next may wait again."""
        self._words[STOP // 4] = 0

    def check(self, epoch: int, *, behind: bool = False) -> None:
        """Raises: HandOverStalled where a GPU waited in vain in that step, or in the one before it
        and this one was launched `behind` it."""
        number = self._lost.take(epoch, behind=behind)
        if number is not None:
            raise HandOverStalled(number, (number + 1) % (len(self.between) + 1))

    def part(self, error: CudaError) -> None:
        """Some GPUs have a step that the others did not get: they will never meet again."""
        self._parted = error
        self.stop()

    def check_together(self) -> None:
        """Raises: EngineBug after `part`."""
        if self._parted is not None:
            raise EngineBug(f"the GPUs are at different steps since {self._parted}")

    def close(self) -> None:
        self._resources.close()


def _zeros(device: Device, n_bytes: int, resources: ExitStack) -> DeviceBuffer:
    buffer = resources.enter_context(DeviceBuffer(device, n_bytes, "hand-over"))
    with Stream(device, "hand-over") as stream:
        stream.fill(buffer.address, 0, n_bytes)
        stream.synchronize()
    return buffer
