"""Models as data: open a GGUF file and get its metadata, spec and weights."""

from __future__ import annotations

from runtime.models.architectures import ARCHITECTURES
from runtime.models.gguf import GGUFFile, open_gguf
from runtime.models.gguf_header import MetadataValue, TensorInfo
from runtime.models.model import Model, open_model
from runtime.models.weights import Weight

__all__ = [
    "ARCHITECTURES",
    "GGUFFile",
    "MetadataValue",
    "Model",
    "TensorInfo",
    "Weight",
    "open_gguf",
    "open_model",
]
