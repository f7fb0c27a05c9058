"""Exchange: how a GPU's steps have the CPU team compute the experts that they miss.

An executor, for each step:

    exchange.begin(epoch)           # before the launch: the team waits for the first layer
    graph.launch(stream)            # with a mailbox a MoE layer, see `mailbox`
    ... until its done word and `exchange.idle`
    exchange.check(epoch)           # ExchangeStalled if the GPU gave up waiting

`abort` lets the team go when the step will not end (a lost device). Nothing here waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from ops import exchange as words
from ops.cpu.team import Team, TeamError
from ops.exchange import ExchangeLayout
from ops.gpu.mailbox import PATIENCE_NS, STATE_BYTES, MailboxLaunch
from runtime.cuda.device import Device
from runtime.cuda.memory import DeviceBuffer, PinnedBuffer
from runtime.cuda.stream import Stream
from runtime.errors import EngineBug, ExchangeStalled
from runtime.experts.serve_program import ServeProgram, record_bytes
from runtime.models.spec import MoeSpec
from runtime.models.weights import Weight


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
        )
        with ExitStack() as resources:
            self._memory = resources.enter_context(
                PinnedBuffer(device, self.layout.n_bytes, "exchange")
            )
            self._state = _zeroed(device, resources)
            self._serve = ServeProgram(
                weights, layers, self.layout, self._memory.host, done, team.n_threads
            )
            resources.callback(self._serve.program.close)
            self._resources = resources.pop_all()
        self._failed = self._memory.view[words.FAILED :][:8].view(np.uint32)
        self._submitted = False

    def on(self, device: Device, first_layer: int) -> Mailboxes:
        """The mailboxes of a GPU whose first MoE layer has this number.

        Raises: OutOfDeviceMemory, CudaError.
        """
        state = _zeroed(device, self._resources)
        return Mailboxes(self, first_layer, self._memory.address_on(device), state.address)

    def mailbox(self, layer: int, n_tokens: int) -> tuple[MailboxLaunch, dict[str, int]]:
        """The launch of MoE layer `layer` in steps of up to n_tokens, and its own arguments.

        The step's are missing: epoch, counts, experts, choices, records, y and slots.
        """
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
            **launch.sizes(self.layout),
        }

    @property
    def idle(self) -> bool:
        """Whether the team has finished the last step."""
        return not self._serve.program.running

    def begin(self, epoch: int) -> None:
        """Have the team serve step `epoch`, from now until its end.

        Raises: ExchangeStalled while a worker is still at an earlier step.
        """
        program = self._serve.program
        if program.running:
            raise ExchangeStalled("the CPU workers have not finished an earlier step")
        self._take_event()
        self._serve.begin(epoch)
        try:
            self.team.submit(program)
        except TeamError as error:
            raise EngineBug(f"the CPU workers cannot serve a step: {error}") from error
        self._submitted = True

    def check(self, epoch: int) -> None:
        """Raises: ExchangeStalled if the GPU waited in vain in that step."""
        if int(self._failed[0]) == epoch:
            layer = int(self._failed[1])
            self._failed[0] = 0
            raise ExchangeStalled(
                f"the CPU workers showed no progress for {self._patience_ns / 1e9:g} s in MoE "
                f"layer {layer}"
            )

    def abort(self) -> None:
        """Let the team's current run end although the GPU's step will not."""
        self._serve.abort()

    def close(self) -> None:
        """Wait for the workers, which are let go, then give the memory back."""
        self.abort()
        self._take_event()
        self._resources.close()

    def _take_event(self) -> None:
        """An event may be given back, or waited for anew, once the last one was taken."""
        if self._submitted:
            self._serve.program.wait()
            self._submitted = False


class Mailboxes:
    """The mailboxes of one of several GPUs that share an exchange: layers are numbered from its
    first one on; see `Exchange.mailbox`."""

    def __init__(self, exchange: Exchange, first_layer: int, memory: int, state: int) -> None:
        """memory, state: addresses for the GPU's kernels."""
        self._exchange, self._first_layer = exchange, first_layer
        self._own = {"exchange": memory, "state": state}

    def mailbox(self, layer: int, n_tokens: int) -> tuple[MailboxLaunch, dict[str, int]]:
        launch, arguments = self._exchange.mailbox(self._first_layer + layer, n_tokens)
        return launch, {**arguments, **self._own}


def _zeroed(device: Device, resources: ExitStack) -> DeviceBuffer:
    """What the mailboxes of a GPU tell each other."""
    state = resources.enter_context(DeviceBuffer(device, STATE_BYTES, "mailboxes"))
    with Stream(device, "exchange") as stream:
        stream.fill(state.address, 0, STATE_BYTES)
        stream.synchronize()
    return state
