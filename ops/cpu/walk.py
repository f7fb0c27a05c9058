"""The compiled inside of the worker team: claiming chunks, walking programs, sleeping.

One control block serves a team.  The claim word holds (number of chunks << 32 | next chunk) of the
job being worked on; a worker owns what it has added to the word, as far as the job has it.  Adding
never fails, so many workers get their chunks in turn; whoever looked at an earlier job owns chunks
of the one that it added to, or none.  A job has ended when as many chunks are finished as it had,
so a worker that is descheduled *without* a chunk delays nobody.  The worker that finishes the last
chunk moves on to the next job; jobs of one chunk it runs itself, without telling the others.
"""

from __future__ import annotations

from numba import njit

from ops.cpu.cycles import YIELD_AFTER, YIELD_EVERY, cycle_counter
from ops.cpu.memory import (
    atomic_add,
    atomic_load,
    atomic_store,
    call,
    call_i64,
    compare_and_swap,
    fence,
    load_i64,
    pause,
    store_i64,
)
from ops.cpu.program import (
    END_JOB,
    EVENT,
    FIRST_JOB,
    LINE,
    N_CHUNKS_OFFSET,
    N_FINISHED,
    ONE,
    RUNNING,
)

# The control block: one cache line a word that several threads write.  The job that is worked on
# lies beside its claim word: one line to fetch.
CLAIM, N_DONE, BUSY, WAKE, SLEEPING, STOP, HEAD, TAIL, LIBC, RING = (LINE * i for i in range(10))
RING_SLOTS = 64
CONTROL_BYTES = RING + 8 * RING_SLOTS
# Words written only by the worker that moves on.
FUNCTION, ARGS, JOB_AT, JOB_END, PROGRAM = (CLAIM + 8 * i for i in range(1, 6))
# Words of the line LIBC: addresses of functions, the number of the futex call (0: none), and how
# many workers there are.
SYSCALL, WRITE, USLEEP, YIELD, FUTEX, N_WORKERS = (LIBC + 8 * i for i in range(6))

NEXT = 0xFFFFFFFF
FUTEX_WAIT_PRIVATE = 128
FUTEX_WAKE_PRIVATE = 129
SPIN_CYCLES = 500_000  # about 200 us between the end of a program and sleep
SLEEP_US = 200  # of a worker without futex, between two looks
WOKEN_EACH = 2  # sleepers woken by one that wakes: the submitter pays for one only
SHARES = 4  # a worker claims this fraction of its even share of the chunks that are left


@njit("void(int64, int64)", nogil=True, cache=True)
def wake(control, n_workers):
    """Wake up to `n_workers` sleeping workers."""
    atomic_add(control + WAKE, 1)
    fence()
    if atomic_load(control + SLEEPING) > 0 and load_i64(control + FUTEX) != 0:
        call_i64(
            load_i64(control + SYSCALL),
            (load_i64(control + FUTEX), control + WAKE, FUTEX_WAKE_PRIVATE, n_workers, 0, 0, 0),
        )


@njit("void(int64, int64, int64, int64)", nogil=True, cache=True)
def publish(control, function, args, n_chunks):
    """Offer the chunks of a job to all workers."""
    store_i64(control + FUNCTION, function)
    store_i64(control + ARGS, args)
    store_i64(control + N_DONE, 0)
    atomic_store(control + CLAIM, n_chunks << 32)


@njit("boolean(int64, int64)", cache=True)  # keeps the GIL: giving it up could cost 5 ms
def submit(control, program):
    """Queue a program, start it if the team is free; False if the ring is full.

    Callers exclude each other.  The caller never runs a job.
    """
    tail = load_i64(control + TAIL)
    if tail - atomic_load(control + HEAD) >= RING_SLOTS:
        return False
    atomic_store(program + RUNNING, 1)
    atomic_store(control + RING + 8 * (tail % RING_SLOTS), program)
    atomic_store(control + TAIL, tail + 1)
    fence()
    if compare_and_swap(control + BUSY, 0, 1):
        # A job without a function, after which no job is left: whoever takes it moves on.
        store_i64(control + PROGRAM, 0)
        store_i64(control + JOB_AT, 0)
        store_i64(control + JOB_END, LINE)
        publish(control, 0, 0, 1)
    wake(control, 1)
    return True


@njit("int64(int64)", nogil=True, cache=True)
def next_program(control):
    """The next queued program, or 0: then the team is free."""
    while True:
        head = load_i64(control + HEAD)
        if head != atomic_load(control + TAIL):
            program = atomic_load(control + RING + 8 * (head % RING_SLOTS))
            atomic_store(control + HEAD, head + 1)
            return program
        atomic_store(control + BUSY, 0)
        fence()
        if load_i64(control + HEAD) == atomic_load(control + TAIL):
            return 0
        if not compare_and_swap(control + BUSY, 0, 1):
            return 0


@njit("void(int64, int64)", nogil=True, cache=True)
def finish(control, program):
    """Say that a program ended; its memory may be gone once its event is written."""
    event = load_i64(program + EVENT)
    atomic_add(program + N_FINISHED, 1)
    atomic_store(program + RUNNING, 0)
    call_i64(load_i64(control + WRITE), (event, program + ONE, 8))


@njit("void(int64, int64)", nogil=True, cache=True)
def move_on(control, worker):
    """Go to the next job of more than one chunk, running those of one chunk on the way."""
    program = load_i64(control + PROGRAM)
    job = load_i64(control + JOB_AT)
    end = load_i64(control + JOB_END)
    job += LINE
    while True:
        while job == end:
            if program != 0:
                finish(control, program)
            program = next_program(control)
            if program == 0:
                return
            job = load_i64(program + FIRST_JOB)
            end = load_i64(program + END_JOB)
        n_chunks = load_i64(job + N_CHUNKS_OFFSET)
        if n_chunks > 1:
            break
        if n_chunks == 1:
            call(load_i64(job), (load_i64(job + 8), 0, worker))
        job += LINE
    store_i64(control + PROGRAM, program)
    store_i64(control + JOB_AT, job)
    store_i64(control + JOB_END, end)
    publish(control, load_i64(job), load_i64(job + 8), n_chunks)


@njit("int64(int64)", nogil=True, cache=True)
def chunks_left(control):
    """How many chunks nobody has claimed; not above 0: none."""
    claim = atomic_load(control + CLAIM)
    return (claim >> 32) - (claim & NEXT)


@njit("void(int64, int64)", nogil=True, cache=True)
def drain(control, worker):
    """Take chunks until none is left to take: several while many are left, one of the last ones.

    A claim moves a cache line from core to core, which takes as long as a small chunk.
    """
    shares = SHARES * load_i64(control + N_WORKERS)
    while True:
        left = chunks_left(control)
        if left <= 0:
            return
        wanted = max(1, left // shares)
        claim = atomic_add(control + CLAIM, wanted)
        first, n_chunks = claim & NEXT, claim >> 32
        taken = min(wanted, n_chunks - first)
        if taken <= 0:
            return
        function = load_i64(control + FUNCTION)
        if function != 0:
            args = load_i64(control + ARGS)
            for chunk in range(first, first + taken):
                call(function, (args, chunk, worker))
        if atomic_add(control + N_DONE, taken) == n_chunks - taken:
            move_on(control, worker)


@njit("void(int64)", nogil=True, cache=True)
def sleep(control):
    """Sleep until `wake`, unless there is something to do already."""
    seen = atomic_load(control + WAKE)
    atomic_add(control + SLEEPING, 1)
    fence()
    idle = atomic_load(control + BUSY) == 0 and atomic_load(control + STOP) == 0
    if idle and load_i64(control + FUTEX) != 0:
        call_i64(
            load_i64(control + SYSCALL),
            (
                load_i64(control + FUTEX),
                control + WAKE,
                FUTEX_WAIT_PRIVATE,
                seen & 0xFFFFFFFF,
                0,
                0,
                0,
            ),
        )
    elif idle:
        call_i64(load_i64(control + USLEEP), (SLEEP_US,))
    atomic_add(control + SLEEPING, -1)
    if atomic_load(control + BUSY) != 0:
        wake(control, WOKEN_EACH)


@njit("void(int64, int64)", nogil=True, cache=True)
def work(control, worker):
    """A worker's life: take chunks while a program runs, spin a little after it, then sleep."""
    n_pauses = 0
    idle_since = cycle_counter()
    while atomic_load(control + STOP) == 0:
        if chunks_left(control) > 0:
            drain(control, worker)
            n_pauses = 0
            idle_since = cycle_counter()
            continue
        now = cycle_counter()
        if atomic_load(control + BUSY) != 0:
            idle_since = now
        if now - idle_since < SPIN_CYCLES:
            pause()
            n_pauses += 1
            if n_pauses >= YIELD_AFTER and n_pauses % YIELD_EVERY == 0:
                call_i64(load_i64(control + YIELD), (0,))
        else:
            sleep(control)
            n_pauses = 0
            idle_since = cycle_counter()


@njit("void(int64)", nogil=True, cache=True)
def stop(control):
    """Let every worker return."""
    atomic_store(control + STOP, 1)
    wake(control, 1 << 30)
