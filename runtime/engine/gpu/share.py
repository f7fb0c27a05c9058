"""Share: the part of a model that one GPU computes, and how layers are shared out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from runtime.models.latent_attention import LatentAttentionSpec
from runtime.models.model import Model
from runtime.models.spec import ModelSpec


@dataclass(frozen=True)
class Share:
    """Layers in a row.

    model        the model, its spec that of these layers alone
    first_layer  the number of the first one in the whole model
    embeds       the residual stream begins here, else another GPU hands it over
    outputs      logits come from here, else another GPU goes on
    """

    model: Model
    first_layer: int = 0
    embeds: bool = True
    outputs: bool = True

    @property
    def row_bytes(self) -> int:
        """Of a token's residual stream, or streams."""
        spec = self.model.spec
        return 4 * spec.n_embd * spec.n_stream


def shares_of(model: Model, counts: Sequence[int]) -> list[Share]:
    """Shares of so many layers each; they are all of the model's."""
    if len(counts) == 1:
        return [Share(model)]
    n_layers = len(model.spec.layers)
    return [
        Share(
            Model(model.file, replace(model.spec, layers=model.spec.layers[start:end])),
            first_layer=start,
            embeds=start == 0,
            outputs=end == n_layers,
        )
        for start, end in pairwise((0, *accumulate(counts)))
    ]


def parts_of(spec: ModelSpec) -> list[int]:
    """How many layers in a row no cut may part.

    What an indexer chose stays on its GPU, so the layers that read the same stay there too.
    """
    parts: list[int] = []
    chooses = 0
    for layer in spec.layers:
        mixer = layer.mixer
        if isinstance(mixer, LatentAttentionSpec) and mixer.reads_as_before:
            parts[chooses:] = [sum(parts[chooses:]) + 1]
            continue
        if getattr(mixer, "indexer", None) is not None:
            chooses = len(parts)
        parts.append(1)
    return parts


def split_parts(sizes: Sequence[int], ends: tuple[int, int], room: Sequence[float]) -> list[int]:
    """How many parts each GPU takes, in order: at least one, its bytes in proportion to its room.

    sizes  bytes of each part, at least as many as there are GPUs
    ends   bytes that stand before the first part and behind the last one
    room   of each GPU, in any unit, above 0
    """
    n, total, scale = len(sizes), sum(sizes) + sum(ends), sum(room)
    middles = [ends[0] + end - size / 2 for size, end in zip(sizes, accumulate(sizes), strict=True)]
    edges = [0]
    for gpu, reached in enumerate(accumulate(room), 1):
        edge = sum(middle < total * reached / scale for middle in middles)
        edges.append(min(max(edge, edges[-1] + 1), n - (len(room) - gpu)))
    edges[-1] = n
    return [end - start for start, end in pairwise(edges)]


def layer_bytes(model: Model) -> list[int]:
    """Bytes of each layer's matrices."""
    return [
        sum(model.weights[linear.weight].n_bytes for linear in layer.linears)
        for layer in model.spec.layers
    ]


def end_bytes(model: Model) -> tuple[int, int]:
    """Bytes of the embedding table and of the output matrix."""
    spec = model.spec
    table, output = (model.weights[n].n_bytes for n in (spec.token_embedding, spec.output.weight))
    return table, output
