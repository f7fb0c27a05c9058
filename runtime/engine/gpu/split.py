"""What belongs to several GPUs, behind the interfaces of what belongs to one.

Every GPU holds its own layers' pages, states, experts and graphs; a step is one launch on each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

import numpy as np

from runtime.cuda.graph import Graph
from runtime.cuda.stream import Stream
from runtime.engine.gpu.captured_steps import CapturedStep, CapturedSteps
from runtime.engine.gpu.control import Deltas
from runtime.engine.gpu.experts import I32, ExpertStore
from runtime.engine.gpu.kv import PageMemory
from runtime.engine.gpu.links import Links
from runtime.engine.gpu.state_slots import StateMemory
from runtime.engine.gpu.step_shape import StepShape
from runtime.errors import CudaError
from runtime.experts.totals import ExpertTotals, StepUse, together
from runtime.profiling.record import Span


class SplitStream:
    """The streams of all GPUs, in the order of their layers."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        self.streams = tuple(streams)

    def idle(self) -> bool:
        """Whether all work of all of them has ended.  Raises: DeviceLost, CudaError."""
        return all([stream.idle() for stream in self.streams])  # each one tells of a lost device


class SplitGraph:
    """The graphs of one step."""

    def __init__(self, graphs: Sequence[Graph], links: Links) -> None:
        self._graphs, self._links = tuple(graphs), links

    def launch(self, stream: SplitStream) -> None:
        """Put each into its stream.

        Raises: CudaError, DeviceLost; EngineBug after a launch that failed on some of the GPUs,
        which are no longer at the same step.
        """
        self._links.check_together()
        launched = 0
        try:
            for graph, own in zip(self._graphs, stream.streams, strict=True):
                graph.launch(own)
                launched += 1
        except CudaError as error:
            if launched:
                self._links.part(error)
            raise


class SplitSteps:
    """The graphs of every shape."""

    def __init__(self, steps: Sequence[CapturedSteps], links: Links) -> None:
        self._steps, self._links = tuple(steps), links
        self._made: dict[StepShape, CapturedStep] = {}

    def __len__(self) -> int:
        return len(self._made)

    def of(self, shape: StepShape) -> CapturedStep:
        """See `CapturedSteps.of`."""
        made = self._made.get(shape)
        if made is None:
            captured = [steps.of(shape) for steps in self._steps]
            last = captured[-1]
            made = self._made[shape] = CapturedStep(
                shape=shape,
                graph=SplitGraph([steps.graph(shape) for steps in self._steps], self._links),
                writers=last.writers,
                n_launches=sum(step.n_launches for step in captured),
                choices_places=tuple(place for step in captured for place in step.choices_places),
                times=tuple(times for step in captured for times in step.times),
            )
        return made

    def is_captured(self, shape: StepShape) -> bool:
        return shape in self._made

    def all(self) -> list[CapturedStep]:
        """See `CapturedSteps.all`: those that all GPUs have."""
        return list(self._made.values())

    def drop(self, shapes: Iterable[StepShape]) -> None:
        """See `CapturedSteps.drop`."""
        for shape in shapes:
            del self._made[shape]
        for steps in self._steps:  # one may have a graph that another one found no memory for
            steps.drop([step.shape for step in steps.all() if step.shape not in self._made])


class SplitPages:
    """The pages: what a page's tokens have in all layers."""

    def __init__(self, parts: Sequence[PageMemory]) -> None:
        self._parts, self.sizes = tuple(parts), SplitSizes(parts)
        self.n_pages, self.page_tokens = parts[0].n_pages, parts[0].page_tokens
        self.n_bytes = sum(part.n_bytes for part in parts)

    def copy(self, copies: Sequence[tuple[int, int]], stream: SplitStream) -> None:
        """See `PageMemory.copy`."""
        for part, own in zip(self._parts, stream.streams, strict=True):
            part.copy(copies, own)

    def save(self, pages: Sequence[int], stream: SplitStream) -> bytes:
        """See `PageMemory.save`; GPU after GPU."""
        streams = zip(self._parts, stream.streams, strict=True)
        return b"".join(part.save(pages, own) for part, own in streams)

    def load(self, pages: Sequence[int], image: bytes, stream: SplitStream) -> None:
        """See `PageMemory.load`."""
        if len(image) != len(pages) * self.sizes.page_bytes:
            raise ValueError(
                f"an image of {len(image)} bytes is not {len(pages)} pages of "
                f"{self.sizes.page_bytes}"
            )
        sizes = [len(pages) * part.sizes.page_bytes for part in self._parts]
        for part, own, piece in zip(
            self._parts, stream.streams, _pieces(image, sizes), strict=True
        ):
            part.load(pages, piece, own)


class SplitSizes:
    """Bytes of a page on all GPUs together."""

    def __init__(self, parts: Sequence[PageMemory]) -> None:
        self.page_bytes = sum(part.sizes.page_bytes for part in parts)
        self.cache_types = parts[0].sizes.cache_types


class SplitStates:
    """The states: what a sequence has in all layers."""

    def __init__(self, parts: Sequence[StateMemory | None]) -> None:
        """parts  of each GPU; None: its layers have none."""
        self._parts = tuple(parts)
        held = self._held
        self.n_slots = held[0].n_slots
        self.slot_bytes = sum(part.slot_bytes for part in held)

    @property
    def _held(self) -> list[StateMemory]:
        return [part for part in self._parts if part is not None]

    def _each(self, stream: SplitStream) -> list[tuple[StateMemory, Stream]]:
        both = zip(self._parts, stream.streams, strict=True)
        return [(part, own) for part, own in both if part is not None]

    def copy(self, copies: Sequence[tuple[int, int]], stream: SplitStream) -> None:
        """See `StateMemory.copy`."""
        for part, own in self._each(stream):
            part.copy(copies, own)

    def save(self, slot: int, stream: SplitStream) -> bytes:
        """See `StateMemory.save`; GPU after GPU."""
        return b"".join(part.save(slot, own) for part, own in self._each(stream))

    def load(self, slot: int, image: bytes, stream: SplitStream) -> None:
        """See `StateMemory.load`."""
        if len(image) != self.slot_bytes:
            raise ValueError(f"an image of {len(image)} bytes is not a state of {self.slot_bytes}")
        pieces = _pieces(image, [part.slot_bytes for part in self._held])
        for (part, own), piece in zip(self._each(stream), pieces, strict=True):
            part.load(slot, piece, own)

    def describe(self) -> dict[str, object]:
        """See `StateMemory.describe`."""
        return {
            "state_bytes": sum(part.n_bytes for part in self._held),
            "state_slot_bytes": self.slot_bytes,
            "state_slots": self.n_slots,
        }


class SplitExperts:
    """`StepExperts` of several GPUs, each with its own cache.

    rows    of the tables of the GPUs together, where each one's begin
    layers  MoE layers of each GPU that the choices of a step are of; 0: nothing is missed there
    """

    def __init__(
        self, stores: Sequence[ExpertStore], rows: Sequence[int], layers: Sequence[int]
    ) -> None:
        self.stores, self._rows = tuple(stores), tuple(rows)
        self._layers = [slice(*edges) for edges in pairwise((0, *accumulate(layers)))]

    @property
    def may_fetch(self) -> bool:
        """See `StepExperts`; GPUs that miss nothing have nothing to wait for."""
        return all(store.may_fetch for store in self.stores if not store.is_complete)

    def before_step(self) -> Deltas:
        """See `ExpertStore`; the rows are counted through all GPUs' tables."""
        each = [store.before_step().copy() for store in self.stores]
        for deltas, first in zip(each, self._rows, strict=True):
            deltas[:, 0] += np.uint64(first)
        return np.concatenate(each)

    def while_running(self) -> None:
        for store in self.stores:
            store.while_running()

    def after_step(self, choices: I32, *, fetched: bool = False) -> tuple[StepUse, ...]:
        both = zip(self.stores, self._layers, strict=True)
        used = [store.after_step(choices[layers], fetched=fetched) for store, layers in both]
        return tuple(use for own in used for use in own)

    def totals(self) -> ExpertTotals | None:
        each = [totals for store in self.stores if (totals := store.totals()) is not None]
        return together(each) if each else None

    def take_spans(self) -> list[Span]:
        return [span for store in self.stores for span in store.take_spans()]

    def describe(self) -> dict[str, object]:
        """Numbers are those of all GPUs together, words the first GPU's that says any."""
        facts: dict[str, object] = {}
        for store in self.stores:
            for name, value in store.describe().items():
                known = facts.get(name)
                if isinstance(value, int) and isinstance(known, int):
                    facts[name] = known + value
                else:
                    facts.setdefault(name, value)
        return facts


def _pieces(image: bytes, sizes: Sequence[int]) -> list[bytes]:
    return [image[start:end] for start, end in pairwise((0, *accumulate(sizes)))]
