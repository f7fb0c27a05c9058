"""open_engine: load a model, and serve until the block ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager

from runtime.checks import shown
from runtime.config import EngineConfig
from runtime.engine.engine import Engine
from runtime.engine.opening import open_off_loop
from runtime.errors import ConfigError
from runtime.profiling.environment import instruments_from_environment
from runtime.progress import Progress

logger = logging.getLogger(__name__)


@asynccontextmanager
async def open_engine(
    config: EngineConfig, progress: Progress | None = None
) -> AsyncIterator[Engine]:
    """Load the model off the loop and serve until the block ends.

    progress: where the load stands, readable meanwhile (`progress.state.phase`), for /health.
    Cancelling the load ends it at once; a thread may compile on for a moment and then cleans up.
    An engine whose own steps fail cancels the block and leaves it with the cause.
    Raises: ConfigError, ModelError, DeviceError.
    """
    if not isinstance(config, EngineConfig):
        raise ConfigError(f"config: {shown(config)} is not a runtime.EngineConfig(model=...)")
    if progress is None:
        progress = Progress()
    elif not isinstance(progress, Progress):
        raise ConfigError(f"progress: {shown(progress)} is not a runtime.Progress")
    async with AsyncExitStack() as stack:
        opened_engines: list[Engine] = []
        instruments = await asyncio.to_thread(
            instruments_from_environment,
            lambda: opened_engines[0].expert_totals if opened_engines else None,
        )
        opened = await open_off_loop(config, progress)
        stack.push_async_callback(opened.close)
        helper = ThreadPoolExecutor(1, thread_name_prefix="engine helper")
        # Nobody waits for its work any more when the block ends, and joining would block the loop.
        stack.callback(helper.shutdown, wait=False, cancel_futures=True)
        engine = Engine(config, opened, helper)
        opened_engines.append(engine)
        for instrument in instruments:
            engine.attach(instrument)
        stack.push_async_callback(engine._let_instruments_go)
        progress.finish()
        logger.info("%s on %s (%s)", opened.model.name, config.device, opened.reason)
        for line in () if opened.plan is None else opened.plan.lines():
            logger.info("%s", line)
        try:
            async with asyncio.TaskGroup() as tasks:
                engine._start(tasks)
                try:
                    yield engine
                finally:
                    engine.close()
        except BaseExceptionGroup as group:
            # One thing went wrong first: the block's own exception, or the step that failed and
            # cancelled the block.  What went wrong after it is for the log only.
            first = engine.failure or group.exceptions[0]
            for other in group.exceptions:
                if other is not first:
                    logger.error("another error while the engine ended", exc_info=other)
            raise first from first.__cause__
