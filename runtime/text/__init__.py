"""Text: tokenizers and chat templates, both read from the model file's metadata."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.text.tokenizer import Tokenizer


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a GGUF file, which may hold a vocabulary only.

    Raises: TokenizerUnavailable when the file has no tokenizer or an unknown one, CorruptModel
    when it is damaged, ConfigError for what is no path.
    """
    from runtime.checks import shown
    from runtime.config import names_a_file
    from runtime.errors import ConfigError
    from runtime.models.gguf import open_gguf
    from runtime.text.tokenizer import Tokenizer

    if not names_a_file(path):
        raise ConfigError(f"path: {shown(path)}: use the path of a GGUF file")
    with open_gguf(path) as file:
        return Tokenizer.from_metadata(file.metadata, source=path)
