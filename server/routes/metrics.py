"""`/metrics` in Prometheus' text form, only with `--metrics`.

The names are llama-server's (`llamacpp:`) and ours (`hotexpert_`).

Nothing is counted here: a scrape reads the engine's statistics.  Rates are averages since the last
scrape. No label ever holds what a client sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from aiohttp import web
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from runtime.engine.statistics import Counters, Statistics
from server.errors import NotSupported
from server.routes.expert_metrics import expert_metrics, fallback_metrics, layer_metrics
from server.service import SERVICE, Service

REGISTRY: web.AppKey[CollectorRegistry] = web.AppKey("registry", CollectorRegistry)


async def metrics(request: web.Request) -> web.StreamResponse:
    service = request.config_dict[SERVICE]
    if not service.settings.metrics:
        raise NotSupported(
            "This server does not support metrics endpoint. Start it with `--metrics`"
        )
    return web.Response(
        body=generate_latest(request.config_dict[REGISTRY]),
        headers={
            "Content-Type": CONTENT_TYPE_PLAIN_0_0_4,
            "Process-Start-Time-Unix": str(int(service.started)),
        },
    )


@dataclass(eq=False)
class EngineCollector(Collector):
    """Reads one service; without an engine (loading, closing) only the state is shown."""

    service: Service
    seen: Counters = field(default_factory=Counters)

    def collect(self) -> Iterator[Metric]:
        yield _gauge("hotexpert_ready", "1 when requests are answered", int(self.service.is_ready))
        yield _gauge(
            "hotexpert_open_requests", "Requests being answered", self.service.n_open_requests
        )
        if not self.service.is_ready:
            return
        statistics = self.service.engine.statistics()
        earlier, self.seen = self.seen, statistics.counters
        yield from _totals(statistics.counters)
        yield from _rates(statistics.counters, earlier)
        yield from _states(statistics)
        yield from fallback_metrics(statistics.notices)
        yield from layer_metrics(statistics.layers)
        if statistics.experts is not None:
            yield from expert_metrics(statistics.experts)


def registry(service: Service) -> CollectorRegistry:
    """A registry of its own: an embedding program's default one is left alone."""
    own = CollectorRegistry()
    own.register(EngineCollector(service))
    return own


def _totals(now: Counters) -> Iterator[Metric]:
    for name, text, value in (
        ("prompt_tokens_total", "Prompt tokens processed", now.prompt_tokens),
        ("prompt_tokens_cached_total", "Prompt tokens reused", now.prompt_tokens_cached),
        ("prompt_seconds_total", "Time of prompt steps", now.prompt_seconds),
        ("tokens_predicted_total", "Generated tokens", now.predicted_tokens),
        ("tokens_predicted_seconds_total", "Time of decode steps", now.predicted_seconds),
        ("n_decode_total", "Steps", now.decode_steps + now.prompt_steps),
        ("spec_decode_num_draft_tokens_total", "Drafted tokens", 0),
        ("spec_decode_num_accepted_tokens_total", "Accepted draft tokens", 0),
        ("spec_decode_num_drafts_total", "Drafts", 0),
    ):
        yield CounterMetricFamily(f"llamacpp:{name}", text, value=value)
    tokens = CounterMetricFamily("hotexpert_tokens_total", "Tokens", labels=["phase"])
    for phase, n in (
        ("prompt", now.prompt_tokens),
        ("cached", now.prompt_tokens_cached),
        ("decode", now.predicted_tokens),
    ):
        tokens.add_metric([phase], n)
    yield tokens
    yield _gauge("llamacpp:n_tokens_max", "Most tokens any sequence has had", now.max_tokens)
    yield CounterMetricFamily(
        "hotexpert_preemptions_total", "Sequences that gave their pages back", value=now.preemptions
    )
    yield CounterMetricFamily(
        "hotexpert_requests_failed_total", "Requests the engine failed", value=now.requests_failed
    )


def _rates(now: Counters, earlier: Counters) -> Iterator[Metric]:
    prompt_seconds = now.prompt_seconds - earlier.prompt_seconds
    predicted_seconds = now.predicted_seconds - earlier.predicted_seconds
    steps = now.decode_steps + now.prompt_steps - earlier.decode_steps - earlier.prompt_steps
    yield _gauge(
        "llamacpp:prompt_tokens_seconds",
        "Prompt tokens a second since the last scrape",
        _ratio(now.prompt_tokens - earlier.prompt_tokens, prompt_seconds),
    )
    yield _gauge(
        "llamacpp:predicted_tokens_seconds",
        "Generated tokens a second since the last scrape",
        _ratio(now.predicted_tokens - earlier.predicted_tokens, predicted_seconds),
    )
    yield _gauge(
        "llamacpp:n_busy_slots_per_decode",
        "Sequences in a step, on average since the last scrape",
        _ratio(now.busy_slots - earlier.busy_slots, steps),
    )


def _states(now: Statistics) -> Iterator[Metric]:
    yield _gauge("llamacpp:requests_processing", "Sequences running", now.n_running)
    yield _gauge("llamacpp:requests_deferred", "Sequences waiting", now.n_waiting)
    yield _gauge("hotexpert_queue", "Requests that wait for a place", now.n_waiting)
    yield _gauge("hotexpert_kv_pages", "KV pages", now.n_pages)
    yield _gauge("hotexpert_kv_pages_free", "KV pages nobody uses", now.n_pages_free)
    yield _gauge("hotexpert_kv_pages_cached", "KV pages kept for reuse", now.n_pages_cached)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
