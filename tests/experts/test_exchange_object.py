"""Exchange: what an executor meets when the workers are late, gone, or let go."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ops import exchange as words
from ops.cpu.program import aligned
from ops.cpu.team import Team, acquire_team
from runtime.cuda.device import Device
from runtime.errors import DeviceError, EngineBug, ExchangeStalled
from runtime.experts import exchange as module
from runtime.experts.exchange import Exchange, ExchangeSizes
from runtime.experts.serve_times import ServeTimes
from tests.support.fake_driver import FakeDriver
from tests.support.moe_layers import MoeLayers


@pytest.fixture
def team() -> Iterator[Team]:
    with acquire_team(2) as shared:
        yield shared


DONE = aligned(1, np.uint32)


def exchange_of(device: Device, team: Team) -> Exchange:
    layers = MoeLayers()
    layers.add("Q8_0", "Q8_0", (64, 64), 4, 2)
    layers.add("Q8_0", "Q8_0", (64, 32), 4, 2)
    DONE[0] = 0
    sizes = ExchangeSizes(n_tokens=3)
    return Exchange(device, team, layers.weights, layers.specs, sizes, DONE.ctypes.data)


def test_a_step_begins_only_after_the_one_before(device: Device, team: Team) -> None:
    exchange = exchange_of(device, team)
    exchange.begin(1)
    assert not exchange.idle
    with pytest.raises(EngineBug, match="have not finished an earlier step"):
        exchange.begin(2)
    DONE[0] = 1
    while not exchange.idle:
        pass
    exchange.begin(2)
    exchange.abort()
    exchange.close()
    assert exchange.idle


def test_a_step_waits_behind_the_one_that_is_served(device: Device, team: Team) -> None:
    exchange = exchange_of(device, team)
    exchange.begin(1)
    exchange.begin(2, behind=True)
    with pytest.raises(EngineBug, match="have not finished an earlier step"):
        exchange.begin(3, behind=True)
    assert not exchange.ended(1)
    DONE[0] = 1
    while not exchange.ended(1):
        pass
    assert not exchange.ended(2)
    with pytest.raises(EngineBug, match="have not finished an earlier step"):
        exchange.begin(3)
    exchange.begin(3, behind=True)
    DONE[0] = 3
    while not exchange.idle:
        pass
    assert exchange.ended(2) and exchange.ended(3)
    exchange.close()


def gave_up(exchange: Exchange, epoch: int, layer: int) -> None:
    """What the GPU says of a step."""
    place = exchange._memory.view[words.FAILED + 8 * (epoch % 2) :][:8].view(np.uint32)
    place[:] = words.failed_number(epoch), layer


def test_a_step_behind_one_that_failed_fails_too(device: Device, team: Team) -> None:
    exchange = exchange_of(device, team)
    for epoch in (7, (1 << 32) - 1):
        gave_up(exchange, epoch, 1)
        with pytest.raises(ExchangeStalled, match="for 2 s in MoE layer 1"):
            exchange.check(epoch)
        following = [(epoch + n) % (1 << 32) for n in (1, 2, 3, 4, 5)]
        exchange.check(following[0])
        for later in following[:3]:
            with pytest.raises(ExchangeStalled, match="for 2 s in MoE layer 1"):
                exchange.check(later, behind=True)
        exchange.check(following[3])
        exchange.check(following[4], behind=True)
    exchange.close()


@pytest.mark.parametrize("epoch", [6, 7, 0, (1 << 32) - 1])
def test_a_step_counts_although_the_one_behind_it_has_failed(
    epoch: int, device: Device, team: Team
) -> None:
    exchange = exchange_of(device, team)
    after = (epoch + 1) % (1 << 32)
    gave_up(exchange, after, 0)
    exchange.check(epoch, behind=True)
    with pytest.raises(ExchangeStalled, match="layer 0"):
        exchange.check(after, behind=True)
    exchange.close()


def test_two_steps_in_flight_fail_in_layers_of_their_own(device: Device, team: Team) -> None:
    exchange = exchange_of(device, team)
    gave_up(exchange, 6, 1)
    gave_up(exchange, 7, 0)
    with pytest.raises(ExchangeStalled, match="layer 1"):
        exchange.check(6)
    with pytest.raises(ExchangeStalled, match="layer 0"):
        exchange.check(7)
    exchange.close()


def test_a_failed_step_is_reported_once(device: Device, team: Team) -> None:
    exchange = exchange_of(device, team)
    gave_up(exchange, 7, 1)
    exchange.check(5)
    with pytest.raises(ExchangeStalled, match="for 2 s in MoE layer 1"):
        exchange.check(7)
    exchange.check(7)
    exchange.close()


def test_the_team_is_at_work_while_the_gpu_waits_for_its_layer(device: Device, team: Team) -> None:
    exchange = exchange_of(device, team)

    def store(at: int, value: int) -> None:
        exchange.memory[at:][:4].view(np.uint32)[0] = value

    assert exchange.at_work == 0
    store(words.HEARTBEAT, 9)
    store(words.POSTED, 5)
    store(words.SERVED, 5)
    assert exchange.at_work == 9
    store(words.SERVED, 6)  # it waits itself
    assert exchange.at_work == 0
    exchange.close()


def test_a_team_that_is_gone_is_a_bug(device: Device) -> None:
    with acquire_team(2) as team:
        exchange = exchange_of(device, team)
    with pytest.raises(EngineBug, match="closed"):
        exchange.begin(1)
    exchange.close()


def test_mailboxes_are_as_large_as_their_layer(device: Device, team: Team) -> None:
    exchange = exchange_of(device, team)
    launch, arguments = exchange.mailbox(1, 2)
    assert (launch.n_slots, launch.n_rows, arguments["n_used"]) == (4, 64, 2)
    assert (arguments["layer"], arguments["n_layers"]) == (1, 2)
    assert exchange.layout.n_slots == 6
    exchange.close()


@pytest.mark.parametrize("nth", range(4))
def test_no_memory_leaves_nothing_behind(
    device: Device, team: Team, fake: FakeDriver, nth: int
) -> None:
    fake.out_of_memory_at = fake.n_allocating + nth
    before = dict(fake.live)
    try:
        exchange = exchange_of(device, team)
    except DeviceError as error:
        assert "memory" in str(error).lower()
        assert fake.live == before
        return
    exchange.close()


def test_what_is_timed_is_read_from_the_run_that_was_timed(
    device: Device, team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = exchange_of(device, team)
    DONE[0] = 100
    times, layers_of = [serve.times for serve in exchange._serves], ServeTimes.layers
    read: list[ServeTimes] = []

    def layers(self: ServeTimes, clock: Any) -> Any:
        read.append(self)
        return layers_of(self, clock)

    monkeypatch.setattr(ServeTimes, "layers", layers)
    seconds = [exchange.timed(call % 2, [0, 1, 2]) for call in range(4)]
    assert all(s > 0 for s in seconds)
    assert [times.index(one) for one in read] == [0, 1, 0, 1]
    exchange.close()


def test_workers_that_never_return_end_what_is_timed(
    device: Device, team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = exchange_of(device, team)
    DONE[0] = 100
    monkeypatch.setattr(module, "TIMED_SECONDS", 0.05)
    with monkeypatch.context() as stuck:
        begin = Exchange.begin

        def never_ends(self: Exchange, epoch: int) -> None:
            begin(self, epoch)
            stuck.setattr(Exchange, "idle", False)

        stuck.setattr(Exchange, "begin", never_ends)
        with pytest.raises(ExchangeStalled, match=r"no progress for 0.05 s in MoE layer 1"):
            exchange.timed(1, [0, 1])
    while not exchange.idle:
        pass
    assert exchange.timed(1, [0, 1]) > 0  # the next one may succeed
    exchange.close()
