"""A kernel ready to launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from ptx import Entry
from tests.support.ptx.errors import PtxError
from tests.support.ptx.frame import DTYPES, Array, Frame
from tests.support.ptx.machine import Machine
from tests.support.ptx.memory import Memory, Shared
from tests.support.ptx.parser import KernelText, ModuleText, parse
from tests.support.ptx.syntax import Variable

LANES = 32
THREADS_AT_ONCE = 32768
"""Blocks run side by side up to this many threads, the rest after them."""

PARSED_TEXTS = 512
"""Kept: the models of many tests have the same kernels."""

Dim = tuple[int, ...]
Argument = int | float | bytes


def load(text: str, name: str = "text") -> dict[str, Kernel]:
    """The kernels of an expanded PTX text by name, none of its instructions executed yet.

    Raises:
        PtxError: the text is not understood; the message starts with `file:line:`.
    """
    module = _parsed(text, name)
    return {key: Kernel(module, kernel) for key, kernel in module.kernels.items()}


@lru_cache(maxsize=PARSED_TEXTS)
def _parsed(text: str, name: str) -> ModuleText:
    return parse(text, name)


class Kernel:
    """A kernel of a module and how often each of its instructions has run."""

    def __init__(self, module: ModuleText, text: KernelText) -> None:
        self.module = module
        self.text = text
        self.executed = np.zeros(len(text.body.instructions), np.int64)

    @property
    def entry(self) -> Entry:
        return self.text.entry

    def never_executed(self) -> list[str]:
        """`file:line: code` of each instruction that no thread of any launch has run."""
        return [
            f"{instruction.place}: {instruction.code}"
            for instruction in self.text.body.instructions
            if not self.executed[instruction.index]
        ]

    def launch(
        self,
        memory: Memory,
        grid: Dim,
        block: Dim,
        args: Sequence[Argument],
        *,
        dynamic_shared: int = 0,
        host: Callable[[], None] | None = None,
        max_steps: int = 200_000,
        strict: bool = False,
    ) -> None:
        """Run the kernel over a grid.

        `args` are values for the parameters in order, bytes for an array. `host` is called whenever
        all threads that can run are polling, to play the part of the CPU. `max_steps` instructions
        of threads that run together end a kernel that does not end. With `strict`, shared memory
        that nothing wrote must not be read, not even to throw its value away.

        Raises:
            PtxError: the kernel does something wrong; the message says where and which thread.
        """
        grid, block = _three(grid), _three(block)
        self._check_block(block)
        variables = {**self.module.variables, **self.text.body.variables}
        addresses, shared_bytes = _layout(variables, memory, dynamic_shared)
        params = self._pack(args)
        n_blocks, n_threads = int(np.prod(grid)), int(np.prod(block))
        padded = -(-n_threads // LANES) * LANES
        at_once = max(1, THREADS_AT_ONCE // padded)
        for first in range(0, n_blocks, at_once):
            blocks = np.arange(first, min(first + at_once, n_blocks))
            thread = np.tile(np.arange(padded), len(blocks))
            block_of = np.repeat(np.arange(len(blocks)), padded)
            frame = Frame(
                self.text.body,
                len(thread),
                memory,
                Shared(
                    len(blocks),
                    shared_bytes,
                    block_of,
                    np.arange(len(thread)) // LANES,
                    strict=strict,
                ),
                params,
                addresses,
                _specials(thread, np.repeat(blocks, padded), grid, block, dynamic_shared),
                np.zeros(len(thread), np.int64),
            )
            alive = thread < n_threads
            Machine(self.text.body, frame, alive, self.executed, host, max_steps).run()

    def _check_block(self, block: Dim) -> None:
        for directive in ("maxntid", "reqntid"):
            limit = self.text.limits.get(directive)
            if limit is None:
                continue
            too_many = int(np.prod(block)) > int(np.prod(limit))
            if too_many or (directive == "reqntid" and block != _three(limit)):
                raise PtxError(f"{self.entry.name}: .{directive} {limit} forbids a block {block}")

    def _pack(self, args: Sequence[Argument]) -> dict[str, tuple[int, Array]]:
        """Offset and bytes of each parameter."""
        params = self.entry.params
        if len(args) != len(params):
            raise PtxError(f"{self.entry.name} takes {len(params)} arguments, not {len(args)}")
        packed = {}
        for param, value in zip(params, args, strict=True):
            if param.type[0] == "f":
                content = np.array([value], DTYPES[param.type]).view(np.uint8)
            else:
                if not isinstance(value, bytes):
                    wrapped = int(value) % (1 << 8 * param.n_bytes)
                    value = wrapped.to_bytes(param.n_bytes, "little")
                content = np.frombuffer(value, np.uint8)
            if len(content) != param.n_bytes:
                raise PtxError(f"{param.name} takes {param.n_bytes} bytes, not {len(content)}")
            packed[param.name] = (param.offset, content)
        return packed


def _three(dim: Dim) -> Dim:
    return (*dim, *[1] * (3 - len(dim)))


def _layout(
    variables: dict[tuple[int, str], Variable], memory: Memory, dynamic_shared: int
) -> tuple[dict[tuple[int, str], int], int]:
    """Addresses of all variables, and the bytes of shared memory a block has.

    Shared variables follow each other in the order of the text; one without a size is the dynamic
    part at the end.
    """
    addresses, top, dynamic = {}, 0, []
    for key, variable in variables.items():
        if variable.space != "shared":
            addresses[key] = memory.symbol(variable)
        elif variable.count == 0:
            dynamic.append(key)
        else:
            top = -(-top // variable.align) * variable.align
            addresses[key] = top
            top += variable.n_bytes
    if dynamic:
        top = -(-top // 16) * 16
    addresses |= dict.fromkeys(dynamic, top)
    return addresses, top + dynamic_shared


def _specials(
    thread: Array, block_index: Array, grid: Dim, block: Dim, dynamic_shared: int
) -> dict[str, Array]:
    """The special registers of every thread."""
    values: dict[str, Array] = {}
    for index, shape, name in ((thread, block, "tid"), (block_index, grid, "ctaid")):
        x, y, z = shape
        values[f"%{name}.x"] = index % x
        values[f"%{name}.y"] = index // x % y
        values[f"%{name}.z"] = index // (x * y) % max(z, 1)
        for axis, size in zip("xyz", shape, strict=True):
            values[f"%n{name}.{axis}"] = np.full(len(thread), size)
    lane = thread % LANES
    values |= {"%laneid": lane, "%warpid": thread // LANES}
    values |= {"%smid": block_index % 8, "%nsmid": np.full(len(thread), 8)}
    values["%gridid"] = np.zeros(len(thread))
    values["%dynamic_smem_size"] = np.full(len(thread), dynamic_shared)
    bit = np.uint64(1) << lane.astype(np.uint64)
    below = bit - np.uint64(1)
    values |= {"%lanemask_eq": bit, "%lanemask_lt": below, "%lanemask_le": below | bit}
    whole = np.uint64(0xFFFF_FFFF)
    values |= {"%lanemask_gt": whole & ~(below | bit), "%lanemask_ge": whole & ~below}
    return {name: value.astype(np.uint32) for name, value in values.items()}
