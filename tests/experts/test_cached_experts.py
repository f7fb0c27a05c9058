"""The cache over a fake GPU: what the table names always holds the expert that it names."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from runtime.cuda.device import Device
from runtime.engine.gpu.expert_plan import even_slots, moe_layers_of, slots_bytes
from runtime.errors import DeviceLost, OutOfDeviceMemory
from runtime.experts import cached_experts
from runtime.experts.cache_settings import CacheSettings
from runtime.experts.cached_experts import CachedExperts
from runtime.experts.host_experts import HostExperts
from tests.support.cuda_constants import CUresult
from tests.support.fake_driver import FakeDriver
from tests.support.moe_layers import MoeLayers

N_USED = 2


@pytest.fixture
def layers() -> MoeLayers:
    made = MoeLayers()
    made.add("Q4_K", "Q6_K", (256, 256), 8, N_USED)
    made.add("Q8_0", "Q8_0", (64, 96), 6, N_USED)
    made.add("Q4_K", "Q6_K", (256, 256), 8, N_USED)
    return made


class Run:
    """Steps with random choices; a mirror of the GPU's table that sees the changes only."""

    def __init__(self, device: Device, layers: MoeLayers, **settings: Any) -> None:
        self.layers = layers
        self.host = HostExperts(layers.weights, layers.specs)
        self.pin = settings.pop("pin", True)
        if self.pin:
            self.host.pin(device)
        spec = layers.model_spec()
        self.experts = CachedExperts(device, spec, self.host, CacheSettings(**settings))
        self.experts.load(lambda n_bytes: None)
        self.table = self.experts.table()
        self.rng = np.random.default_rng(3)

    def step(self, favourites: int) -> NDArray[np.int32]:
        flat = self.table.reshape(-1, 4)
        for row, *addresses in self.experts.before_step():
            flat[row, :3] = addresses
        self.experts.while_running()
        self.check()
        pairs = [self.rng.permutation(favourites)[:N_USED] + 1 for _ in self.layers.specs]
        choices = np.array(pairs, np.int32)[:, None]
        self.experts.after_step(choices)
        return choices

    def check(self) -> None:
        """Every address of the table leads to the expert's bytes."""
        for layer, index in enumerate(self.layers.layer_numbers):
            spec = self.layers.specs[layer]
            for expert in range(spec.n_expert):
                for column, linear in enumerate((*spec.gate_up, spec.down)):
                    address = int(self.table[index, expert, column])
                    if address:
                        data = self.layers.weights[linear.weight].data[expert]
                        assert ctypes.string_at(address, data.nbytes) == data.tobytes()

    @property
    def n_addresses(self) -> int:
        return int((self.table[..., 0] != 0).sum())


def test_swaps_follow_the_use_and_the_table_never_lies(device: Device, layers: MoeLayers) -> None:
    run = Run(device, layers, slots=3, uploads_a_step=2)
    assert run.n_addresses == 9
    for _ in range(30):
        run.step(3)
    usage, resident = run.experts.usage, run.experts.cache.resident
    assert resident[:, 1:4].all()  # experts 1 to 3, whereas it began with 0 to 2
    assert usage.uploads >= 3
    assert usage.hits + usage.cpu_misses == 30 * 3 * N_USED and usage.in_place == 0
    assert 0 < usage.cpu_misses < 60
    for _ in range(30):
        run.step(5)
    assert run.n_addresses <= 9
    run.experts.close()


def test_first_experts_that_take_too_long_come_while_steps_run(
    device: Device, layers: MoeLayers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached_experts, "START_SECONDS", 0.0)
    run = Run(device, layers, slots=3, uploads_a_step=2)
    assert run.n_addresses == 0 and run.experts.cache.n_free.tolist() == [6, 3]
    for _ in range(12):
        run.step(3)
    assert run.n_addresses == 9 and run.experts.cache.resident[:, 1:4].all()
    still = Run(device, layers, slots=3, uploads_a_step=0)
    assert still.n_addresses == 9, "nothing would come later"
    run.experts.close()
    still.experts.close()


def test_many_choices_are_counted_as_few_are(device: Device, layers: MoeLayers) -> None:
    run = Run(device, layers, slots=3, uploads_a_step=0)
    few = run.rng.integers(-1, 6, (len(layers.specs), 4, N_USED)).astype(np.int32)
    run.experts.after_step(few)
    once = run.experts.usage.by_layer.copy()
    assert once.sum(axis=0).all(where=[True, True, False, False, True])
    run.experts.after_step(np.tile(few, (1, 20, 1)))
    counted = slice(0, 4)
    assert np.array_equal(run.experts.usage.by_layer[:, counted], 21 * once[:, counted])
    run.experts.after_step(few, fetched=True)
    assert run.experts.usage.fetched == once[:, 0].sum()
    run.experts.close()


def test_a_late_upload_is_used_when_it_is_there(
    device: Device, layers: MoeLayers, fake: FakeDriver
) -> None:
    run = Run(device, layers, slots=3)
    stream = run.experts._uploader._stream.handle
    with fake.hold(stream):
        for _ in range(8):
            run.step(3)
        assert run.n_addresses < 9  # victims are gone, their slots not yet filled
    run.step(3)
    assert run.n_addresses == 9
    run.experts.close()


def test_experts_are_read_in_place_as_far_as_asked(device: Device, layers: MoeLayers) -> None:
    run = Run(device, layers, slots=1, zero_copy=1.0)
    assert run.n_addresses == 22
    for _ in range(10):
        run.step(5)
    assert run.n_addresses == 22
    usage = run.experts.usage
    assert usage.cpu_misses == 0 and usage.in_place > 0 and usage.hits > 0
    run.experts.close()
    half = Run(device, layers, slots=0, uploads_a_step=0, zero_copy=0.5)
    assert 4 < half.n_addresses < 18
    half.experts.close()


def settle(run: Run) -> None:
    """Let the thread read what was started."""
    staging = run.experts._uploader._staging
    while len(staging._read) < len(run.experts._uploader._staged) and staging.failure is None:
        pass


def test_experts_that_are_not_pinned_come_through_staging_buffers(
    device: Device, layers: MoeLayers, fake: FakeDriver
) -> None:
    run = Run(device, layers, slots=2, zero_copy=1.0, uploads_a_step=2, pin=False)
    assert run.n_addresses == 6 and "registered" not in fake.live
    for _ in range(30):
        run.step(2)
        settle(run)
    usage, resident = run.experts.usage, run.experts.cache.resident
    assert resident[:, 1:3].all() and usage.uploads >= 3 and usage.in_place == 0
    assert fake.live["registered"] <= 2, "as many buffers as uploads a step"
    facts = run.experts.describe()
    assert facts["expert_swaps"] == "on" and facts["expert_pinned"] == "none: not asked for"
    run.experts.close()
    assert "registered" not in fake.live


def test_without_any_pinned_memory_what_is_there_stays(
    device: Device, layers: MoeLayers, fake: FakeDriver, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(device, layers, slots=2, pin=False)
    fake.fail["cuMemHostRegister"] = CUresult.CUDA_ERROR_OUT_OF_MEMORY
    for _ in range(10):
        run.step(5)
        settle(run)
    assert "no longer copied" in caplog.text
    assert run.experts.cache.resident.sum() >= 6 - 4 and run.n_addresses <= 6
    policy: Any = run.experts._policy
    assert len(policy._uses.recent) <= 3 * N_USED, "what is not looked at must not pile up"
    assert [n for n in fake.live if n == "registered"] == []
    run.experts.close()


def test_what_is_pinned_later_is_swapped_and_read_in_place_from_then_on(
    device: Device, layers: MoeLayers, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(device, layers, slots=1, zero_copy=1.0, pin=False)
    monkeypatch.setattr(run.experts._uploader._staging, "start", None)  # nothing comes that way
    monkeypatch.setattr(type(run.host), "pins_all", True)
    for _ in range(5):
        run.step(5)
    assert run.n_addresses == 3 and run.experts.usage.uploads == 0
    run.host.pin(device)
    for _ in range(3):
        run.step(5)
    assert run.n_addresses == 22 and run.experts.usage.in_place > 0
    for _ in range(10):
        run.step(5)
    assert run.n_addresses == 22 and run.experts.usage.uploads > 0
    run.experts.close()


def test_a_lost_device_is_named(device: Device, layers: MoeLayers, fake: FakeDriver) -> None:
    run = Run(device, layers, slots=2)
    for _ in range(3):
        run.step(4)
    fake.lost = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(DeviceLost):
        for _ in range(5):
            run.step(4)
    fake.lost = None
    run.experts.close()


def test_slots_are_counted_as_the_arena_counts_them(device: Device, layers: MoeLayers) -> None:
    host = HostExperts(layers.weights, layers.specs)
    moe = moe_layers_of(layers.weights, layers.specs)
    for slots in (1, 7):
        planned = [min(slots, layer.experts.n_expert) for layer in moe]
        n_bytes = slots_bytes(moe, planned)
        assert list(even_slots(moe, n_bytes)) == planned or slots > 6
        made = CachedExperts(device, layers.model_spec(), host, CacheSettings(slots))
        assert made.n_bytes == n_bytes
        made.close()
    assert list(even_slots(moe, 1 << 40)) == [layer.experts.n_expert for layer in moe]
    assert even_slots((), 100) == ()


@pytest.mark.parametrize("nth", range(7))
def test_no_memory_leaves_nothing_behind(
    device: Device, layers: MoeLayers, fake: FakeDriver, nth: int
) -> None:
    host = HostExperts(layers.weights, layers.specs)
    before = dict(fake.live)
    fake.out_of_memory_at = fake.n_allocating + nth
    try:
        made = CachedExperts(device, layers.model_spec(), host, CacheSettings(2))
    except OutOfDeviceMemory:
        assert fake.live == before
        return
    assert nth == 6  # an arena, a stream and four events were made
    made.close()
