"""Every exception hotexpert raises on purpose; the server maps each class to one HTTP status.

Messages name the setting, field or file position that is wrong and what would work.
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of everything raised on purpose."""


class ConfigError(EngineError):
    """A setting is impossible; the message names the setting, its value and what would work."""


class ModelError(EngineError):
    """The model cannot be used."""


class UnsupportedArchitecture(ModelError):
    """`general.architecture` is not one of the known architectures."""


class UnsupportedFormat(ModelError):
    """A tensor has a type, or the file a version, that is not implemented."""


class CorruptModel(ModelError):
    """A model file contradicts itself or its own length; names the file and the position or key."""

    def __init__(self, path: object, what: str) -> None:
        super().__init__(f"{path}: {what}")
        self.path = str(path)
        self.what = what


class TokenizerUnavailable(ModelError):
    """The model has no tokenizer, or an unknown one: token ids work, text does not."""


class TemplateError(ModelError):
    """A chat template is missing, invalid, or exceeded its limits."""


class ComputeError(EngineError):
    """A step gave no numbers, or not finite ones; its requests end, the engine lives on."""


class DeviceError(EngineError):
    """An accelerator cannot be used."""


class DeviceUnavailable(DeviceError):
    """No driver, no device, or one that is too old."""


class CudaError(DeviceError):
    """A call of the CUDA driver failed; `code` is the driver's name for the reason."""

    def __init__(self, call: str, code: str, explanation: str) -> None:
        super().__init__(f"{call} failed with {code}: {explanation}")
        self.call = call
        self.code = code
        self.explanation = explanation


class DeviceLost(CudaError):
    """The GPU fell into a state that every later call reports; only a new process recovers it."""


class DeviceStalled(DeviceError):
    """The GPU made no progress for longer than its work can take; the work may end yet."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the GPU did not end its work within {seconds:.1f} s")
        self.seconds = seconds


class CloseStalled(DeviceError):
    """A CPU worker or a GPU did not let go of the engine's memory; a new process is needed."""

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"a CPU worker or the GPU has not ended its work {seconds:.0f} s after the engine was "
            "closed; end the process"
        )


class ExchangeStalled(DeviceError, ComputeError):
    """The CPU workers did not compute in time what the GPU missed; the step's results are void."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}; the step is lost, the next one may succeed")


class HandOverStalled(DeviceError, ComputeError):
    """A GPU waited in vain for the one before or behind it; the step's results are void."""

    def __init__(self, giver: int, taker: int) -> None:
        super().__init__(
            f"GPU {taker} of the model's did not get the step from GPU {giver}; the step is lost, "
            "the next one may succeed"
        )


class OutOfGraphMemory(DeviceError, ComputeError):
    """A step's graph found no memory on the GPU, whatever was given back for it; the engine lives
    on, and shorter prompts may succeed."""

    def __init__(self, what: str, error: OutOfDeviceMemory) -> None:
        super().__init__(f"no graph for {what}: {error}")


class OutOfDeviceMemory(CudaError):
    """The GPU's memory is full. Bytes `asked` for, where the call names them, and bytes `free`."""

    def __init__(self, call: str, asked: int | None, free: int | None) -> None:
        wanted = "" if asked is None else f"{asked} bytes asked for, "
        left = "free memory unknown" if free is None else f"{free} bytes free"
        super().__init__(
            call,
            "CUDA_ERROR_OUT_OF_MEMORY",
            f"{wanted}{left} on the GPU; use a smaller context (n_ctx, --ctx-size) or fewer "
            "experts there (moe_expert_cache), or end what else uses it",
        )
        self.asked = asked
        self.free = free


class PinningFailed(DeviceError):
    """Host memory could not be made readable for the GPU."""

    def __init__(self, nbytes: int, reason: str) -> None:
        super().__init__(
            f"cannot pin {nbytes} bytes of host memory ({reason}); "
            "use less, or raise the limit on locked memory (ulimit -l)"
        )
        self.nbytes = nbytes
        self.reason = reason


class PtxCompileError(DeviceError):
    """The driver's assembler refuses a kernel's text; `log` names the file and line."""

    def __init__(self, kernel: str, log: str) -> None:
        super().__init__(f"kernel {kernel}: {log}")
        self.kernel = kernel
        self.log = log


class RequestError(EngineError):
    """A request is wrong; `field` names the part of it that is."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"Field '{field}': {message}")
        self.field = field
        self.message = message


class ContextTooLong(RequestError):
    """The prompt does not fit the context of a sequence."""

    def __init__(self, n_prompt_tokens: int, n_ctx: int) -> None:
        super().__init__(
            "prompt",
            f"the prompt has {n_prompt_tokens} tokens, more than the context of {n_ctx} allows; "
            "shorten it or use a larger context (n_ctx, --ctx-size)",
        )
        self.n_prompt_tokens = n_prompt_tokens
        self.n_ctx = n_ctx


class EngineClosed(EngineError):
    """The engine is closed or closing."""


class EngineBug(EngineError):
    """An invariant of the engine itself broke; please report it."""
