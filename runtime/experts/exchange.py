"""Exchange: how a GPU's steps have the CPU team compute the experts that they miss.

An executor, for each step:

    exchange.begin(epoch)           # before the launch: the team waits for the first layer
    graph.launch(stream)            # with a mailbox a MoE layer, see `mailbox`
    ... until its done word and `exchange.ended(epoch)`
    exchange.check(epoch)           # ExchangeStalled if the GPU gave up waiting

A step may begin behind one that has not ended. `abort` lets the team go when a step will not end
(a lost device). Nothing here waits.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ops import exchange as words
from ops.cpu.clock import CycleClock
from ops.cpu.team import Team, TeamError
from ops.exchange import FORECAST_TOKENS, ExchangeLayout
from ops.gpu.mailbox import NO_FORECAST, PATIENCE_NS, STATE_BYTES, Forecast, MailboxLaunch
from runtime.cuda.device import Device
from runtime.cuda.memory import DeviceBuffer, PinnedBuffer
from runtime.cuda.stream import Stream
from runtime.errors import EngineBug, ExchangeStalled
from runtime.experts.lost_steps import LostSteps
from runtime.experts.serve_program import ServeMemory, ServeProgram, record_bytes
from runtime.models.spec import MoeSpec
from runtime.models.weights import Weight

I8 = NDArray[np.int8]
F64 = NDArray[np.float64]
EARLIER = 2
"""Steps: a number that no step in flight has."""
TIMED_SECONDS = 30.0
"""Without progress a worker may take so long for what the host posts: its pages may come from a
disk."""
MOST_BEGUN = 2
"""Steps that have not ended: one is served, one waits behind it."""


@dataclass(frozen=True)
class ExchangeSizes:
    """The largest step that misses experts: its tokens."""

    n_tokens: int
    patience_ns: int = PATIENCE_NS


class Exchange:
    """The memory, the team's program and the mailboxes' arguments, for all MoE layers of a GPU.

    weights  by name; they, the team and the word at `done` outlive the exchange
    done     host address of the u32 that gets a step's epoch at its end
    """

    def __init__(
        self,
        device: Device,
        team: Team,
        weights: Mapping[str, Weight],
        layers: Sequence[MoeSpec],
        sizes: ExchangeSizes,
        done: int,
    ) -> None:
        """Raises: PinningFailed, OutOfDeviceMemory, CudaError; ValueError for layers whose gate and
        up take different activations."""
        self.team, self._layers, self._patience_ns = team, layers, sizes.patience_ns
        self._record_bytes = [record_bytes(weights, layer) for layer in layers]
        self.layout = ExchangeLayout(
            n_slots=sizes.n_tokens * max(layer.n_used for layer in layers),
            n_tokens=sizes.n_tokens,
            record_bytes=max(self._record_bytes),
            n_rows=max(layer.down.n_out for layer in layers),
            forecast_bytes=forecast_bytes(layers),
        )
        with ExitStack() as resources:
            self._memory = resources.enter_context(
                PinnedBuffer(device, self.layout.n_bytes, "exchange")
            )
            self._state = _zeroed(device, resources)
            memory = ServeMemory(weights, layers, self.layout, self._memory.host, team.n_threads)
            self.missing: I8 = memory.missing
            """i8[n_layers, n_expert]: 0 for the experts that steps have the team compute; whoever
            knows keeps it up to date, or leaves it."""
            self._serves = [ServeProgram(memory, done) for _ in range(MOST_BEGUN)]
            for serve in self._serves:
                resources.callback(serve.program.close)
            self._resources = resources.pop_all()
        self._done = np.ctypeslib.as_array((ctypes.c_uint32 * 1).from_address(done))
        self._lost = LostSteps(self._memory.view[words.FAILED :][:16].view(np.uint32))
        self._begun: list[int | None] = [None] * MOST_BEGUN  # the last step of each program
        self._next = 0
        self._clock = CycleClock()

    @property
    def memory(self) -> NDArray[np.uint8]:
        """What the GPUs and the team share, as in `ops.exchange`."""
        return self._memory.view

    def on(self, device: Device, first_layer: int) -> Mailboxes:
        """The mailboxes of a GPU whose first MoE layer has this number.

        Raises: OutOfDeviceMemory, CudaError.
        """
        state = _zeroed(device, self._resources)
        return Mailboxes(self, first_layer, self._memory.address_on(device), state.address)

    def mailbox(
        self, layer: int, n_tokens: int, forecast: Forecast = NO_FORECAST
    ) -> tuple[MailboxLaunch, dict[str, int]]:
        """The launch of MoE layer `layer` in steps of up to n_tokens, and its own arguments.

        The step's are missing: epoch, counts, experts, choices, records, y and slots. A forecast
        goes to the team if there is room for it.
        """
        if forecast.n_bytes > self.layout.forecast_bytes:
            forecast = NO_FORECAST
        spec = self._layers[layer]
        launch = MailboxLaunch(
            n_slots=n_tokens * spec.n_used,
            n_tokens=n_tokens,
            record_bytes=self._record_bytes[layer],
            n_rows=spec.down.n_out,
        )
        return launch, {
            "exchange": self._memory.address,
            "state": self._state.address,
            "patience": self._patience_ns,
            "layer": layer,
            "n_layers": len(self._layers),
            **launch.sizes(self.layout, forecast),
        }

    @property
    def at_work(self) -> int:
        """A number that changes as long as the team computes what the GPU waits for; 0 where the
        GPU waits for nothing."""
        waits = self._word(words.POSTED)[0] == self._word(words.SERVED)[0]
        return int(self._memory.view[words.HEARTBEAT :][:8].view(np.uint64)[0]) if waits else 0

    @property
    def idle(self) -> bool:
        """Whether the team has finished all steps."""
        return not any(serve.program.running for serve in self._serves)

    def ended(self, epoch: int) -> bool:
        """Whether the team has finished step `epoch`, or never had anything to do for it."""
        if epoch not in self._begun:
            return True
        return not self._serves[self._begun.index(epoch)].program.running

    def begin(self, epoch: int, *, behind: bool = False) -> None:
        """Have the team serve step `epoch`, from now, or the end of the step before, until its end.

        behind: the step before may not have ended

        Raises: EngineBug while a worker is still at an earlier step.
        """
        serve = self._serves[self._next]
        if serve.program.running or not (behind or self.idle):
            raise EngineBug("the CPU workers have not finished an earlier step")
        self._take_event(self._next)
        serve.begin(epoch)
        try:
            self.team.submit(serve.program)
        except TeamError as error:
            raise EngineBug(f"the CPU workers cannot serve a step: {error}") from error
        self._begun[self._next] = epoch
        self._next = (self._next + 1) % MOST_BEGUN

    def check(self, epoch: int, *, behind: bool = False) -> None:
        """Raises: ExchangeStalled if the GPU waited in vain in that step, or in the one before it
        and this one was launched `behind` it."""
        layer = self._lost.take(epoch, behind=behind)
        if layer is not None:
            raise _stalled(self._patience_ns / 1e9, layer)

    def timed(self, layer: int, experts: Sequence[int]) -> float:
        """Seconds that the team takes for these experts of a MoE layer, missed by one token: the
        host posts them, as no GPU does.  No step is in flight, and what is posted counts for none.

        Blocks.  Raises: ExchangeStalled where a worker shows no progress for `TIMED_SECONDS`; it
        is let go, and steps have to wait for it.
        """
        epoch = (int(self._done[0]) - EARLIER) & 0xFFFFFFFF  # one that has ended, for the team
        number = words.sequence(epoch, len(self._layers), layer)
        missed = np.arange(len(experts), dtype=np.uint32) | np.array(experts, np.uint32) << 16
        self._word(words.MISSES, len(experts))[:] = missed
        self._word(words.N_MISSES, 2)[:] = len(experts), 1
        self._word(words.POSTED)[0] = number
        serve = self._serves[self._next]  # both have served the same epoch by the second call
        self.begin(epoch)
        self._until_idle(layer)
        posted, served = serve.times.layers(self._clock)[layer]
        self._word(words.POSTED)[0] = self._word(words.FORESEEN)[0] = 0
        return float(served - posted)

    def _until_idle(self, layer: int) -> None:
        """Wait for the end of what the host has posted."""
        heartbeat, news = self._word(words.HEARTBEAT, 2), time.monotonic()
        seen = heartbeat.tolist()
        while not self.idle:
            time.sleep(0)
            now = heartbeat.tolist()
            if now != seen:
                seen, news = now, time.monotonic()
            elif time.monotonic() - news > TIMED_SECONDS:
                self.abort()
                raise _stalled(TIMED_SECONDS, layer)

    def _word(self, at: int, n: int = 1) -> NDArray[np.uint32]:
        """Some u32 of the shared memory."""
        return self._memory.view[at:][: 4 * n].view(np.uint32)

    def layer_times(self, epoch: int) -> F64:
        """f64[n_layers, 2] of step `epoch`, which has ended: see `ServeTimes.layers`."""
        if epoch not in self._begun:
            return np.zeros((len(self._layers), 2))
        return self._serves[self._begun.index(epoch)].times.layers(self._clock)

    def team_seconds(self) -> tuple[float, float]:
        """How long the team has computed missed experts so far, and waited for the GPU."""
        totals = [serve.times.totals(self._clock) for serve in self._serves]
        return sum(serving for _, serving in totals), sum(waiting for waiting, _ in totals)

    def abort(self) -> None:
        """Let the team's runs end although the GPU's steps will not."""
        for serve in self._serves:
            serve.abort()

    def close(self) -> None:
        """Wait for the workers, which are let go, then give the memory back."""
        self.abort()
        for index in range(MOST_BEGUN):
            self._take_event(index)
        self._resources.close()

    def _take_event(self, index: int) -> None:
        """An event may be given back, or waited for anew, once the last one was taken."""
        if self._begun[index] is not None:
            self._serves[index].program.wait()
            self._begun[index] = None


class Mailboxes:
    """The mailboxes of one of several GPUs that share an exchange: layers are numbered from its
    first one on; see `Exchange.mailbox`."""

    def __init__(self, exchange: Exchange, first_layer: int, memory: int, state: int) -> None:
        """memory, state: addresses for the GPU's kernels."""
        self._exchange, self._first_layer = exchange, first_layer
        self._own = {"exchange": memory, "state": state}

    def mailbox(
        self, layer: int, n_tokens: int, forecast: Forecast = NO_FORECAST
    ) -> tuple[MailboxLaunch, dict[str, int]]:
        launch, arguments = self._exchange.mailbox(self._first_layer + layer, n_tokens, forecast)
        return launch, {**arguments, **self._own}


def forecast_bytes(layers: Sequence[MoeSpec]) -> int:
    """Room for forecasts whose rows may lie between other values: as far apart as two rows and a
    few values more."""
    widest = max(layer.n_expert for layer in layers)
    return FORECAST_TOKENS * 4 * (2 * -(-widest // 4) * 4 + 8)


def _stalled(seconds: float, layer: int) -> ExchangeStalled:
    return ExchangeStalled(
        f"the CPU workers showed no progress for {seconds:g} s in MoE layer {layer}"
    )


def _zeroed(device: Device, resources: ExitStack) -> DeviceBuffer:
    """What the mailboxes of a GPU tell each other."""
    state = resources.enter_context(DeviceBuffer(device, STATE_BYTES, "mailboxes"))
    with Stream(device, "exchange") as stream:
        stream.fill(state.address, 0, STATE_BYTES)
        stream.synchronize()
    return state
