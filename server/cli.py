"""`python -m runtime.server` and `hotexpert serve`: flags in, a running server until SIGTERM.

Importing this file and answering --help load neither aiohttp nor the engine.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from runtime.config import MOE_VARIABLES, environment, environment_names
from runtime.errors import ConfigError
from server.flag_table import CACHE_VARIABLES, FLAGS, NO_TUNING
from server.flags import Given, completion_script, help_text, parse_flags

if TYPE_CHECKING:
    from pathlib import Path

    from runtime import EngineConfig
    from server.settings import ServerSettings

PROGRAM = "python -m runtime.server"


def main(arguments: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """The exit status: 0 after a clean end, 1 with one line that says what was wrong, 130 where
    Ctrl-C came before there was a server to close.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        given = parse_flags(arguments, FLAGS, environment)
        if inform(given, program):
            return 0
        return serve(given)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def inform(given: Mapping[str, Given], program: str = PROGRAM) -> bool:
    """Print what an information flag asks for; False where there is none."""
    asked = {key for key, item in given.items() if item.value and item.flag.group == "Information"}
    if "help" in asked:
        print(help_text(FLAGS, program), end="")
    elif "version" in asked:
        from server.build import BUILD_INFO

        print(BUILD_INFO)
    elif "list_devices" in asked:
        print("Available devices:\n  CPU")
        for line in gpu_lines():
            print(f"  {line}")
    elif "cache_list" in asked:
        from server.download import cached_files

        print("\n".join(cached_files()) or "no GGUF files in the cache")
    elif "completion_bash" in asked:
        print(completion_script(FLAGS), end="")
    return bool(asked)


def gpu_lines() -> list[str]:
    """The machine's GPUs, or why there is none, for --list-devices."""
    from runtime.cuda.driver import device_names
    from runtime.errors import DeviceUnavailable

    try:
        return [f"CUDA{index}: {name}" for index, name in enumerate(device_names())]
    except DeviceUnavailable as error:
        return [f"no GPU: {error}"]


def serve(given: Mapping[str, Given]) -> int:
    """Run the server these settings describe.  Raises: ConfigError."""
    import asyncio

    from server import logs
    from server.run import run
    from server.settings import engine_config, server_settings

    refuse(given)
    settings = server_settings(given)
    config = engine_config(given, model_file(given))
    logs.set_up(given)
    for line in explain(given, config, settings):
        print(line, file=sys.stderr)
    return asyncio.run(run(config, settings))


def refuse(given: Mapping[str, Given]) -> None:
    """Raises: ConfigError for a flag that cannot be honoured and must not be ignored."""
    for item in given.values():
        if item.flag.refused is not None:
            raise ConfigError(f"{item.source} is not supported: {item.flag.refused}")


def model_file(given: Mapping[str, Given]) -> Path | None:
    """The file of -m, or of -hf or -mu after a download; None for the bundled model."""
    from pathlib import Path

    if "model" in given:
        if not given["model"].value:
            raise ConfigError(f"{given['model'].source}: the file's name is empty")
        return Path(str(given["model"].value))
    offline = "offline" in given and bool(given["offline"].value)
    if "model_url" in given:
        from server.model_url import fetch, models_directory

        return fetch(str(given["model_url"].value), models_directory(), offline=offline)
    if "hf_repo" not in given:
        return None
    from server.download import download

    file, token = given.get("hf_file"), given.get("hf_token")
    return download(
        str(given["hf_repo"].value),
        None if file is None else str(file.value),
        None if token is None else str(token.value),
        offline=offline,
    )


def explain(
    given: Mapping[str, Given], config: EngineConfig, settings: ServerSettings
) -> list[str]:
    """The values chosen at start with their reasons, and every setting that has no effect."""
    chosen = ", set by "
    lines = []
    if config.device == "fake":
        lines.append("device: fake: nothing is computed, answers are noise")
    elif config.model is None:
        lines.append(
            f"model: {config.model_path.name}, the bundled DEMONSTRATION model: "
            "it is tiny and shows that everything works; for useful answers "
            "give a GGUF file with -m or a repository with -hf"
        )
    else:
        lines.append(f"model: {config.model}")
    for label, key, value in (
        ("context", "ctx_size", config.n_ctx or "automatic (the plan says)"),
        ("parallel answers", "parallel", config.n_parallel or "4, sharing one context"),
        ("device", "device", config.device),
        ("threads", "threads", config.n_threads or "automatic (one per physical core)"),
        ("prompt chunk", "ubatch_size", config.n_batch or "automatic (GPU 2048, CPU 512)"),
        ("KV types", "cache_type_k", f"{config.cache_type_k}, {config.cache_type_v}"),
    ):
        lines.append(f"{label}: {value}{chosen + given[key].source if key in given else ''}")
    lines.append(
        "api key: asked for" if settings.api_keys else "api key: none, local web pages only"
    )
    for item in given.values():
        if item.flag.no_effect is not None:
            lines.append(f"note: {item.source} has no effect: {item.flag.no_effect}")
    for name in CACHE_VARIABLES:
        if environment(name) is not None:
            lines.append(f"note: {name} has no effect: {NO_TUNING}")
    known = {*(flag.env for flag in FLAGS), *MOE_VARIABLES, *CACHE_VARIABLES}
    for name in (*environment_names("LLAMA_ARG_"), *environment_names("LLAMA_MOE_CACHE_")):
        if name not in known:
            lines.append(f"note: {name} has no effect: no such setting is known")
    return lines
