"""`/slots`: what each parallel place does; with `--slot-save-path` its KV to a file and back."""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
import time
from pathlib import Path

from aiohttp import web

from runtime.engine.statistics import SlotStatistics
from runtime.errors import RequestError
from server.body import json_response, read_request
from server.errors import Invalid, NotSupported, Unavailable
from server.fields import Fields
from server.sampling import settings_echo
from server.service import SERVICE, Service

# A plain name: no path, nothing hidden, nothing a file system treats specially.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_. -]{0,199}")


async def slots(request: web.Request) -> web.StreamResponse:
    service = request.config_dict[SERVICE]
    if not service.settings.slots:
        raise NotSupported("This server does not support slots endpoint. Start it with `--slots`")
    states = service.engine.statistics().slots
    if request.query.get("fail_on_no_slot") and all(slot.is_processing for slot in states):
        raise Unavailable("no slot available")
    return json_response([_slot(slot) for slot in states])


async def slot_action(request: web.Request) -> web.StreamResponse:
    service = request.config_dict[SERVICE]
    folder = service.settings.slot_save_path
    if folder is None:
        raise NotSupported(
            "This server does not support slots action. Start it with `--slot-save-path`"
        )
    slot = _slot_id(request.match_info["id"], service.limits.n_parallel)
    action = request.query.get("action", "")
    if action == "erase":
        return json_response({"id_slot": slot, "n_erased": await service.engine.erase_slot(slot)})
    if action not in ("save", "restore"):
        raise Invalid("Invalid action: use save, restore or erase")
    name = (await read_request(request, Fields)).text("filename")
    if name is None or not _NAME.fullmatch(name) or name.endswith((".", " ")):
        raise RequestError("filename", "must be a plain file name without a path")
    path = folder / name
    if action == "save":
        return json_response(await _save(service, slot, path))
    return json_response(await _restore(service, slot, path))


async def _save(service: Service, slot: int, path: Path) -> dict[str, object]:
    begun = time.perf_counter()
    image, n_tokens = await service.engine.save_slot(slot)
    await asyncio.to_thread(_write_whole, path, image)
    return {
        "id_slot": slot,
        "filename": path.name,
        "n_saved": n_tokens,
        "n_written": len(image),
        "timings": {"save_ms": 1e3 * (time.perf_counter() - begun)},
    }


async def _restore(service: Service, slot: int, path: Path) -> dict[str, object]:
    begun = time.perf_counter()
    image = await asyncio.to_thread(_read_whole, path)
    n_tokens = await service.engine.restore_slot(slot, image)
    return {
        "id_slot": slot,
        "filename": path.name,
        "n_restored": n_tokens,
        "n_read": len(image),
        "timings": {"restore_ms": 1e3 * (time.perf_counter() - begun)},
    }


def _write_whole(path: Path, image: bytes) -> None:
    """All or nothing: a reader never sees half a file."""
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(image)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _read_whole(path: Path) -> bytes:
    # No links out of the folder, and no waiting for the other end of a pipe.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        with open(path, "rb", opener=lambda name, _: os.open(name, flags)) as file:
            return file.read()
    except OSError as error:
        raise RequestError("filename", f"cannot be read: {error.strerror}") from error


def _slot_id(text: str, n_parallel: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 9 and int(text) < n_parallel):
        raise Invalid(f"Invalid slot ID: use 0 to {n_parallel - 1}")
    return int(text)


def _slot(slot: SlotStatistics) -> dict[str, object]:
    state: dict[str, object] = {
        "id": slot.id,
        "n_ctx": slot.n_ctx,
        "speculative": False,
        "is_processing": slot.is_processing,
    }
    if slot.request is None:
        return state
    return state | {
        "id_task": slot.request,
        "n_prompt_tokens": slot.n_prompt,
        "n_prompt_tokens_processed": slot.n_processed,
        "n_prompt_tokens_cache": slot.n_cached,
        "params": None if slot.params is None else settings_echo(slot.params, stream=False),
        "next_token": [
            {
                "has_next_token": slot.is_processing,
                "has_new_line": slot.has_new_line,
                "n_remain": slot.n_remain,
                "n_decoded": slot.n_generated,
            }
        ],
    }
