"""Metrics of experts that move between the CPU and GPUs, and of whatever fell back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from runtime.experts.totals import ExpertTotals
from runtime.notices import Notice, Reason


def expert_metrics(now: ExpertTotals) -> Iterator[Metric]:
    """What served them, what that moved, and how long the CPU team took."""
    yield CounterMetricFamily(
        "hotexpert_expert_hits_total", "Uses of experts that a GPU held", value=now.hits
    )
    misses = CounterMetricFamily(
        "hotexpert_expert_misses_total",
        "Uses of the others, by what served them",
        labels=["served"],
    )
    for served, n in (("cpu", now.cpu), ("in_place", now.in_place), ("fetched", now.fetched)):
        misses.add_metric([served], n)
    yield misses
    moved = CounterMetricFamily(
        "hotexpert_link_bytes_total",
        "Bytes of experts over the link of a GPU",
        labels=["gpu", "purpose"],
    )
    for link in now.links:
        for purpose, n in (
            ("upload", link.uploaded),
            ("in_place", link.in_place),
            ("fetch", link.fetched),
        ):
            moved.add_metric([link.gpu, purpose], n)
    yield moved
    rate = GaugeMetricFamily(
        "hotexpert_link_gigabytes_per_second",
        "Rate at which experts moved into slots so far; 0: none did",
        labels=["gpu"],
    )
    for link in now.links:
        rate.add_metric([link.gpu], link.gb_s)
    yield rate
    for name, text, value in (
        ("expert_swaps", "Experts that set out for a slot of a GPU", now.swaps),
        ("expert_cpu_bytes", "Bytes of weights that uses on the CPU are of", now.cpu_bytes),
        ("cpu_seconds", "Time in which the CPU team computed missed experts", now.cpu_seconds),
        ("cpu_wait_seconds", "Time in which it waited for a GPU's posts", now.wait_seconds),
    ):
        yield CounterMetricFamily(f"hotexpert_{name}_total", text, value=value)


def fallback_metrics(notices: tuple[Notice, ...]) -> Iterator[Metric]:
    """How often each reason came up, those that did not included."""
    family = CounterMetricFamily(
        "hotexpert_fallback_total",
        "What fell back, shrank or stayed off; /props says why",
        labels=["reason"],
    )
    for reason in Reason:
        family.add_metric([reason.value], sum(n.count for n in notices if n.reason is reason))
    yield family


def layer_metrics(layers: Mapping[str, int]) -> Iterator[Metric]:
    """Layers of steps by the device that computed them; nothing where that is not known."""
    if not layers:
        return
    family = CounterMetricFamily(
        "hotexpert_layers_total",
        "Layers of steps by what computed them; a GPU's with what the CPU did of missed experts",
        labels=["device"],
    )
    for device, n in layers.items():
        family.add_metric([device], n)
    yield family
