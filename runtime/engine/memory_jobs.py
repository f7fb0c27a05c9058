"""MemoryJobs: rows of an n-gram table, gathered before the step, into the residual streams."""

from __future__ import annotations

import numpy as np

from ops.cpu.convolution import CHANNELS, CONVOLUTION, convolution
from ops.cpu.job import record
from ops.cpu.ngram_memory import NGRAM_MEMORY, gate_memory
from ops.cpu.norm import NORM, norm
from ops.cpu.program import address_of, aligned, filled
from runtime.engine.activation_rows import ActivationRows, Rows
from runtime.engine.mixer_jobs import MixerParts
from runtime.models.ngram_memory import NgramMemorySpec


class MemoryJobs:
    """Adds the jobs of layers with a memory.

    filled  of each: the memory, and the f32 rows of n_embd values that `NgramRows` fills before a
            step
    """

    def __init__(self, parts: MixerParts, x: Rows) -> None:
        self._parts, self._x = parts, x
        self.filled: list[tuple[NgramMemorySpec, Rows]] = []

    def add(self, layer: int, memory: NgramMemorySpec, state_offset: int) -> None:
        """Add the jobs; the memory's state is `state_offset` bytes into the layer's."""
        parts, n_tokens, tokens = self._parts, self._parts.n_tokens, self._parts.chunks.tokens
        gathered = ActivationRows(n_tokens, memory.key.n_in)
        self.filled.append((memory, gathered.f32))
        key, value = Rows(n_tokens, 4 * memory.key.n_out), Rows(n_tokens, 4 * memory.value.n_out)
        products = [
            parts.matrices.part(memory.key, gathered, key),
            parts.matrices.part(memory.value, gathered, value),
        ]
        parts.row_jobs.quantize(f"{layer}.memory_quantize", gathered.f32, gathered, tokens)
        parts.matrices.products(f"{layer}.memory", products, tokens)
        out = Rows(n_tokens, 4 * memory.key.n_out)
        self._gate(layer, memory, key, value, out)
        states = parts.states.address(layer) + state_offset
        self._convolution(layer, memory, out, states)
        args = record(
            NORM,
            x=self._x.address,
            x_stride=self._x.stride,
            n=memory.key.n_out,
            delta=out.address,
            delta_stride=out.stride,
        )
        tokens.per_row.append(parts.program.add(f"{layer}.memory_add", norm.address, args))

    def _gate(self, layer: int, memory: NgramMemorySpec, key: Rows, value: Rows, out: Rows) -> None:
        parts, n_embd = self._parts, memory.value.n_out
        scratch = aligned((parts.n_workers, n_embd), np.float32)
        args = record(
            NGRAM_MEMORY,
            x=self._x.address,
            x_stride=self._x.stride,
            n=n_embd,
            n_stream=memory.key.n_out // n_embd,
            key=key.address,
            key_stride=key.stride,
            value=value.address,
            value_stride=value.stride,
            key_norm=parts.matrices.vector(memory.key_norm),
            query_norm=parts.matrices.vector(memory.query_norm),
            conv_norm=parts.matrices.vector(memory.conv_norm),
            out=out.address,
            out_stride=out.stride,
            scratch=address_of(scratch),
            eps=parts.model.spec.eps,
        )
        parts.program.keep += [scratch, key, value, out]
        job = parts.program.add(f"{layer}.memory_gate", gate_memory.address, args)
        parts.chunks.tokens.per_row.append(job)

    def _convolution(self, layer: int, memory: NgramMemorySpec, out: Rows, states: int) -> None:
        parts, n_channels = self._parts, memory.key.n_out
        weight = parts.model.weights[memory.conv]
        by_tap = filled(
            (memory.n_taps, n_channels),
            lambda: weight.to_f32().reshape(n_channels, memory.n_taps).T,
        )
        scratch = aligned((parts.n_workers, CHANNELS), np.float32)
        args = record(
            CONVOLUTION,
            spans=address_of(parts.buffers.spans),
            states=states,
            state_bytes=parts.states.slot_bytes,
            x=out.address,
            x_stride=out.stride,
            weights=address_of(by_tap),
            n_channels=n_channels,
            n_taps=memory.n_taps,
            dilation=memory.n_gram,
            scratch=address_of(scratch),
        )
        parts.program.keep += [by_tap, scratch]
        job = parts.program.add(f"{layer}.memory_convolution", convolution.address, args)
        parts.chunks.per_sequence.append((job, -(-n_channels // CHANNELS)))
