"""An asyncio runtime for GGUF Mixture-of-Experts models.  The names below are the whole public API.

They are imported when first used, so that `import runtime` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.config import EngineConfig as EngineConfig
    from runtime.engine.engine import Engine as Engine
    from runtime.engine.open_engine import open_engine as open_engine
    from runtime.engine.params import SamplingParams as SamplingParams
    from runtime.engine.token import Timings as Timings
    from runtime.engine.token import Token as Token
    from runtime.errors import ComputeError as ComputeError
    from runtime.errors import ConfigError as ConfigError
    from runtime.errors import ContextTooLong as ContextTooLong
    from runtime.errors import CorruptModel as CorruptModel
    from runtime.errors import DeviceError as DeviceError
    from runtime.errors import DeviceUnavailable as DeviceUnavailable
    from runtime.errors import EngineBug as EngineBug
    from runtime.errors import EngineClosed as EngineClosed
    from runtime.errors import EngineError as EngineError
    from runtime.errors import ModelError as ModelError
    from runtime.errors import RequestError as RequestError
    from runtime.errors import TemplateError as TemplateError
    from runtime.errors import TokenizerUnavailable as TokenizerUnavailable
    from runtime.errors import UnsupportedArchitecture as UnsupportedArchitecture
    from runtime.errors import UnsupportedFormat as UnsupportedFormat
    from runtime.profiling.instrument import Instrument as Instrument
    from runtime.profiling.record import StepRecord as StepRecord
    from runtime.progress import Progress as Progress
    from runtime.progress import ProgressBar as ProgressBar
    from runtime.text import load_tokenizer as load_tokenizer

HOMES = {
    "Engine": "runtime.engine.engine",
    "open_engine": "runtime.engine.open_engine",
    "EngineConfig": "runtime.config",
    "SamplingParams": "runtime.engine.params",
    "Token": "runtime.engine.token",
    "Timings": "runtime.engine.token",
    "Instrument": "runtime.profiling.instrument",
    "StepRecord": "runtime.profiling.record",
    "Progress": "runtime.progress",
    "ProgressBar": "runtime.progress",
    "load_tokenizer": "runtime.text",
    "ComputeError": "runtime.errors",
    "ConfigError": "runtime.errors",
    "ContextTooLong": "runtime.errors",
    "CorruptModel": "runtime.errors",
    "DeviceError": "runtime.errors",
    "DeviceUnavailable": "runtime.errors",
    "EngineBug": "runtime.errors",
    "EngineClosed": "runtime.errors",
    "EngineError": "runtime.errors",
    "ModelError": "runtime.errors",
    "RequestError": "runtime.errors",
    "TemplateError": "runtime.errors",
    "TokenizerUnavailable": "runtime.errors",
    "UnsupportedArchitecture": "runtime.errors",
    "UnsupportedFormat": "runtime.errors",
}
__all__ = list(HOMES)


def __getattr__(name: str) -> object:
    if name not in HOMES:
        raise AttributeError(f"module 'runtime' has no attribute {name!r}")
    value = getattr(import_module(HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
