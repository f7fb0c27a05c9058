"""The start-up test of the exchange: many rounds between GPU and CPU team, every answer known.

What it would find: a driver or machine on which stores of one side reach the other late, torn or
out of order, and a team that cannot keep up. It needs no model: its experts are tiny, so that the
time of a round is what handing over costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ops.arithmetic import dot_rows, quantize_rows, silu_mul
from ops.cpu.team import Team
from ops.gpu.kernel import Kernel
from ops.gpu.mailbox import mailbox
from ops.gpu.step_io import report
from ops.quants import FORMATS
from ops.quants.block import F32, U8
from runtime.cuda.device import Device
from runtime.cuda.graph import Graph, Launch
from runtime.cuda.memory import DeviceBuffer, PinnedBuffer, slot_bytes
from runtime.cuda.module import Function
from runtime.cuda.stream import Event, Stream
from runtime.errors import DeviceUnavailable, ExchangeStalled
from runtime.experts.exchange import Exchange, ExchangeSizes
from runtime.models.linear import Linear
from runtime.models.spec import MoeSpec, RouterScore, RouterSpec
from runtime.models.weights import Weight

ROUNDS = 10_000
LAYERS = 50
"""Rounds of one launched graph."""

FORMAT = FORMATS["Q8_0"]
N_EXPERT, N_USED, N_EMBD, N_FF = 7, 2, 2048, 32
MISSED, HELD = 0, 1
"""The slot whose expert the GPU lacks, and the one that it would have."""

LOOK_SECONDS = 1e-4
"""Between looks for a step's end, in which other threads of a start compute."""

STEP_SECONDS = 5.0
"""Longer than the mailbox waits for a sign of life."""

KERNELS: tuple[Kernel, ...] = (mailbox(), report())
"""What has to be loaded."""


@dataclass(frozen=True)
class SelfTest:
    """rounds that went well, and the time of one, from a graph's launch to its end."""

    rounds: int
    microseconds: float


def self_test(
    device: Device,
    team: Team,
    function: Callable[[Kernel], Function],
    rounds: int = ROUNDS,
) -> SelfTest:
    """Exchange `rounds` known answers (rounded up to whole graphs); takes about 0.2 s.

    function  gives the loaded code of `KERNELS`

    Raises: DeviceUnavailable where an answer is wrong or does not come; CudaError, PinningFailed.
    """
    with ExitStack() as resources:
        test = _Rounds(device, team, function, resources)
        n_steps = -(-rounds // LAYERS)
        begin = time.perf_counter()
        for epoch in range(1, n_steps + 1):
            test.step(epoch)
        seconds = time.perf_counter() - begin
    return SelfTest(n_steps * LAYERS, 1e6 * seconds / (n_steps * LAYERS))


class _Rounds:
    """A graph of LAYERS mailboxes, the team's program for it, and what they have to give."""

    def __init__(
        self,
        device: Device,
        team: Team,
        function: Callable[[Kernel], Function],
        resources: ExitStack,
    ) -> None:
        rng = np.random.default_rng(0)
        x = rng.normal(size=(1, N_EMBD)).astype(np.float32)
        weights = {
            role: _weight(role, rng, n_rows, n_elems)
            for role, n_rows, n_elems in (
                ("gate", N_FF, N_EMBD),
                ("up", N_FF, N_EMBD),
                ("down", N_EMBD, N_FF),
            )
        }
        experts = np.arange(LAYERS) % N_EXPERT
        self._expected = _answers(weights, x)[experts]
        self._done = resources.enter_context(PinnedBuffer(device, 64, "done"))
        self._done_word = self._done.view[:4].view(np.uint32)
        router = RouterSpec(Linear("router", N_EMBD, N_EXPERT), RouterScore.SOFTMAX, True)
        gate, up = (Linear(role, N_EMBD, N_FF, n_expert=N_EXPERT) for role in ("gate", "up"))
        down = Linear("down", N_FF, N_EMBD, n_expert=N_EXPERT)
        spec = MoeSpec(N_EXPERT, N_USED, N_FF, router, (gate, up), down)
        self._exchange = Exchange(
            device, team, weights, [spec] * LAYERS, ExchangeSizes(1), self._done.host
        )
        resources.callback(self._exchange.close)
        self._stream = resources.enter_context(Stream(device, "self-test"))
        self._memory = _DeviceArrays(device, self._stream, resources)
        self._y = self._memory.place(np.zeros((LAYERS, N_USED, N_EMBD), np.float32))
        self._result = np.zeros((LAYERS, N_USED, N_EMBD), np.float32)
        launches = self._launches(function, experts, quantize_rows(FORMAT.activation, x))
        self._memory.settle()
        self._graph = self._capture(device, launches, resources)

    def step(self, epoch: int) -> None:
        """One graph.  Raises: DeviceUnavailable, CudaError."""
        try:
            self._exchange.begin(epoch)
            self._graph.launch(self._stream)
            self._wait(epoch)
            self._exchange.check(epoch)
        except ExchangeStalled as error:
            raise DeviceUnavailable(f"the exchange with the CPU failed its test: {error}") from None
        self._stream.download(self._result.ctypes.data, self._y, self._result.nbytes)
        self._stream.synchronize()
        wrong = (self._result[:, MISSED] != self._expected).any(1) | self._result[:, HELD].any(1)
        if wrong.any():
            raise DeviceUnavailable(
                f"the exchange with the CPU failed its test: {int(wrong.sum())} of {LAYERS} "
                f"answers of step {epoch} are wrong"
            )

    def _wait(self, epoch: int) -> None:
        limit = time.monotonic() + STEP_SECONDS
        while int(self._done_word[0]) != epoch or not self._exchange.idle:
            if time.monotonic() > limit:
                raise ExchangeStalled("a step did not end")
            time.sleep(LOOK_SECONDS)

    def _launches(
        self, function: Callable[[Kernel], Function], experts: NDArray[np.int64], records: U8
    ) -> list[Launch]:
        place = self._memory.place
        table = np.ones((N_USED, 4), np.uint64)
        table[MISSED] = 0
        zeros = np.zeros(4, np.uint32)
        epoch = place(np.array([1], np.uint32))
        step = {
            "epoch": epoch,
            "counts": place(np.array([1, 0, 0, 0], np.uint32)),
            "experts": place(table),
            "records": place(records),
            "slots": 0,
        }
        made = []
        kernel, end = KERNELS
        for layer, expert in enumerate(experts.tolist()):
            launch, arguments = self._exchange.mailbox(layer, 1)
            arguments |= step
            arguments["y"] = self._y + layer * self._result[0].nbytes
            arguments["choices"] = place(np.array([expert, 0], np.int32))
            packed = kernel.pack(**arguments)
            grid = (*launch.grid, 1, 1)
            shared = launch.shared_bytes
            made.append(Launch(function(kernel), grid, kernel.block, packed, shared_bytes=shared))
        arguments = dict.fromkeys((name for name, _ in end.params), 0)
        arguments |= {"epoch": epoch, "count": place(zeros), "counter": place(zeros)}
        arguments["done"] = self._done.address
        made.append(Launch(function(end), (1, 1, 1), end.block, end.pack(**arguments)))
        return made

    def _capture(self, device: Device, launches: list[Launch], resources: ExitStack) -> Graph:
        """The mailboxes on a branch beside the main one, as in a step."""
        main = resources.enter_context(Stream(device, "capture"))
        side = resources.enter_context(Stream(device, "capture of a side branch"))
        fork, join = (resources.enter_context(Event(device, name)) for name in ("fork", "join"))

        def work() -> None:
            for launch in launches[:-1]:
                main.record(fork)
                side.wait_for(fork)
                launch.enqueue(side)
                side.record(join)
                main.wait_for(join)
            launches[-1].enqueue(main)

        return resources.enter_context(Graph(main, work, "self-test"))


class _DeviceArrays:
    """Copies of small arrays on the GPU."""

    def __init__(self, device: Device, stream: Stream, resources: ExitStack) -> None:
        self._device, self._stream, self._resources = device, stream, resources
        self._sources: list[NDArray[np.generic]] = []

    def place(self, array: NDArray[np.generic]) -> int:
        """The address of the copy, which is there after `settle`."""
        n_bytes = slot_bytes(array.nbytes)
        buffer = self._resources.enter_context(DeviceBuffer(self._device, n_bytes, "self-test"))
        self._stream.upload(buffer.address, array.ctypes.data, array.nbytes)
        self._sources.append(array)
        return buffer.address

    def settle(self) -> None:
        self._stream.synchronize()
        self._sources.clear()


def _weight(role: str, rng: np.random.Generator, n_rows: int, n_elems: int) -> Weight:
    """N_EXPERT random matrices."""
    blocks = np.zeros((N_EXPERT, n_rows, n_elems // FORMAT.block_elems), FORMAT.layout)
    scale, codes = FORMAT.layout.names or ("", "")
    blocks[scale] = rng.integers(1, 10, blocks.shape) / 1024
    blocks[codes] = rng.integers(-127, 128, blocks[codes].shape)
    data = blocks.view(np.uint8).reshape(N_EXPERT, n_rows, -1)
    return Weight(role, FORMAT, (n_elems, n_rows, N_EXPERT), data)


def _answers(weights: dict[str, Weight], x: F32) -> F32:
    """f32[N_EXPERT, N_EMBD], by the definition of the arithmetic."""
    records = quantize_rows(FORMAT.activation, x)
    rows = []
    for expert in range(N_EXPERT):
        gate, up, down = (weights[role].data[expert] for role in ("gate", "up", "down"))
        hidden = silu_mul(dot_rows(FORMAT, gate, records), dot_rows(FORMAT, up, records))
        rows.append(dot_rows(FORMAT, down, quantize_rows(FORMAT.activation, hidden))[0])
    return np.array(rows)
