"""`/v1/models`: the one model, in OpenAI's list and in the `models` that Ollama's clients read."""

from __future__ import annotations

from aiohttp import web

from runtime.models.model_type import file_type_name
from server.body import json_response
from server.service import SERVICE, Service

VOCAB_TYPES = {"llama": 1, "gpt2": 2}  # llama.cpp's numbers; 0: none


async def models(request: web.Request) -> web.StreamResponse:
    service = request.config_dict[SERVICE]
    name = service.model_name
    entry = {
        "id": name,
        "aliases": list(service.settings.aliases),
        "tags": [],
        "object": "model",
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
        "created": int(service.started),
        "owned_by": "llamacpp",
        "meta": _meta(service) if service.is_ready else None,
    }
    summary = {
        "name": name,
        "model": name,
        "type": "model",
        "capabilities": ["completion"],
        "modified_at": "",
        "size": "",
        "digest": "",
        "description": "",
        "tags": [],
        "parameters": "",
        "details": {
            "parent_model": "",
            "format": "gguf",
            "family": "",
            "families": [],
            "parameter_size": "",
            "quantization_level": "",
        },
    }
    return json_response({"object": "list", "data": [entry], "models": [summary]})


def _meta(service: Service) -> dict[str, object]:
    engine = service.engine
    model = engine.model
    return {
        "vocab_type": VOCAB_TYPES.get(str(model.metadata.get("tokenizer.ggml.model")), 0),
        "n_vocab": model.n_vocab,
        "n_ctx": engine.shape.n_ctx_sequence,
        "n_ctx_train": model.n_ctx_train,
        "n_embd": model.n_embd,
        "n_params": model.n_params,
        "size": model.n_bytes,
        "ftype": file_type_name(model.file_type),
    }
