"""WarmUp: graphs that steps will want, captured while there is nothing else to do.

Capturing takes 10 to 100 ms, which the first prompt of its length would wait for.
"""

from __future__ import annotations

import asyncio
from collections import deque
from threading import Lock

from runtime.engine.gpu.gpu_parts import GPUParts
from runtime.errors import DeviceError
from runtime.notices import Reason


class WarmUp:
    """Of an executor; ends when its resources are given back."""

    def __init__(self, parts: GPUParts) -> None:
        self._steps, self._notices = parts.steps, parts.planned.settings.notices
        self._left = deque(parts.shapes.likely())
        self._busy = Lock()
        parts.resources.callback(self.close)

    async def next(self) -> bool:
        """Capture one more graph; no step begins meanwhile.  False: it was the last one."""
        return await asyncio.to_thread(self._capture)

    def _capture(self) -> bool:
        with self._busy:
            while self._left:
                shape = self._left.popleft()
                if self._steps.is_captured(shape):
                    continue
                try:
                    self._steps.of(shape)
                except DeviceError as error:  # whoever needs it finds a way, or is told
                    text = f"graphs are captured when steps need them: {error}"
                    self._notices.add(Reason.SHRUNK, text)
                    self._left.clear()
                break
            return bool(self._left)

    def close(self) -> None:
        """Nothing is captured any more; waits for what is."""
        with self._busy:
            self._left.clear()
