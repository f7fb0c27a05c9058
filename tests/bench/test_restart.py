"""`python -m bench routing --restarts`: a cache that begins anew beside one that goes on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench.routing import main, restart
from bench.routing.rates import Rates
from profiles import Phase, RoutingTrace, save_trace

MB = 1_000_000
RATES = Rates(cpu=10.0, link=10.0, vram=100.0, dram=20.0, dense_ms=1.0, hand_us=100.0, share=1.0)


def changing(n_tokens: int) -> RoutingTrace:
    """Two experts of 16 for 100 tokens, then two others: counts say little of what comes."""
    at = np.arange(n_tokens) // 100 * 2 % 16
    choices = np.stack([at, at + 1], axis=1).astype(np.int32).reshape(n_tokens, 1, 2)
    return RoutingTrace(
        "changing",
        (16,),
        (10 * MB,),
        choices,
        np.ones(n_tokens, np.int32),
        np.full(n_tokens, Phase.GENERATED, np.uint8),
        np.zeros(n_tokens, np.int32),
    )


def test_recent_use_is_what_a_restart_needs() -> None:
    found = restart.compare(changing(1000), 0.125, RATES, [325, 720], 4)
    steady, recent = found[restart.STEADY], found[restart.RECENT]
    assert steady.hit_rate == recent.hit_rate == 1.0 and steady.slower == 0.0
    assert recent.first_hit_rate == 1.0 and abs(recent.slower) < 1e-9
    # the right experts have to come over the link first
    for name in (restart.NOTHING, restart.COUNTS):
        assert found[name].first_hit_rate < 0.9 and found[name].first_slower > 0.05
        assert found[name].hit_rate > found[name].first_hit_rate
    assert (steady.ms, steady.first_ms) == pytest.approx((1.2, 1.2))


def test_a_restart_behind_the_trace_s_end_is_refused() -> None:
    for restarts in ([], [200]):
        with pytest.raises(ValueError, match="up to 136"):
            restart.compare(changing(200), 0.25, RATES, restarts, 4)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_trace(tmp_path / "t", changing(500))
    out = tmp_path / "out.json"
    words = [str(tmp_path / "t"), "--restarts", "320,999", "--slots", "25", "--out", str(out)]
    assert main(words) == 0
    assert "no restart" in capsys.readouterr().out
    (case,) = json.loads(out.read_text())["cases"]
    assert case["restarts"] == [320] and case["after"][restart.RECENT]["hit_rate"] == 1.0
