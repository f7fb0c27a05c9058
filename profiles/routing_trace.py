"""RoutingTrace: which experts each token of a run used, in every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from profiles import container
from profiles.container import Array, Contents
from profiles.errors import ProfileError

KIND = "routing trace"
MAX_BYTES = 4 << 30
MAX_LAYERS = 4096
MAX_EXPERTS = 1 << 16

I32 = NDArray[np.int32]


class Phase(IntEnum):
    """What the tokens of a step were."""

    PROMPT = 0
    GENERATED = 1


@dataclass(frozen=True)
class RoutingTrace:
    """The routing of a run's steps, in order.

    model         what was run, for people
    n_expert      of each MoE layer
    expert_bytes  of one expert of each MoE layer
    choices       i32[n_tokens, n_layers, n_used]: experts; -1: none, or not known
    steps         i32[n_steps]: tokens of each step
    phases        u8[n_steps]: `Phase` of each step
    sequences     i32[n_tokens]: which text each token belongs to
    """

    model: str
    n_expert: tuple[int, ...]
    expert_bytes: tuple[int, ...]
    choices: I32
    steps: I32
    phases: NDArray[np.uint8]
    sequences: I32

    def __post_init__(self) -> None:
        """Raises: ProfileError for parts that contradict each other."""
        arrays = (self.choices, self.steps, self.phases, self.sequences)
        if not all(isinstance(a, np.ndarray) and a.dtype.kind in "iu" for a in arrays):
            raise ProfileError("choices, steps, phases, sequences: use arrays of whole numbers")
        n_layers = len(self.n_expert)
        if not 0 < n_layers <= MAX_LAYERS or len(self.expert_bytes) != n_layers:
            raise ProfileError(f"a trace of {n_layers} layers, sizes of {len(self.expert_bytes)}")
        if not all(0 < n <= MAX_EXPERTS for n in self.n_expert) or min(self.expert_bytes) < 0:
            raise ProfileError("a layer with too few or too many experts, or of negative size")
        if self.choices.ndim != 3 or self.choices.shape[1] != n_layers:
            raise ProfileError(f"choices of shape {self.choices.shape} for {n_layers} layers")
        most = np.array(self.n_expert, np.int32)[:, None]
        if bool((self.choices < -1).any() or (self.choices >= most).any()):
            raise ProfileError("a choice of an expert that does not exist")
        n_tokens = len(self.choices)
        if self.sequences.shape != (n_tokens,) or self.phases.shape != self.steps.shape:
            raise ProfileError("as many sequences as tokens, as many phases as steps are needed")
        if self.steps.ndim != 1 or bool((self.steps < 1).any()):
            raise ProfileError("a step without tokens")
        if int(self.steps.sum(dtype=np.int64)) != n_tokens or bool((self.phases > 1).any()):
            raise ProfileError("the steps' tokens are not those of the trace, or a phase is wrong")

    @property
    def n_tokens(self) -> int:
        return len(self.choices)

    @property
    def n_layers(self) -> int:
        return len(self.n_expert)

    @property
    def n_used(self) -> int:
        return int(self.choices.shape[2])

    def token_by_token(self, first: int = 0, end: int | None = None) -> RoutingTrace:
        """Tokens first .. end - 1 as if each had been generated in a step of its own."""
        choices = self.choices[first:end]
        return RoutingTrace(
            self.model,
            self.n_expert,
            self.expert_bytes,
            choices,
            np.ones(len(choices), np.int32),
            np.full(len(choices), Phase.GENERATED, np.uint8),
            self.sequences[first:end],
        )


def join(traces: Sequence[RoutingTrace], model: str | None = None) -> RoutingTrace:
    """One trace after the other; their sequences stay apart.

    Raises: ProfileError for traces of different models' shapes, or none at all.
    """
    if not traces:
        raise ProfileError("no traces to join")
    first = traces[0]
    sequences, base = [], 0
    for trace in traces:
        if trace.n_expert != first.n_expert or trace.n_used != first.n_used:
            raise ProfileError(f"traces of {trace.model} and {first.model} do not belong together")
        sequences.append(trace.sequences + np.int32(base))
        base = int(sequences[-1].max(initial=base - 1)) + 1
    return RoutingTrace(
        first.model if model is None else model,
        first.n_expert,
        first.expert_bytes,
        np.concatenate([trace.choices for trace in traces]),
        np.concatenate([trace.steps for trace in traces]),
        np.concatenate([trace.phases for trace in traces]),
        np.concatenate(sequences),
    )


def save_trace(path: str | Path, trace: RoutingTrace, *, packed: bool = True) -> None:
    """Write the file, or leave what was there.  Raises: OSError; ProfileError for no path."""
    facts = {
        "model": trace.model,
        "n_expert": list(trace.n_expert),
        "expert_bytes": list(trace.expert_bytes),
    }
    container.write(
        path,
        KIND,
        facts,
        {
            "choices": _narrow(trace.choices, max(trace.n_expert)),
            "steps": trace.steps,
            "phases": trace.phases,
            "sequences": trace.sequences,
        },
        packed=packed,
    )


def load_trace(path: str | Path, max_bytes: int = MAX_BYTES) -> RoutingTrace:
    """Raises: ProfileError for a file that is no trace; OSError where it cannot be read."""
    contents = container.read(path, KIND, max_bytes)
    try:
        return _trace_of(contents)
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from error


def _trace_of(contents: Contents) -> RoutingTrace:
    facts, arrays = contents.facts, contents.arrays
    model = facts.get("model")
    if not isinstance(model, str):
        raise ProfileError("no model is named")
    return RoutingTrace(
        model,
        _whole_numbers(facts.get("n_expert"), "n_expert"),
        _whole_numbers(facts.get("expert_bytes"), "expert_bytes"),
        _wide(_array(arrays, "choices", ("|u1", "<u2", "<u4"))),
        _array(arrays, "steps", ("<i4",)),
        _array(arrays, "phases", ("|u1",)),
        _array(arrays, "sequences", ("<i4",)),
    )


def _narrow(choices: I32, n_expert: int) -> Array:
    """In as few bytes as the experts need; the highest number stands for -1."""
    kind = np.uint8 if n_expert < 1 << 8 else np.uint16 if n_expert < 1 << 16 else np.uint32
    return choices.astype(kind)


def _wide(choices: Array) -> I32:
    wide = choices.astype(np.int32)
    wide[choices == np.iinfo(choices.dtype).max] = -1
    return wide


def _array(arrays: dict[str, Array], name: str, types: tuple[str, ...]) -> Array:
    array = arrays.get(name)
    if array is None or array.dtype.str not in types:
        raise ProfileError(f"no array {name!r} of a type that it may have")
    return array


def _whole_numbers(value: object, name: str) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MAX_LAYERS:
        raise ProfileError(f"{name} is not a list of a number for each layer")
    if not all(type(number) is int and 0 <= number < 1 << 40 for number in value):
        raise ProfileError(f"{name} is not a list of a number for each layer")
    return tuple(value)
