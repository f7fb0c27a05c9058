"""ModelFacts: what callers may know of the open model, without its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.errors import EngineError, TemplateError, TokenizerUnavailable

if TYPE_CHECKING:
    from runtime.models.model import Model
    from runtime.text.chat_template import ChatTemplate
    from runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ModelFacts:
    """name and architecture as the file gives them, sizes, all metadata, and the text side.

    path        the file; None for the fake model
    n_params    weights; n_bytes: what they take in the file; both 0 for the fake model
    file_type   `general.file_type` as the file has it, else -1
    fingerprint   tells its weights from those of others of the same sizes; empty for the fake model
    text_error, template_error   why there is no tokenizer or no chat template
    """

    name: str
    architecture: str
    path: Path | None
    metadata: Mapping[str, object] = field(repr=False)  # with the vocabulary, megabytes of text
    n_vocab: int
    n_ctx_train: int
    n_embd: int
    n_params: int = 0
    n_bytes: int = 0
    n_expert: int = 0
    fingerprint: str = ""
    text: Tokenizer | None = field(default=None, repr=False)
    text_error: str = ""
    template: ChatTemplate | None = field(default=None, repr=False)
    template_error: str = ""

    @property
    def has_tokenizer(self) -> bool:
        return self.text is not None

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises: TokenizerUnavailable."""
        if self.text is None:
            raise TokenizerUnavailable(self.text_error)
        return self.text

    @property
    def chat_template(self) -> ChatTemplate:
        """Raises: TemplateError."""
        if self.template is None:
            raise TemplateError(self.template_error)
        return self.template

    @cached_property
    def file_type(self) -> int:
        value = self.metadata.get("general.file_type")
        return value if isinstance(value, int) else -1


def facts_of(model: Model) -> ModelFacts:
    """The facts of an open model file."""
    from runtime.models.fingerprint import fingerprint

    spec = model.spec
    tensors = model.file.tensors.values()
    tokenizer, text_error = open_tokenizer(model.metadata, model.path.name)
    template, template_error = open_template(model.metadata, tokenizer)
    return ModelFacts(
        name=spec.name or model.path.stem,
        architecture=spec.architecture,
        path=model.path,
        metadata=model.metadata,
        n_vocab=spec.n_vocab,
        n_ctx_train=spec.n_ctx_train,
        n_embd=spec.n_embd,
        n_params=sum(prod(tensor.shape) for tensor in tensors),
        n_bytes=sum(tensor.n_bytes for tensor in tensors),
        n_expert=spec.n_expert_max,
        fingerprint=fingerprint(model),
        text=tokenizer,
        text_error=text_error,
        template=template,
        template_error=template_error,
    )


def open_tokenizer(
    metadata: Mapping[str, object], source: str = "tokenizer"
) -> tuple[Tokenizer | None, str]:
    """The tokenizer that `metadata` describes, or None and the reason; errors name `source`."""
    from runtime.text.tokenizer import Tokenizer

    try:
        return Tokenizer.from_metadata(metadata, source), ""
    except TokenizerUnavailable as error:
        return None, str(error)


def open_template(
    metadata: Mapping[str, object], tokenizer: Tokenizer | None
) -> tuple[ChatTemplate | None, str]:
    """The chat template of `metadata`, or None and the reason."""
    from runtime.text.chat_template import ChatTemplate

    if tokenizer is None:
        return None, "a chat template needs a tokenizer, which the model lacks"
    try:
        return ChatTemplate.for_model(metadata, tokenizer), ""
    except EngineError as error:
        return None, str(error)
