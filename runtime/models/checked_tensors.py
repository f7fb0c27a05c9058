"""CheckedTensors: a file's tensors and numbers, checked against each other as they are used."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from runtime.errors import CorruptModel, ModelError
from runtime.models.gguf_header import MetadataValue, TensorInfo
from runtime.models.hyperparameters import Hyperparameters
from runtime.models.linear import Linear

TOKEN_EMBEDDING = "token_embd.weight"


class CheckedTensors:
    """The tensors of one model, each checked as it is asked for.

    n_layers  without the last blocks, which draft tokens ahead: the model is whole without them,
              and their tensors count as known
    """

    def __init__(
        self,
        path: Path,
        architecture: str,
        metadata: Mapping[str, MetadataValue],
        tensors: Mapping[str, TensorInfo],
    ) -> None:
        self.path = path
        self.keys = Hyperparameters(path, architecture, metadata)
        self.n_embd = self.keys.count("embedding_length")
        n_blocks = self.keys.count("block_count")
        n_draft = self.keys.count("nextn_predict_layers", 0, at_least=0)
        if n_draft >= n_blocks:
            raise self.keys.wrong("nextn_predict_layers", f"the file has {n_blocks} blocks")
        self.n_layers = n_blocks - n_draft
        self._tensors = tensors
        self._used = {name for name in tensors if self.n_layers <= _block(name) < n_blocks}
        self._check_drafts()

    def _check_drafts(self) -> None:
        """Raises: CorruptModel where a block would be left out that does not draft."""
        drafting = {_block(name) for name in self._used if ".nextn." in name}
        others = sorted({_block(name) for name in self._used} - drafting)
        if others:
            raise self.keys.wrong(
                "nextn_predict_layers",
                f"block {others[0]} does not draft: it has no tensor 'blk.{others[0]}.nextn.*'",
            )

    def has(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the tensor `name`.  Raises: CorruptModel where it is missing."""
        if name not in self._tensors:
            raise CorruptModel(self.path, f"tensor '{name}' is missing")
        return self._tensors[name].shape

    def tensor(self, name: str, *shape: int) -> str:
        """`name`, after checking that the file has it with `shape` (trailing ones may be left out).

        Raises: CorruptModel naming the tensor, the expected shape and the one found.
        """
        found = self.shape(name)
        if _without_trailing_ones(found) != _without_trailing_ones(shape):
            raise CorruptModel(
                self.path,
                f"tensor '{name}' has the shape {list(found)}; the metadata asks for {list(shape)}",
            )
        self._used.add(name)
        return name

    def optional(self, name: str, *shape: int) -> str | None:
        """`tensor`, or None when the file does not have it."""
        return self.tensor(name, *shape) if self.has(name) else None

    def linear(self, name: str, n_in: int, n_out: int, n_expert: int | None = None) -> Linear:
        """The matrix `name.weight`, with `name.bias` and `name.scale` where the file has them."""
        stack = () if n_expert is None else (n_expert,)
        return Linear(
            weight=self.tensor(f"{name}.weight", n_in, n_out, *stack),
            n_in=n_in,
            n_out=n_out,
            bias=self.optional(f"{name}.bias", n_out, *stack),
            scale=self.optional(f"{name}.scale", *(stack or (1,))),
            n_expert=n_expert,
        )

    def n_vocab(self) -> int:
        """Rows of the embedding table, after checking it against the vocabulary."""
        shape = self.shape(TOKEN_EMBEDDING)
        n_vocab = shape[1] if len(shape) > 1 else 1
        tokens = self.keys.metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, list) and len(tokens) != n_vocab:
            raise CorruptModel(
                self.path,
                f"'tokenizer.ggml.tokens' has {len(tokens)} entries, the embedding {n_vocab} rows",
            )
        if self.keys.count("vocab_size", n_vocab) != n_vocab:
            raise self.keys.wrong("vocab_size", f"the embedding has {n_vocab} rows")
        return n_vocab

    def refuse_unknown(self) -> None:
        """Raises: ModelError for tensors that no part has asked for."""
        unknown = sorted(set(self._tensors) - self._used)
        if unknown:
            raise ModelError(
                f"{self.path}: {len(unknown)} tensors that architecture "
                f"'{self.keys.architecture}' does not know: {', '.join(unknown[:4])}"
            )


def _block(tensor: str) -> int:
    """The number N of a tensor `blk.N.*`; -1 for others."""
    found = re.match(r"blk\.(\d{1,9})\.", tensor)
    return int(found[1]) if found else -1


def _without_trailing_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape
