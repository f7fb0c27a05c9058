"""ProgramBuilder: from a model's spec to the list of jobs that one step is.

The same list serves decode and prompts of any size: the numbers of chunks that depend on the step
are set before each run (`StepChunks`), those that depend on the routing by the router's job.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ops.cpu.program import Program
from runtime.engine.activation_rows import ActivationRows, Rows
from runtime.engine.attention_jobs import AttentionJobs
from runtime.engine.delta_net_jobs import DeltaNetJobs
from runtime.engine.feed_forward_jobs import FeedForwardJobs
from runtime.engine.indexer_jobs import IndexerJobs
from runtime.engine.kv_pages import KVPages
from runtime.engine.latent_jobs import LatentJobs
from runtime.engine.matrix_jobs import MatrixJobs
from runtime.engine.memory_jobs import MemoryJobs
from runtime.engine.mixer_jobs import MixerJobs, MixerParts
from runtime.engine.rope_tables import RopeTables
from runtime.engine.row_jobs import RowJobs
from runtime.engine.state_slots import StateSlots
from runtime.engine.step_buffers import StepBuffers
from runtime.engine.step_chunks import StepChunks, StepRows
from runtime.engine.stream_jobs import StreamJobs
from runtime.errors import UnsupportedArchitecture
from runtime.models.delta_net import DeltaNetSpec
from runtime.models.latent_attention import LatentAttentionSpec
from runtime.models.model import Model
from runtime.models.spec import AttentionSpec, LayerSpec
from runtime.models.streams import Streams

JOBS_PER_LAYER = 40


class ProgramBuilder:
    """Builds one program; `build` is called once.

    Raises: UnsupportedArchitecture for mixers that no job computes.

    The program refers to the model's weights, the pages and the buffers by address: they must
    outlive it.
    """

    def __init__(
        self,
        model: Model,
        buffers: StepBuffers,
        pages: KVPages,
        states: StateSlots,
        n_workers: int,
        n_tokens: int,
        make: Callable[[int], Program] = Program,
    ) -> None:
        """make: an empty program for so many jobs."""
        spec = model.spec
        self._model, self._spec = model, spec
        self._buffers, self._pages = buffers, pages
        self._n_tokens = n_tokens
        self.program = make(JOBS_PER_LAYER * len(spec.layers) + JOBS_PER_LAYER)
        self.chunks = StepChunks(buffers.n_tokens, buffers.n_outputs)
        self.x = Rows(n_tokens, 4 * spec.n_stream * spec.n_embd)
        self._matrices = MatrixJobs(self.program, model, n_workers)
        self._rows = RowJobs(self.program, self._matrices, buffers, self.chunks, spec.eps)
        self._feed_forwards = FeedForwardJobs(self.program, model, n_workers, n_tokens)
        self.routing = self._feed_forwards.routing
        self._normed = ActivationRows(n_tokens, spec.n_embd)
        parts = MixerParts(
            model=model,
            program=self.program,
            matrices=self._matrices,
            row_jobs=self._rows,
            buffers=buffers,
            pages=pages,
            states=states,
            chunks=self.chunks,
            delta=Rows(n_tokens, 4 * spec.n_embd),
            n_workers=n_workers,
            n_tokens=n_tokens,
        )
        ropes = RopeTables(model, buffers.n_positions)
        indexers = IndexerJobs(parts, ropes)
        self._mixers: dict[type, MixerJobs] = {
            AttentionSpec: AttentionJobs(parts, ropes, indexers),
            LatentAttentionSpec: LatentJobs(parts, ropes, indexers),
            DeltaNetSpec: DeltaNetJobs(parts),
        }
        self.memories = MemoryJobs(parts, self.x)
        self._streams: StreamJobs | None = None
        if spec.n_stream > 1:
            self._streams = StreamJobs(
                self.program, self._matrices, self._rows, self.chunks, spec, self.x, n_workers
            )

    def build(self) -> Program:
        """The program of all layers and the logits."""
        spec, outputs = self._spec, self.chunks.outputs
        pending: dict[str, int] = {}
        if self._streams is not None:
            self._streams.spread()
        for index, layer in enumerate(spec.layers):
            # Nothing reads the last layer's rows but the outputs' own logits.
            rows = outputs if index == len(spec.layers) - 1 else self.chunks.tokens
            pending = self._layer(index, layer, pending, rows)
        out = ActivationRows(self._n_tokens, spec.n_embd)
        outputs.own.append(out)
        output = self._matrices.part(spec.output, out, self._buffers.logits)
        norm, streams = spec.output_norm, spec.output_streams
        self._enter("output_", norm, streams, out, outputs, pending)
        self._matrices.products("logits", [output], outputs, self._buffers.not_finite)
        self.program.keep += [self._model, self._buffers, self._pages]
        self.chunks.freeze(self.program)
        return self.program

    def unused_bytes(self, n_outputs: int) -> int:
        """What steps with so many outputs never touch: room for more of them."""
        row_bytes = self._buffers.logits.strides[0]
        row_bytes += sum(rows.row_bytes for rows in self.chunks.outputs.own)
        return max(self._n_tokens - n_outputs, 0) * row_bytes

    def _layer(
        self, index: int, layer: LayerSpec, pending: Mapping[str, int], rows: StepRows
    ) -> dict[str, int]:
        """Jobs of one layer; the norm fields that add its result to the residual stream.

        rows: those that go on after the mixer, which has the keys, values and states of all tokens.
        """
        mixer, tokens = self._mixers.get(type(layer.mixer)), self.chunks.tokens
        if mixer is None:
            raise UnsupportedArchitecture(
                f"{self._spec.architecture}: layer {index} mixes tokens in a way that the CPU "
                "executor does not compute"
            )
        x, name = self._normed, f"{index}.mixer_"
        if layer.memory is not None and self._streams is not None:
            self._streams.settle(name, tokens, pending)
            self.memories.add(index, layer.memory, layer.mixer.state_bytes)
            pending = {}
        mixed = mixer.prepare(layer.mixer, x)
        self._enter(name, layer.mixer_norm, layer.mixer_streams, x, tokens, pending)
        added = mixer.add(index, layer.mixer, mixed, rows)
        routed = self._feed_forwards.prepare(layer.feed_forward, x)
        name, norm = f"{index}.feed_forward_", layer.feed_forward_norm
        self._enter(name, norm, layer.feed_forward_streams, x, rows, added)
        return self._feed_forwards.add(f"{index}.", routed, self._matrices, rows)

    def _enter(
        self,
        name: str,
        norm: str,
        streams: Streams | None,
        out: ActivationRows,
        rows: StepRows,
        pending: Mapping[str, int],
    ) -> None:
        """Add the last block's result to the residual, and write the input of the next to `out`."""
        if self._streams is None:
            self._rows.norm(f"{name}norm", norm, self.x, out, rows, pending)
        else:
            self._streams.enter(name, norm, streams, out, rows, pending)
