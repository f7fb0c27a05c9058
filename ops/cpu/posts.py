"""What the team and a GPU say to each other about a layer: posts and forecasts, signs of life, and
that one of them has given up.

`a` is a `SERVE` record of `ops.cpu.serve`, the words are those of `ops.exchange`.
"""

from __future__ import annotations

import numpy as np

from ops import exchange
from ops.cpu.cycles import YIELD_AFTER, YIELD_EVERY, cycle_counter
from ops.cpu.job import kernel_njit
from ops.cpu.memory import atomic_load, atomic_store, call_i64, load_i32, load_i64, pause

EPOCH, ABORT, TURN = 0, 8, 16
"""Words of `step` in the record."""
BEAT_CYCLES = 1 << 20  # well below a millisecond: the line stays in every core's cache meanwhile
BEAT_PAUSES = 256
NOTHING, FORESEEN, POSTED = 0, 1, 2
U32 = 0xFFFFFFFF
HALF = 0x80000000


@kernel_njit
def beat(a):
    """Show that the team is alive, if nobody has done so lately."""
    heartbeat = a.exchange + exchange.HEARTBEAT
    now = cycle_counter()
    if now - load_i64(heartbeat) > BEAT_CYCLES or now < load_i64(heartbeat):
        atomic_store(heartbeat, now)


@kernel_njit
def sequence_of(a):
    """The layer's number, as in `ops.exchange`."""
    return (load_i64(a.step + EPOCH) * a.n_layers + a.layer + 1) & U32


@kernel_njit
def is_given_up(a):
    """Whether nobody wants the step's answers any longer: the GPU says so, or the host."""
    epoch = load_i64(a.step + EPOCH)
    failed = atomic_load(a.exchange + exchange.FAILED + 8 * (epoch & 1)) & U32
    return failed == (epoch | 1) or atomic_load(a.step + ABORT) != 0


@kernel_njit
def wait_for_layer(a):
    """POSTED once the layer is posted, FORESEEN once it brings a forecast alone; else, if it misses
    nothing or the step is given up, NOTHING."""
    epoch = load_i64(a.step + EPOCH)
    number = sequence_of(a)
    n_pauses = 0
    while True:
        foreseen = (atomic_load(a.exchange + exchange.FORESEEN) - number) & U32
        ahead = (atomic_load(a.exchange + exchange.POSTED) - number) & U32
        if ahead == 0:
            return POSTED
        if ahead >= HALF and foreseen == 0:
            return FORESEEN
        if ahead < HALF or foreseen < HALF:
            return NOTHING
        done = np.int64(load_i32(a.done))
        if (done - epoch) & U32 < HALF or load_i64(a.step + ABORT) != 0:
            # The step ended, so a post of this layer came before.
            posted = (atomic_load(a.exchange + exchange.POSTED) - number) & U32 == 0
            return POSTED if posted else NOTHING
        pause()
        n_pauses += 1
        if n_pauses % BEAT_PAUSES == 0:
            beat(a)
        if n_pauses > YIELD_AFTER and n_pauses % YIELD_EVERY == 0:
            call_i64(a.sched_yield, (0,))
