"""Graphs for steps where the GPU's memory is short: others serve, or what can be given back is.

A graph of a new class of steps takes memory of its own while others may have taken the rest of the
GPU's. Neither is a reason for the engine to end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

from runtime.engine.gpu.captured_steps import CapturedStep
from runtime.engine.gpu.gpu_parts import GPUParts
from runtime.engine.gpu.step_shape import StepShape, part_of
from runtime.engine.step import Step, StepKind
from runtime.errors import OutOfDeviceMemory, OutOfGraphMemory
from runtime.notices import Reason

GIVEN_BACK = (128 << 20, 1 << 30)
"""Bytes of experts that make room for a graph: the second where the first do not suffice."""


async def graph_of(
    parts: GPUParts,
    shape: StepShape,
    last: StepShape | None,
    until_idle: Callable[[], Awaitable[None]],
) -> CapturedStep:
    """A graph for steps of a shape: its own, captured while the loop goes on, else a larger one.

    last        whose graph has to stay
    until_idle  waits for the steps in flight: what they may use is given back only then
    Raises: OutOfGraphMemory where there is no memory for any; CudaError, DeviceLost.
    """
    try:
        return await asyncio.to_thread(parts.steps.of, shape)
    except OutOfDeviceMemory as error:
        short = error
    await until_idle()
    for give in _ways(parts, shape, last):
        if not await asyncio.to_thread(give):
            continue
        larger = larger_graph(parts, shape)
        if larger is not None:
            parts.planned.settings.notices.add(
                Reason.SHRUNK, f"the graph of larger steps serves others: {short}"
            )
            return larger
        try:
            return await asyncio.to_thread(parts.steps.of, shape)
        except OutOfDeviceMemory as error:
            short = error
    raise OutOfGraphMemory(f"a step of {shape.n_tokens} tokens", short)


def first_graph(parts: GPUParts, shape: StepShape) -> CapturedStep:
    """A graph that is captured before the first step, if need be in the place of experts.

    Raises: OutOfDeviceMemory where that is not enough; CudaError.
    """
    for n_bytes in GIVEN_BACK:
        try:
            return parts.steps.of(shape)
        except OutOfDeviceMemory:
            if not parts.memory.give_back(n_bytes):
                raise
    return parts.steps.of(shape)


def larger_graph(parts: GPUParts, shape: StepShape) -> CapturedStep | None:
    """The smallest graph that is there and serves steps of the shape."""
    fetches = parts.experts.may_fetch
    serving = [step for step in parts.steps.all() if serves(step.shape, shape, fetches=fetches)]
    return min(serving, key=lambda step: (step.shape.n_tokens, step.shape.n_context), default=None)


def serves(graph: StepShape, shape: StepShape, *, fetches: bool) -> bool:
    """Whether steps of a shape fit the graph of another: kernels leave where there is nothing.

    fetches: experts may be fetched now
    """
    return (
        (graph.kind, graph.sampling, graph.timed) == (shape.kind, shape.sampling, shape.timed)
        and graph.n_tokens >= shape.n_tokens
        and graph.n_sequences >= shape.n_sequences
        and graph.n_outputs >= shape.n_outputs
        and graph.n_context >= shape.n_context
        and graph.gathered >= shape.gathered
        and (graph.fetches == shape.fetches or (graph.fetches and fetches))
    )


def smaller_steps(parts: GPUParts, step: Step, span: slice) -> list[slice]:
    """Parts of these tokens of a prompt for which there are graphs; none: nothing helps."""
    if step.kind is not StepKind.PREFILL:
        return []
    n = span.stop - span.start
    while n > 1:
        n = -(-n // 2)
        part, _ = part_of(step, slice(span.start, span.start + n))
        if larger_graph(parts, parts.shapes.of(part)) is not None:
            return [slice(at, min(at + n, span.stop)) for at in range(span.start, span.stop, n)]
    return []


def _ways(parts: GPUParts, shape: StepShape, last: StepShape | None) -> Iterator[Callable[[], int]]:
    """What makes room, the cheapest first; each returns 0 where it does not."""

    def drop(wanted: Callable[[CapturedStep], bool]) -> int:
        shapes = [step.shape for step in parts.steps.all() if wanted(step)]
        parts.steps.drop([dropped for dropped in shapes if dropped != last])
        return len(shapes)

    yield lambda: larger_graph(parts, shape) is not None
    yield lambda: drop(lambda step: not step.seconds)
    for n_bytes in GIVEN_BACK:
        yield lambda n_bytes=n_bytes: parts.memory.give_back(n_bytes)  # type: ignore[misc]
    yield lambda: drop(lambda step: step.shape.kind is not shape.kind)
