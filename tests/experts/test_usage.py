"""Lifetime usage: found in the profile or in the model, added to what others saved meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from profiles import RecentUse, UsageProfile, load_profile, save_profile
from runtime.commands import main
from runtime.config import BUNDLED_MODEL
from runtime.experts.cache import ExpertCache, LayerShape
from runtime.experts.policy import Policy
from runtime.experts.usage import (
    SAVE_SECONDS,
    LifetimeUsage,
    file_usage,
    lifetime_usage,
    model_identity,
    profile_path,
)
from runtime.experts.usage_keeper import UsageKeeper
from runtime.models import Model, open_model


@pytest.fixture
def model() -> Iterator[Model]:
    with open_model(BUNDLED_MODEL) as opened:
        yield opened


def counts(model: Model, first: int) -> np.ndarray:
    n_layers = len(model.spec.layers)
    return np.arange(first, first + n_layers * 32).reshape(n_layers, 32).astype(np.int64)


def test_nothing_is_known_at_first(model: Model, tmp_path: Path) -> None:
    usage = lifetime_usage(model, tmp_path / "p")
    assert usage.known.shape == (8, 32) and not usage.known.any() and usage.source == "nothing"
    assert usage.due(SAVE_SECONDS) and not usage.due(SAVE_SECONDS - 1)


def test_two_engines_add_to_one_profile(model: Model, tmp_path: Path) -> None:
    first, second = (lifetime_usage(model, tmp_path / "a" / "p") for _ in range(2))
    first.save(counts(model, 0), 10, now=1.0)
    second.save(counts(model, 5), 7, now=2.0)
    second.save(0 * counts(model, 5), 4, now=3.0)  # nothing new
    third = lifetime_usage(model, tmp_path / "a" / "p")
    assert third.known.tolist() == (counts(model, 0) + counts(model, 5)).tolist()
    assert third.known_tokens == 17 and third.source == str(tmp_path / "a" / "p")
    assert not second.due(3.0 + SAVE_SECONDS - 1)


def test_engines_that_save_at_once_lose_nothing(model: Model, tmp_path: Path) -> None:
    """Saving reads and writes; between the two nobody else may."""
    engines = [lifetime_usage(model, tmp_path / "p") for _ in range(4)]

    def save(usage: LifetimeUsage) -> None:
        for _ in range(5):
            usage.save(counts(model, 2), 3, now=0.0)

    with ThreadPoolExecutor(len(engines)) as threads:
        list(threads.map(save, engines))
    assert load_profile(tmp_path / "p").n_tokens == 4 * 5 * 3
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["p"]


def test_one_file_for_two_models_keeps_the_first_ones(
    model: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Both are open before either has saved."""
    path = tmp_path / "p"
    usage, other = (lifetime_usage(model, path) for _ in range(2))
    other.identity = replace(usage.identity, file_bytes=5)
    other.save(counts(model, 0), 10, now=0.0)
    usage.save(counts(model, 1), 4, now=0.0)
    other.save(counts(model, 0), 10, now=0.0)
    assert load_profile(path).model == other.identity and load_profile(path).n_tokens == 20
    again = lifetime_usage(model, path)
    assert again.known_tokens == 4 and "another model's" in caplog.text


@pytest.mark.parametrize("damage", ["cut", "emptied", "other shape"])
def test_a_profile_that_does_not_fit_is_not_used_and_replaced(
    model: Model, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, identity = tmp_path / "p", model_identity(model.file)
    kept = UsageProfile(identity, counts(model, 0).astype(np.uint64), 3)
    if damage == "other shape":
        kept = replace(kept, counts=kept.counts[:, :8])
    save_profile(path, kept)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-3])
    if damage == "emptied":
        path.write_bytes(b"")
    usage = lifetime_usage(model, path)
    assert not usage.known.any() and "not used" in caplog.text
    usage.save(counts(model, 1), 4, now=0.0)
    assert load_profile(path).n_tokens == 4


def test_a_file_that_is_no_profile_stays(
    model: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "notes"
    path.write_text("hello")
    usage = lifetime_usage(model, path)
    usage.save(counts(model, 1), 4, now=0.0)
    assert "was not saved" in caplog.text
    monkeypatch.setenv("LLAMA_MOE_CACHE_PROFILE", str(path))
    assert main(["profile", "forget"]) == 1
    assert path.read_text() == "hello"


def test_a_folder_that_cannot_be_written_is_a_warning(
    model: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    usage = lifetime_usage(model, tmp_path / "p")
    usage.path = tmp_path / "file" / "p"
    usage.save(counts(model, 1), 4, now=0.0)
    assert "was not saved" in caplog.text


def test_the_variable_names_the_file_or_switches_off(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = model_identity(model.file)
    monkeypatch.delenv("LLAMA_MOE_CACHE_PROFILE", raising=False)
    usual = profile_path(identity)
    assert usual is not None and usual.name == identity.file_name and "olmoe" in usual.name
    monkeypatch.setenv("LLAMA_MOE_CACHE_PROFILE", "/x/y")
    assert profile_path(identity) == Path("/x/y")
    monkeypatch.setenv("LLAMA_MOE_CACHE_PROFILE", "0")
    assert profile_path(identity) is None
    usage = lifetime_usage(model)
    usage.save(counts(model, 1), 4, now=0.0)
    assert not usage.due(1e9)


def test_the_model_s_own_table(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    values = counts(model, 0).reshape(-1).tolist()
    table = file_usage({"moe_cache.expert_usage": values}, model.spec)
    assert table is not None and table.tolist() == counts(model, 0).tolist()
    assert file_usage({}, model.spec) is None and not caplog.text
    for wrong in (values[:-1], [-1, *values[1:]], ["1", *values[1:]], "x", [1 << 32, *values[1:]]):
        assert file_usage({"moe_cache.expert_usage": wrong}, model.spec) is None  # type: ignore[dict-item]
    assert "is not a count" in caplog.text


def test_a_keeper_begins_with_what_is_known_and_saves_what_is_new(
    model: Model, tmp_path: Path
) -> None:
    path = tmp_path / "p"
    lifetime_usage(model, path).save(counts(model, 0), 100, now=0.0)
    clock = [10.0]
    keeper = UsageKeeper(lifetime_usage(model, path), lambda: clock[0])
    shares = [slice(0, 3), slice(3, 8)]
    caches = [ExpertCache([LayerShape(32, 0)] * (s.stop - s.start), [0] * 9) for s in shares]
    policies = [keeper.policy(s)(cache) for s, cache in zip(shares, caches, strict=True)]
    assert next(iter(policies[0].first(caches[0]))) == (2, 31)
    choices = np.array([[[1, 2]]] * 8, np.int32)
    for _ in range(2):
        policies[0].used(choices[:3])
        policies[1].used(choices[3:])
    assert load_profile(path).n_tokens == 100  # nothing is due yet
    clock[0] += SAVE_SECONDS
    policies[0].used(choices[:3])
    policies[1].used(choices[3:])
    keeper.close()
    saved = load_profile(path)
    assert saved.n_tokens == 103
    expected = counts(model, 0)
    expected[:, 1:3] += 3
    assert saved.counts.tolist() == expected.tolist()
    keeper.close()
    assert load_profile(path).n_tokens == 103


def test_a_keeper_keeps_recent_use_of_all_layers_together(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "p"
    shares = [slice(0, 3), slice(3, 8)]
    caches = [ExpertCache([LayerShape(32, 0)] * (s.stop - s.start), [0] * 9) for s in shares]

    def policies(keeper: UsageKeeper, parts: list[int]) -> list[Policy]:
        return [keeper.policy(shares[part])(caches[part]) for part in parts]

    def used(kept: list[Policy], experts: list[int], n_tokens: int) -> None:
        choices = np.array([[experts]] * 8, np.int32)
        for _ in range(n_tokens):
            for policy, layers in zip(kept, shares, strict=True):
                policy.used(choices[layers])

    keeper = UsageKeeper(lifetime_usage(model, path))
    kept = policies(keeper, [0, 1])
    used(kept, [1, 2], 300)
    used(kept, [5, 6], 100)
    keeper.close()
    usage = lifetime_usage(model, path)
    assert usage.recent is not None and usage.recent.rates.shape == (2, 8, 32)
    fast, slow = usage.recent.rates[:, :, 5]
    assert fast.min() > 0.99 and 0.2 < slow.min() <= slow.max() < 0.3
    assert usage.known[0, 1] > usage.known[0, 5] and (usage.heat[:, 5] > usage.heat[:, 1]).all()
    again = UsageKeeper(usage)
    for policy, cache in zip(policies(again, [0, 1]), caches, strict=True):
        first = list(policy.first(cache))[: 2 * len(cache.layers)]
        assert {expert for _, expert in first} == {5, 6}, "the most used ever come later"
    # the second GPU's experts are all there now: what was known of them stays
    alone = UsageKeeper(lifetime_usage(model, path))
    (policy,) = policies(alone, [0])
    policy.used(np.array([[[9, 8]]] * 3, np.int32))
    alone.close()
    recent = lifetime_usage(model, path).recent
    assert recent is not None and recent.rates[:, 3:].tolist() == usage.recent.rates[:, 3:].tolist()
    assert (recent.rates[0, :3, 9] > 0.05).all() and (recent.rates[0, :3, 5] < 0.95).all()


def test_a_keeper_tells_what_its_caches_served(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "p"
    cache = ExpertCache([LayerShape(32, 0)] * 8, [0] * 64)
    for layer in range(8):
        for expert in range(8):
            cache.fill(layer, expert)

    def run(n_tokens: int, *experts: int, swaps: bool) -> tuple[float, float] | None:
        keeper = UsageKeeper(lifetime_usage(model, path))
        policy = keeper.policy()(cache)
        if swaps:
            policy.swaps(cache, 0)
        for _ in range(n_tokens):
            policy.used(np.array([[experts]] * 8, np.int32))
        keeper.close()
        recent = lifetime_usage(model, path).recent
        assert recent is not None
        return recent.served

    assert run(300, 3, 4, swaps=False) is None  # whole layers: they follow nothing
    assert run(255, 3, 4, swaps=True) is None
    assert run(300, 3, 4, 5, 9, swaps=True) == (0.25, 0.75)
    assert run(300, 3, -1, 5, -1, swaps=True) == (0.25, 1.0)
    assert run(10, 9, 10, swaps=True) == (0.25, 1.0)  # too few: what was known stays
    assert lifetime_usage(model, path).for_plan.served == (0.25, 1.0)


def test_what_a_cache_of_another_size_served_does_not_count(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "p"
    cache = ExpertCache([LayerShape(32, 0)] * 8, [0] * 128)
    keeper = UsageKeeper(lifetime_usage(model, path))
    policy = keeper.policy()(cache)
    policy.swaps(cache, 0)

    def use(n_tokens: int, *experts: int) -> None:
        for _ in range(n_tokens):
            policy.used(np.array([[experts]] * 8, np.int32))

    cache.refill([0] * 128, [(layer, expert) for layer in range(8) for expert in range(16)])
    use(300, 3, 12)
    cache.refill([0] * 64, [(layer, expert) for layer in range(8) for expert in range(8)])
    use(300, 3, 12)
    keeper.close()
    assert lifetime_usage(model, path).for_plan.served == (0.25, 0.5)


def test_another_policy_s_run_leaves_no_recent_use(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, choices = tmp_path / "p", np.array([[[1, 2]]] * 8, np.int32)
    cache = ExpertCache([LayerShape(32, 0)] * 8, [0] * 9)
    for name, keeps in (("fitted", True), ("lru", False), ("fitted", True)):
        monkeypatch.setenv("LLAMA_MOE_CACHE_POLICY", name)
        keeper = UsageKeeper(lifetime_usage(model, path))
        keeper.policy()(cache).used(choices)
        keeper.close()
        assert (lifetime_usage(model, path).recent is not None) == keeps


def test_the_profile_command(
    model: Model,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, out = tmp_path / "p", tmp_path / "out"
    monkeypatch.setenv("LLAMA_MOE_CACHE_PROFILE", str(path))
    assert main(["profile", "show"]) == 0 and "nothing is known" in capsys.readouterr().out
    assert main(["profile", "export", str(out)]) == 1 and not out.exists()
    lifetime_usage(model).save(counts(model, 0), 10, now=0.0)
    assert main(["profile", "show"]) == 0 and "is not known" in capsys.readouterr().out
    assert main(["profile", "export", str(out), "-m", str(BUNDLED_MODEL)]) == 0
    assert "10 tokens" in capsys.readouterr().out
    assert main(["profile", "import", str(out)]) == 0
    assert load_profile(path).n_tokens == 20
    assert main(["profile", "decay", "0.5"]) == 0
    assert load_profile(path).n_tokens == 10
    for words in ([str(BUNDLED_MODEL)], ["-m", str(BUNDLED_MODEL)]):
        assert main(["profile", "show", *words]) == 0
        assert "10 tokens" in capsys.readouterr().out
    rates = np.full((2, 8, 32), 0.125, np.float32)
    recent = RecentUse(rates, (0.0,) * 5, (0.25, 0.625))
    save_profile(path, replace(load_profile(path), recent=recent))
    assert main(["profile", "show"]) == 0
    assert "lately a cache of 25 % of them served 62.5 %" in capsys.readouterr().out
    assert main(["profile", "decay", "0.5"]) == 0
    assert (kept := load_profile(path).recent) is not None and kept.served == (0.25, 0.625)
    assert main(["profile", "import", str(out)]) == 0  # its recent use is not known
    assert load_profile(path).recent is None
    assert main(["profile", "forget"]) == 0 and not path.exists()
    assert main(["profile", "import", str(out)]) == 0 and load_profile(path).n_tokens == 10
    assert main(["profile", "import", str(tmp_path / "none")]) == 1
    assert "none" in capsys.readouterr().err
    assert main(["profile"]) == 2 and "ACTION" in capsys.readouterr().err


def test_profiles_are_merged_if_they_are_of_one_model(
    model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other, out = (tmp_path / name for name in ("one", "other", "out"))
    lifetime_usage(model, one).save(counts(model, 0), 10, now=0.0)
    lifetime_usage(model, other).save(counts(model, 3), 4, now=0.0)
    assert main(["profile", "merge", str(out), str(one), str(other), str(one)]) == 0
    merged = load_profile(out)
    assert merged.n_tokens == 24
    assert merged.counts.tolist() == (3 * counts(model, 0) + 3).tolist()
    save_profile(other, replace(merged, model=replace(merged.model, file_bytes=5)))
    assert main(["profile", "merge", str(tmp_path / "none"), str(one), str(other)]) == 1
    assert "another model" in capsys.readouterr().err and not (tmp_path / "none").exists()
