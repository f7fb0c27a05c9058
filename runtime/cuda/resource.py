"""What the driver lends and must get back exactly once."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Self

from runtime.errors import DeviceLost, EngineBug

if TYPE_CHECKING:
    from runtime.cuda.device import Device

logger = logging.getLogger(__name__)


class Resource:
    """A handle of the driver that is given back by `close` or at the end of `with`.

    Closing twice is one release. What a device still holds when it is closed is reported by it.
    `label` says what it is for, in that report.
    """

    def __init__(self, device: Device, handle: Any, label: str) -> None:
        self.device = device
        self.label = label
        self._handle = handle
        device.track(self)

    @property
    def handle(self) -> Any:
        """What driver calls take. Raises: EngineBug once it is closed."""
        if self._handle is None:
            raise EngineBug(f"{self} is used after it was closed")
        return self._handle

    @property
    def closed(self) -> bool:
        return self._handle is None

    def close(self) -> None:
        """Give it back to the driver; on a lost device there is nothing left to give.

        Raises: CudaError.
        """
        if self._handle is None:
            return
        handle, self._handle = self._handle, None
        self.device.forget(self)
        try:
            self._release(handle)
        except DeviceLost as error:
            logger.debug("%s went with its device: %s", self, error)

    def _release(self, handle: Any) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def __str__(self) -> str:
        return f"{type(self).__name__} {self.label!r}"
