"""Show what a model file holds: metadata, tensors, bytes per expert, and what fits where."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING

from runtime.commands.machine import memory_bytes
from runtime.commands.options import add_model, say_demonstration, whole_number
from runtime.config import BUNDLED_MODEL

if TYPE_CHECKING:
    from runtime.models.gguf_header import TensorInfo
    from runtime.models.inspect import Inspection
    from runtime.models.sizes import ModelSizes

CONTEXT = 8192  # tokens of KV cache to plan for, where nothing is said
KV_BYTES = 2  # an f16 number
GIB = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--tensors", action="store_true", help="list every tensor by itself")
    parser.add_argument(
        "--ram", type=gibibytes, metavar="GIB", help="RAM to plan with (default: what is free)"
    )
    parser.add_argument(
        "--vram", type=gibibytes, default=0, metavar="GIB", help="VRAM to plan with (default 0)"
    )
    parser.add_argument(
        "-c", "--ctx-size", type=whole_number(1), default=CONTEXT, metavar="N",
        help=f"context to plan with (default {CONTEXT})",
    )  # fmt: skip


def gibibytes(text: str) -> int:
    """`24` or `7.5` GiB in bytes: an argparse type."""
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r}: use a number of GiB")
    return int(float(text) * GIB)


def run(settings: argparse.Namespace) -> int:
    from runtime.models.inspect import inspect_model

    say_demonstration(settings)
    found = inspect_model(settings.model or BUNDLED_MODEL)
    lines = [*file_lines(found), "", "metadata"]
    lines += [f"  {key} = {value}" for key, value in found.metadata]
    lines += ["", "tensors", *tensor_lines(found.tensors, each=settings.tensors)]
    lines += ["", "formats", *format_lines(found)]
    if found.sizes is None:
        lines += ["", f"this model cannot be run here: {found.reason}"]
    else:
        lines += ["", "sizes", *size_lines(found.sizes)]
        ram = memory_bytes() if settings.ram is None else settings.ram
        lines += ["", "what fits where"]
        lines += plan_lines(found.sizes, ram, settings.vram, settings.ctx_size)
    print("\n".join(lines))
    return 0


def file_lines(found: Inspection) -> Iterator[str]:
    for path in found.paths:
        yield str(path)
    n_values = sum(count(tensor.shape) for tensor in found.tensors)
    yield (
        f"GGUF version {found.version}, {size(found.n_bytes)}, {len(found.tensors)} tensors, "
        f"{n_values / 1e6:.2f} M parameters"
    )


def tensor_lines(tensors: tuple[TensorInfo, ...], *, each: bool) -> Iterator[str]:
    """One line a tensor, or one for all layers' tensors of the same kind."""

    def kind(tensor: TensorInfo) -> tuple[str, str, tuple[int, ...]]:
        name = tensor.name if each else re.sub(r"^blk\.\d+\.", "blk.*.", tensor.name)
        return name, tensor.format.name, tensor.shape

    for (name, format_name, shape), group in groupby(sorted(tensors, key=kind), key=kind):
        alike = list(group)
        times = f" x{len(alike)}" if len(alike) > 1 else ""
        n_bytes = sum(tensor.n_bytes for tensor in alike)
        dimensions = " x ".join(map(str, shape))
        yield f"  {name + times:44} {format_name:8} {dimensions:>24} {size(n_bytes):>12}"


def format_lines(found: Inspection) -> Iterator[str]:
    total = sum(share.n_bytes for share in found.formats) or 1
    for share in found.formats:
        yield (
            f"  {share.format:8} {share.n_tensors:6} tensors {size(share.n_bytes):>12} "
            f"{100 * share.n_bytes / total:5.1f} %"
        )


def size_lines(sizes: ModelSizes) -> Iterator[str]:
    yield f"  {'all weights':40} {size(sizes.total_bytes):>12}"
    yield f"  {'read for every token (no routed experts)':40} {size(sizes.dense_bytes):>12}"
    yield f"  {'read to generate one token':40} {size(sizes.bytes_per_token):>12}"
    kv_bytes = KV_BYTES * sizes.kv_elems_per_token
    yield f"  {'KV cache of one token (f16)':40} {size(kv_bytes):>12}"
    if sizes.state_bytes:
        yield f"  {'recurrent state of one sequence':40} {size(sizes.state_bytes):>12}"
    if sizes.memory_bytes:
        yield f"  {'tables read row by row, never held':40} {size(sizes.memory_bytes):>12}"
    if not sizes.expert_bytes:
        yield "  no routed experts"
        return
    yield f"  {'routed experts, all':40} {size(sizes.expert_bytes):>12}"
    numbered = enumerate(sizes.layers)
    alike = groupby(numbered, key=lambda pair: (pair[1].n_expert, pair[1].expert_bytes))
    for (n_expert, expert_bytes), group in alike:
        layers = [number for number, _ in group]
        span = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"
        what = f"{span}: one of {n_expert} experts" if n_expert else f"{span}: dense"
        yield f"  {what:40} {size(expert_bytes) if n_expert else '':>12}"


def plan_lines(sizes: ModelSizes, ram: int | None, vram: int, n_ctx: int) -> Iterator[str]:
    """What `vram` bytes would hold, and whether the rest fits into `ram` (None: unknown)."""
    kv_bytes = n_ctx * KV_BYTES * sizes.kv_elems_per_token
    base = sizes.dense_bytes + kv_bytes + sizes.state_bytes
    what = f"dense weights and {n_ctx} tokens of KV cache"
    if sizes.state_bytes:
        what = f"dense weights, {n_ctx} tokens of KV cache and a recurrent state"
    yield f"  {what} take {size(base)}"
    if vram:
        yield vram_line(sizes, vram, base)
    else:
        yield "  no VRAM given (--vram GIB): everything is computed on the CPU"
    needed = sizes.total_bytes - sizes.memory_bytes
    needed += 0 if vram else kv_bytes + sizes.state_bytes
    if ram is None:
        yield f"  RAM: {size(needed)} are needed; how much is free is not known (--ram GIB)"
    elif needed <= ram:
        yield f"  RAM: {size(needed)} fit into {size(ram)}"
    else:
        yield (
            f"  RAM: {size(needed)} do not fit into {size(ram)}; "
            f"{size(needed - ram)} would be read from disk again and again"
        )


def vram_line(sizes: ModelSizes, vram: int, base: int) -> str:
    n_experts = sum(layer.n_expert for layer in sizes.layers)
    left = vram - base
    if left < 0:
        return f"  VRAM: {size(vram)} are too little: {size(-left)} are missing"
    if left >= sizes.expert_bytes:
        spare = size(left - sizes.expert_bytes)
        return f"  VRAM: the whole model fits into {size(vram)}; {spare} are left"
    share = left / sizes.expert_bytes
    return (
        f"  VRAM: {size(left)} of {size(vram)} are left for experts: about "
        f"{int(share * n_experts)} of {n_experts} ({100 * share:.0f} %)"
    )


def count(shape: tuple[int, ...]) -> int:
    n = 1
    for dimension in shape:
        n *= dimension
    return n


def size(n_bytes: int) -> str:
    """`n_bytes` in the unit that suits it."""
    for unit, scale in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if n_bytes >= scale:
            return f"{n_bytes / scale:.2f} {unit}"
    return f"{n_bytes} B"
