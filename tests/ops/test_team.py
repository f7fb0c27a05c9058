"""The worker team: order, sharing, sleep, fork, and what a dispatch costs."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from numba import njit
from numpy.typing import NDArray

from ops.cpu import cores
from ops.cpu.job import job_kernel
from ops.cpu.memory import atomic_add, load_i64, store_i64
from ops.cpu.program import Program, aligned
from ops.cpu.team import Team, TeamError, acquire_team

MAX_DISPATCH_US = 20.0  # ten times what an idle machine needs; of the best of several repeats


@job_kernel
def nothing(args: int, chunk: int, worker: int) -> None:
    """Only the dispatch."""


@job_kernel
def count(args: int, chunk: int, worker: int) -> None:
    """args[0] counts chunks, args[1] adds up their numbers."""
    atomic_add(args, 1)
    atomic_add(args + 8, chunk)


@njit
def last_of(address):
    """The word, read again by each caller."""
    return load_i64(address)


@job_kernel
def expect(args: int, chunk: int, worker: int) -> None:
    """args: (address of a counter, value it must have, errors)."""
    if last_of(load_i64(args)) != load_i64(args + 8):
        atomic_add(args + 16, 1)


@job_kernel
def set_chunks(args: int, chunk: int, worker: int) -> None:
    """args: (address of a job's number of chunks, new number)."""
    store_i64(load_i64(args), load_i64(args + 8))


@pytest.fixture
def team() -> Iterator[Team]:
    with acquire_team(2) as shared:
        yield shared


def words(*values: int) -> NDArray[np.int64]:
    made = aligned(len(values), np.int64)
    made[:] = values
    return made


def test_every_chunk_runs_once_and_jobs_wait_for_each_other(team: Team) -> None:
    program = Program(400)
    counter, checks, total = words(0, 0), [], 0
    for i in range(200):
        n_chunks = 5 * i % 43  # of many chunks a worker takes several at a time
        program.add("count", count.address, counter, n_chunks)
        total += n_chunks
        checks.append(words(counter.ctypes.data, total, 0))
        program.add("expect", expect.address, checks[-1], 3)
    for repeat in range(20):
        counter[0] = 0
        team.run(program)
        assert counter[0] == total, repeat
    assert sum(check[2] for check in checks) == 0
    assert counter[1] == 20 * sum(n * (n - 1) // 2 for n in (5 * i % 43 for i in range(200)))
    program.close()


def test_a_job_sets_the_chunks_of_a_later_one(team: Team) -> None:
    program = Program(3)
    counter = words(0, 0)
    args = words(0, 0)
    program.add("set", set_chunks.address, args)
    later = program.add("count", count.address, counter, 0)
    args[0] = program.n_chunks_address(later)
    for n_chunks in (5, 0, 1, 64):
        counter[0] = 0
        args[1] = n_chunks
        team.run(program)
        assert counter[0] == n_chunks
    program.close()


def test_an_empty_program_ends(team: Team) -> None:
    program = Program(1)
    team.run(program)
    team.run(program)
    program.close()


def test_dispatch(team: Team, record_property: pytest.FixtureRequest) -> None:
    """10 000 empty jobs; the cost goes to the report."""
    for n_chunks in (1, 2, 8):
        program = Program(10_000)
        for _ in range(10_000):
            program.add("nothing", nothing.address, None, n_chunks)
        best = min(_seconds(team, program) for _ in range(5))
        record_property(f"us_per_job_of_{n_chunks}_chunks", best / 10_000 * 1e6)
        assert best / 10_000 * 1e6 <= MAX_DISPATCH_US
        program.close()


def _seconds(team: Team, program: Program) -> float:
    started = time.perf_counter()
    team.run(program)
    return time.perf_counter() - started


def test_submit_returns_at_once(team: Team, record_property: pytest.FixtureRequest) -> None:
    program = Program(1)
    program.add("nothing", nothing.address, None, 2)
    times = []
    for _ in range(200):
        started = time.perf_counter()
        team.submit(program)
        times.append(time.perf_counter() - started)
        program.wait()
    record_property("submit_us", float(np.median(times)) * 1e6)
    assert min(times) * 1e6 <= MAX_DISPATCH_US
    program.close()


def test_two_loops_in_two_threads_share_the_team(team: Team) -> None:
    n_runs, sums = 300, [0, 0]

    async def drive(which: int) -> None:
        loop, counter, program = asyncio.get_running_loop(), words(0, 0), Program(3)
        ended = asyncio.Event()
        loop.add_reader(program.event, lambda: (os.eventfd_read(program.event), ended.set()))
        for _ in range(3):
            program.add("count", count.address, counter, 4)
        with acquire_team(1) as mine:
            for _ in range(n_runs):
                mine.submit(program)
                await ended.wait()
                ended.clear()
        loop.remove_reader(program.event)
        program.close()
        sums[which] = int(counter[0])

    threads = [threading.Thread(target=asyncio.run, args=(drive(i),)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == [12 * n_runs, 12 * n_runs]


def test_more_programs_than_workers_queue_in_order(team: Team) -> None:
    order = words(0, 0)
    programs = [Program(2) for _ in range(40)]
    checks = []
    for i, program in enumerate(programs):
        checks.append(words(order.ctypes.data, 4 * i, 0))
        program.add("expect", expect.address, checks[-1], 2)
        program.add("count", count.address, order, 4)
    for program in programs:
        team.submit(program)
    for program in programs:
        program.wait()
    assert order[0] == 160
    assert sum(check[2] for check in checks) == 0
    for program in programs:
        program.close()


def test_the_team_is_shared_and_ends_with_its_last_holder() -> None:
    before = threading.active_count()
    first = acquire_team(2)
    second = acquire_team(1)
    assert second is first
    assert threading.active_count() == before + 2
    with pytest.raises(TeamError, match="2 workers"):
        acquire_team(3)
    first.release()
    assert threading.active_count() == before + 2
    second.release()
    assert threading.active_count() == before
    with pytest.raises(TeamError, match="closed"):
        first.submit(Program(1))
    with acquire_team(1) as third:
        assert third is not first
        third.run(Program(1))


def test_no_number_means_the_running_team_whatever_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cores, "default_threads", lambda: 3)
    with acquire_team(1) as small, acquire_team() as second:
        assert second is small
    with acquire_team() as own:
        assert own.n_threads == 3
    with pytest.raises(TeamError, match="at least 1"):
        acquire_team(0)


def test_a_team_of_its_own_size_spares_cores_but_is_never_empty() -> None:
    n_cores = cores.default_threads()
    for spare in (1, n_cores):
        with acquire_team(spare=spare) as made:
            assert made.n_threads == max(n_cores - spare, 1)


def test_a_program_runs_once_at_a_time(team: Team) -> None:
    program = Program(1)
    program._header[0]["running"] = 1
    with pytest.raises(TeamError, match="running already"):
        team.submit(program)
    program.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_refused(team: Team) -> None:
    program = Program(1)
    child = os.fork()
    if child == 0:
        try:
            team.submit(program)
        except TeamError as error:
            os._exit(0 if "fork" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    team.run(program)
    program.close()


def test_idle_workers_take_no_processor_time(team: Team) -> None:
    program = Program(1)
    program.add("nothing", nothing.address, None, 2)
    team.run(program)
    _wait_for_sleep(team)
    before = time.process_time()
    threading.Event().wait(0.25)
    assert time.process_time() - before < 0.05


def _wait_for_sleep(team: Team) -> None:
    deadline = time.monotonic() + 5
    while team.n_asleep < team.n_threads:
        assert time.monotonic() < deadline, "the workers never went to sleep"
        threading.Event().wait(0.001)
