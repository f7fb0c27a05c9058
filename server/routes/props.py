"""`/props`: what the server runs with.

POST changes nothing and exists for `--props`, as in llama-server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from aiohttp import web

from runtime.errors import EngineError
from runtime.models.model_type import file_type_name
from server.body import json_response, read_request
from server.build import BUILD_INFO
from server.errors import NotSupported
from server.fields import Fields
from server.sampling import settings_echo
from server.service import SERVICE, Service


async def props(request: web.Request) -> web.StreamResponse:
    service = request.config_dict[SERVICE]
    engine, limits, settings = service.engine, service.limits, service.settings
    return json_response(
        {
            "default_generation_settings": {
                "params": settings_echo(limits.defaults, stream=False),
                "n_ctx": engine.shape.n_ctx_sequence,
            },
            "total_slots": limits.n_parallel,
            "model_alias": service.model_name,
            "model_ftype": file_type_name(engine.model.file_type),
            "model_path": str(service.model_path or ""),
            "modalities": {"vision": False, "video": False, "audio": False},
            **await asyncio.to_thread(_chat_template, service),
            "bos_token": _special(service, "bos_id"),
            "eos_token": _special(service, "eos_id"),
            "build_info": BUILD_INFO,
            "endpoint_slots": settings.slots,
            "endpoint_props": settings.props,
            "endpoint_metrics": settings.metrics,
            "is_sleeping": False,
            "engine": engine.describe(),
        }
    )


async def change_props(request: web.Request) -> web.StreamResponse:
    service = request.config_dict[SERVICE]
    if not service.settings.props:
        raise NotSupported(
            "This server does not support changing global properties. Start it with `--props`"
        )
    await read_request(request, Fields)
    return json_response({"success": True})


def _chat_template(service: Service) -> dict[str, object]:
    """The template and what it can express, which is found by rendering small conversations."""
    try:
        template = service.chat_template
    except EngineError:
        return {"chat_template": "", "chat_template_caps": {}}
    try:
        capabilities: Mapping[str, object] = template.capabilities.as_dict()
    except EngineError:  # a template that fails its limits says nothing about itself
        capabilities = {}
    return {"chat_template": template.source, "chat_template_caps": capabilities}


def _special(service: Service, name: str) -> str:
    """The text of a special token; empty where the model has none or no tokenizer."""
    try:
        tokenizer = service.engine.tokenizer
    except EngineError:
        return ""
    identifier = getattr(tokenizer, name)
    return "" if identifier is None else str(tokenizer.decode([identifier], special=True))
