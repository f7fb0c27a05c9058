"""Service: the one object handlers share: the settings, and the engine once it is there."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from runtime import Engine, EngineConfig, Progress
from runtime.errors import ConfigError, EngineError
from server.errors import Unavailable
from server.requests import Limits
from server.settings import ServerSettings

if TYPE_CHECKING:
    from runtime.text.chat_template import ChatTemplate


class Service:
    """State of one server.

    `engine` raises while there is none; `failed` tells why there never will be.
    """

    def __init__(self, config: EngineConfig, settings: ServerSettings, progress: Progress) -> None:
        self.config = config
        self.settings = settings
        self.progress = progress
        self.started = time.time()
        self.listening = asyncio.Event()
        self.attached = asyncio.Event()
        self.closing = asyncio.Event()
        self.failed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self.n_open_requests = 0
        self._engine: Engine | None = None
        self._limits: Limits | None = None
        self._template: ChatTemplate | None = None

    async def attach(self, engine: Engine) -> None:
        """The engine is ready.  Raises: EngineError where the settings do not suit the model."""
        # The command line's defaults lie over the model's.
        defaults = replace(engine.default_params, **self.settings.sampling)  # type: ignore[arg-type]
        self._limits = Limits(
            engine.model.n_vocab, engine.shape.n_ctx_sequence, engine.shape.n_parallel, defaults
        )
        if self.settings.chat_template is not None:
            # A template may take seconds to compile.
            self._template = await asyncio.to_thread(_override, engine, self.settings.chat_template)
        self._engine = engine
        self.attached.set()

    def detach(self) -> None:
        self._engine = None

    @property
    def is_attached(self) -> bool:
        return self._engine is not None

    @property
    def is_ready(self) -> bool:
        return self._engine is not None and not self.closing.is_set()

    @property
    def engine(self) -> Engine:
        """Raises: Unavailable while loading or closing."""
        if self._engine is None or self.closing.is_set():
            raise Unavailable("closing" if self.closing.is_set() else "Loading model")
        return self._engine

    @property
    def limits(self) -> Limits:
        """Raises: Unavailable while loading or closing."""
        if self._limits is None or not self.is_ready:
            raise Unavailable("closing" if self.closing.is_set() else "Loading model")
        return self._limits

    @property
    def chat_template(self) -> ChatTemplate:
        """The template of --chat-template, else the model's.

        Raises: TemplateError, Unavailable.
        """
        return self._template if self._template is not None else self.engine.chat_template

    @property
    def model_name(self) -> str:
        """What answers call the model, whatever name was asked for."""
        if self.settings.aliases:
            return self.settings.aliases[0]
        return "fake" if self.model_path is None else self.model_path.name

    @property
    def model_path(self) -> Path | None:
        """The file that is served; None for the fake device without one."""
        if self.config.device == "fake" and self.config.model is None:
            return None
        return self.config.model_path


def _override(engine: Engine, source: str) -> ChatTemplate:
    from runtime.text.chat_template import ChatTemplate

    try:
        return ChatTemplate.for_model(engine.model.metadata, engine.tokenizer, source)
    except EngineError as error:
        raise ConfigError(f"--chat-template: {error}") from error


SERVICE: web.AppKey[Service] = web.AppKey("service", Service)
