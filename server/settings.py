"""ServerSettings: everything the flags decide, split into the engine's part and the server's own.

Reading the flags is pure: files that flags name are read here, nothing is opened or started.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, cast

from runtime import EngineConfig
from runtime.config import environment, moe_settings_in, shares_in
from runtime.errors import ConfigError, RequestError
from runtime.text.chat_template import check_variables
from server.flags import Given

T = TypeVar("T")

# flag key -> request field, where a sampling default has another name on the command line
SAMPLING_FIELDS = {
    "seed": "seed", "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "typical": "typical_p", "top_n_sigma": "top_n_sigma", "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold", "repeat_last_n": "repeat_last_n",
    "repeat_penalty": "repeat_penalty", "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty", "dry_multiplier": "dry_multiplier",
    "dry_base": "dry_base", "dry_allowed_length": "dry_allowed_length",
    "dry_penalty_last_n": "dry_penalty_last_n", "dry_sequence_breaker": "dry_sequence_breakers",
    "dynatemp_range": "dynatemp_range", "dynatemp_exp": "dynatemp_exponent", "mirostat": "mirostat",
    "mirostat_lr": "mirostat_eta", "mirostat_ent": "mirostat_tau",
    "adaptive_target": "adaptive_target", "adaptive_decay": "adaptive_decay",
    "samplers": "samplers", "sampler_seq": "samplers", "ignore_eos": "ignore_eos",
    "reverse_prompt": "stop", "predict": "max_tokens", "logit_bias": "logit_bias",
}  # fmt: skip

DEVICE_NAMES = {"none": "cpu", "CUDA0": "cuda"}
"""llama.cpp's names of devices."""

LLAMA_LOAD_MODES = {"auto": "pin", "mlock": "pin", "mmap+mlock": "pin", "none": "pin"}
"""llama.cpp's modes under other names: the file is always mapped, and pinned or not."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How the server behaves; the engine's own settings are an EngineConfig.

    aliases           names of the model in answers; empty: the file's name
    api_keys          empty: no key is asked for
    write_timeout     seconds a client may take nothing of its answer
    ping_interval     seconds of silence after which a stream gets a comment
    closing_seconds   how long running answers may go on after SIGTERM
    sampling          defaults of request fields that the command line set
    """

    host: str = "127.0.0.1"
    port: int = 8080
    reuse_port: bool = False
    aliases: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ("localhost",)
    api_prefix: str = ""
    metrics: bool = False
    slots: bool = True
    props: bool = False
    slot_save_path: Path | None = None
    write_timeout: float = 3600.0
    ping_interval: float = 30.0
    closing_seconds: float = 2.0
    sampling: Mapping[str, object] = field(default_factory=dict)
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, object] = field(default_factory=dict)
    prefill_assistant: bool = True
    reasoning_format: str = "auto"


def engine_config(given: Mapping[str, Given], model: str | Path | None) -> EngineConfig:
    """The engine's part of the flags.  `model`: the file to open, None for the bundled one."""
    parallel = _value(given, "parallel", -1)
    n_ctx = _value(given, "ctx_size", 0)
    chunks = [_value(given, name, 0) for name in ("batch_size", "ubatch_size") if name in given]
    threads = _value(given, "threads", -1)
    device = _value(given, "device", "auto")
    shares = _value(given, "tensor_split", None)
    return EngineConfig(
        model=model,
        n_ctx=n_ctx or None,
        n_parallel=None if parallel == -1 else parallel,
        n_threads=None if threads == -1 else threads,
        n_batch=min(chunks, default=None),
        cache_type_k=_value(given, "cache_type_k", "f16"),
        cache_type_v=_value(given, "cache_type_v", "f16"),
        device=DEVICE_NAMES.get(device, device),
        vram_limit=_value(given, "vram_limit", None),
        split_mode=_value(given, "split_mode", "auto"),
        main_gpu=_value(given, "main_gpu", 0),
        tensor_split=None if shares is None else shares_in(shares),
        moe_expert_cache=_value(given, "moe_expert_cache", -1),
        moe_cache=_moe_cache(given),
        vram_reserve=_vram_reserve(given),
        load_mode=_load_mode(given),
        n_snapshots=_value(given, "ctx_checkpoints", None),
        prefix_cache=_value(given, "cache_prompt", True),
        name_bus_errors=True,
    )


def server_settings(given: Mapping[str, Given]) -> ServerSettings:
    """The server's part of the flags.  Raises: ConfigError naming the flag."""
    prefix = _value(given, "api_prefix", "")
    if prefix and (not prefix.startswith("/") or prefix.endswith("/")):
        raise ConfigError(f"--api-prefix {prefix}: use a path like /llm")
    port = _value(given, "port", 8080)
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port {port}: use 0 to 65535")
    timeout = _value(given, "timeout", 3600)
    if timeout < 1:
        raise ConfigError(f"--timeout {timeout}: use at least 1 second")
    return ServerSettings(
        host=_value(given, "host", "127.0.0.1"),
        port=port,
        reuse_port=_value(given, "reuse_port", False),
        aliases=_words(_value(given, "alias", "")),
        api_keys=_api_keys(given),
        cors_origins=_words(_value(given, "cors_origins", "localhost")),
        api_prefix=prefix,
        metrics=_value(given, "metrics", False),
        slots=_value(given, "slots", True),
        props=_value(given, "props", False),
        slot_save_path=_folder(given, "slot_save_path"),
        write_timeout=float(timeout),
        sampling=_sampling(given),
        chat_template=_chat_template(given),
        chat_template_kwargs=_template_kwargs(given),
        prefill_assistant=_value(given, "prefill_assistant", True),
        reasoning_format=_value(given, "reasoning_format", "auto"),
    )


def _moe_cache(given: Mapping[str, Given]) -> tuple[tuple[str, str], ...]:
    """--moe, and --moe-cache-window as one of its settings."""
    settings = dict(moe_settings_in(str(given["moe"].value)) if "moe" in given else ())
    if "moe_cache_window" in given:
        settings["window"] = str(given["moe_cache_window"].value)
    return tuple(settings.items())


def _vram_reserve(given: Mapping[str, Given]) -> int | None:
    """MiB to leave free: --fit-target, or the seed's variable of old."""
    text = environment("LLAMA_MOE_CACHE_MARGIN_MB")
    if "fit_target" in given or text is None:
        return _value(given, "fit_target", None)
    if not text.isdigit():
        raise ConfigError(f"LLAMA_MOE_CACHE_MARGIN_MB = {text[:40]!r}: use a whole number of MiB")
    return int(text)


def _load_mode(given: Mapping[str, Given]) -> str:
    """--load-mode, or what llama.cpp's older switches mean here: mapped pages that stay, or not."""
    pins = _value(given, "mlock", False) or not _value(given, "mmap", True)
    usual = "mmap" if "mmap" in given and not pins else "pin"
    return LLAMA_LOAD_MODES.get(mode := _value(given, "load_mode", usual), mode)


def _value(given: Mapping[str, Given], key: str, default: T) -> T:
    """The flag's value (the flag table gives it the kind of `default`), or `default`."""
    return cast(T, given[key].value) if key in given else default


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _api_keys(given: Mapping[str, Given]) -> tuple[str, ...]:
    keys = list(_words(_value(given, "api_key", "")))
    if "api_key_file" in given:
        lines = (line.strip() for line in _read(given, "api_key_file").splitlines())
        keys += [line for line in lines if line and not line.startswith("#")]
    if not keys and ("api_key" in given or "api_key_file" in given):
        source = given.get("api_key") or given["api_key_file"]
        raise ConfigError(f"{source.source}: no key in it; the server would be open")
    return tuple(keys)


def _folder(given: Mapping[str, Given], key: str) -> Path | None:
    if key not in given:
        return None
    folder = Path(str(given[key].value))
    if not folder.is_dir():
        raise ConfigError(f"{given[key].source} {folder}: not a folder")
    return folder


def _read(given: Mapping[str, Given], key: str) -> str:
    try:
        return Path(str(given[key].value)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{given[key].source} {given[key].value}: {error}") from error


def _chat_template(given: Mapping[str, Given]) -> str | None:
    if "chat_template_file" in given:
        return _read(given, "chat_template_file")
    return _value(given, "chat_template", "") or None


def _template_kwargs(given: Mapping[str, Given]) -> dict[str, object]:
    kwargs: dict[str, object] = {}
    if "chat_template_kwargs" in given:
        try:
            parsed = json.loads(str(given["chat_template_kwargs"].value))
        except ValueError as error:
            raise ConfigError(f"--chat-template-kwargs: not valid JSON: {error}") from error
        if not isinstance(parsed, dict):
            raise ConfigError("--chat-template-kwargs: must be a JSON object")
        try:
            check_variables(parsed)
        except RequestError as error:
            raise ConfigError(f"--chat-template-kwargs: {error.message}") from error
        kwargs |= parsed
    reasoning = _value(given, "reasoning", "auto")
    if reasoning != "auto":
        kwargs["enable_thinking"] = reasoning == "on"
    return kwargs


def _sampling(given: Mapping[str, Given]) -> dict[str, object]:
    """The request fields that flags set, validated once by building the parameters from them."""
    from runtime import SamplingParams

    fields: dict[str, object] = {}
    for key, name in SAMPLING_FIELDS.items():
        if key not in given:
            continue
        value = given[key].value
        if key == "samplers":
            value = tuple(word for word in str(value).split(";") if word)
        if key == "logit_bias":
            value = tuple(_bias(text) for text in _texts(value))
        fields[name] = value
    try:
        SamplingParams(**fields)  # type: ignore[arg-type]
    except RequestError as error:
        raise ConfigError(f"sampling default {error.field}: {error.message}") from error
    return fields


def _texts(value: object) -> tuple[str, ...]:
    return tuple(str(text) for text in value) if isinstance(value, tuple) else (str(value),)


def _bias(text: str) -> tuple[int, float]:
    """`15043+1.5` or `15043-inf`: a token id and what is added to its logit."""
    position = max(text.find("+"), text.find("-"))
    try:
        return int(text[:position]), float(text[position:])
    except ValueError:
        raise ConfigError(f"--logit-bias {text}: use TOKEN_ID+BIAS or TOKEN_ID-BIAS") from None
