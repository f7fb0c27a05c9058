"""Options that several commands share: the model, the machine, the sampling; llama.cpp's names."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from runtime.config import (
    CACHE_TYPES,
    DEVICES,
    LOAD_MODES,
    SPLIT_MODES,
    EngineConfig,
    moe_settings_in,
    shares_in,
)

if TYPE_CHECKING:
    from runtime.engine.params import SamplingParams

DEMONSTRATION = (
    "No model was named (-m FILE): this is the bundled DEMONSTRATION model. It is tiny, and most "
    "of what it says is wrong."
)
SAMPLING_FLAGS: tuple[tuple[tuple[str, ...], str, Callable[[str], Any], str], ...] = (
    (("-s", "--seed"), "seed", int, "seed of the random numbers; -1: random"),
    (("--temp",), "temperature", float, "temperature; 0: always the most likely token"),
    (("--top-k",), "top_k", int, "keep the N best; 0: all"),
    (("--top-p",), "top_p", float, "keep the best that hold this share; 1: all"),
    (("--min-p",), "min_p", float, "keep those this likely relative to the best; 0: all"),
    (("--typical",), "typical_p", float, "locally typical share; 1: off"),
    (("--top-nsigma",), "top_n_sigma", float, "keep within this many sigmas of the best; -1: off"),
    (("--xtc-probability",), "xtc_probability", float, "chance to exclude top choices"),
    (("--xtc-threshold",), "xtc_threshold", float, "probability that makes a top choice"),
    (("--repeat-penalty",), "repeat_penalty", float, "penalty for repeated tokens; 1: off"),
    (("--repeat-last-n",), "repeat_last_n", int, "tokens that count as repeated"),
    (("--presence-penalty",), "presence_penalty", float, "penalty for tokens already there"),
    (("--frequency-penalty",), "frequency_penalty", float, "the same for each occurrence"),
    (("--dry-multiplier",), "dry_multiplier", float, "strength of the DRY penalty; 0: off"),
    (("--dry-base",), "dry_base", float, "growth of the DRY penalty with the repeat's length"),
    (("--dry-allowed-length",), "dry_allowed_length", int, "repeats shorter than this are free"),
    (("--dry-penalty-last-n",), "dry_penalty_last_n", int, "tokens DRY looks back"),
    (("--dynatemp-range",), "dynatemp_range", float, "dynamic temperature: +/- this; 0: off"),
    (("--dynatemp-exp",), "dynatemp_exponent", float, "exponent of the dynamic temperature"),
    (("--mirostat",), "mirostat", int, "0: off, 1 or 2: that version"),
    (("--mirostat-lr",), "mirostat_eta", float, "learning rate of mirostat"),
    (("--mirostat-ent",), "mirostat_tau", float, "target entropy of mirostat"),
    (("--adaptive-target",), "adaptive_target", float, "target probability of adaptive-p"),
    (("--adaptive-decay",), "adaptive_decay", float, "decay of adaptive-p"),
    (("--sampler-seq", "--sampling-seq"), "samplers", str, "order of the samplers, as letters"),
)


class CommandParser(argparse.ArgumentParser):
    """argparse without guessing: only whole option names count, and errors are one line."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        self.exit(2, self.complaint(message))

    def complaint(self, message: str) -> str:
        return f"{self.prog}: {message} (--help lists the options)\n"


def whole_number(low: int) -> Callable[[str], int]:
    """An argparse type: a whole number of at least `low`."""

    def convert(text: str) -> int:
        if not re.fullmatch(r"-?[0-9]{1,12}", text) or int(text) < low:
            raise argparse.ArgumentTypeError(f"{text!r}: use a whole number of at least {low}")
        return int(text)

    return convert


def file_name(text: str) -> str:
    """An argparse type: the name of a file.  An empty one, as of a shell variable that is not set,
    would otherwise count as none."""
    if not text:
        raise argparse.ArgumentTypeError("the file's name is empty")
    return text


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """The model and what the machine may spend."""
    add_model(parser)
    add_machine_options(parser.add_argument_group("machine"))


def add_model(
    parser: argparse.ArgumentParser,
    convert: Callable[[str], Any] = file_name,
    what: str = "GGUF file",
    metavar: str = "FILE",
) -> None:
    """The model, as MODEL or after -m; `settle_model` makes one setting of the two."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "model_argument", nargs="?", type=convert, metavar="MODEL", help="the same as -m"
    )
    group.add_argument(
        "-m", "--model", type=convert, metavar=metavar,
        help=f"{what}; default: the bundled demonstration model",
    )  # fmt: skip


def settle_model(settings: argparse.Namespace) -> None:
    """Let `model` hold what was named, as MODEL or after -m.

    Raises: argparse.ArgumentError where both were given and differ.
    """
    if getattr(settings, "model_argument", None) is None:  # some commands take no model
        return
    if settings.model not in (None, settings.model_argument):
        first, second = (
            name if isinstance(name, str) else ",".join(name)
            for name in (settings.model_argument, settings.model)
        )
        raise argparse.ArgumentError(None, f"two models are named, {first} and -m {second}")
    settings.model = settings.model_argument


def add_machine_options(group: argparse._ActionsContainer) -> None:
    group.add_argument("-t", "--threads", type=whole_number(1), metavar="N", help="CPU workers")
    group.add_argument(
        "-b", "--batch-size", type=whole_number(1), metavar="N",
        help="prompt tokens computed together (default 2048 on a GPU, 512 on the CPU)",
    )  # fmt: skip
    group.add_argument(
        "--device", choices=DEVICES, default="auto", help="where to compute (default auto)"
    )
    group.add_argument(
        "--vram-limit", type=float, metavar="GiB",
        help="use no more of each GPU's memory than this, as if the card were smaller",
    )  # fmt: skip
    group.add_argument(
        "-sm", "--split-mode", choices=SPLIT_MODES, default="auto",
        help="layer: over all GPUs; none: all on --main-gpu; auto (default): on one GPU that "
        "holds the whole model, else over all",
    )  # fmt: skip
    group.add_argument(
        "-mg", "--main-gpu", type=whole_number(0), default=0, metavar="N",
        help="the GPU of --split-mode none (default 0)",
    )  # fmt: skip
    group.add_argument(
        "-ts", "--tensor-split", metavar="N0,N1,...",
        help="the GPUs' shares of the model, such as 3,1; default: by their free memory",
    )  # fmt: skip
    group.add_argument(
        "--moe-expert-cache", type=whole_number(-1), default=-1, metavar="N",
        help="experts of a layer that the GPU holds; -1: as many as fit (default), 0: none",
    )  # fmt: skip
    group.add_argument(
        "--moe", metavar="NAME=VALUE,...",
        help="how experts on the GPU follow use: mode (cache, layers), policy, window, admit, "
        "margin, sticky, global-weight, halve-every",
    )  # fmt: skip
    group.add_argument(
        "-fitt", "--fit-target", type=whole_number(0), metavar="MiB",
        help="VRAM of each GPU to leave free beside all that is planned (default 256)",
    )  # fmt: skip
    group.add_argument(
        "-lm", "--load-mode", choices=LOAD_MODES, default="mmap",
        help="experts outside the GPU: pin them, or leave them to the system (mmap, default)",
    )  # fmt: skip
    for flag, mode in (("--mlock", "pin"), ("--no-mmap", "pin"), ("--mmap", "mmap")):
        group.add_argument(
            flag, dest="load_mode", action="store_const", const=mode, help=f"--load-mode {mode}"
        )


def add_cache_options(parser: argparse.ArgumentParser) -> None:
    """-ctk, -ctv: how attention's keys and values are stored."""
    for flag, long, what in (
        ("-ctk", "--cache-type-k", "keys"),
        ("-ctv", "--cache-type-v", "values"),
    ):
        parser.add_argument(
            flag, long, choices=CACHE_TYPES, default="f16",
            help=f"storage of the KV cache's {what} (default f16)",
        )  # fmt: skip


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling (defaults: the model file's own, else llama.cpp's)")
    for flags, field, kind, what in SAMPLING_FLAGS:
        metavar = "SEQ" if kind is str else "N"
        group.add_argument(*flags, dest=field, type=kind, metavar=metavar, help=what)
    group.add_argument(
        "--samplers", dest="sampler_names", metavar="A;B", help="order of the samplers, as names"
    )
    group.add_argument(
        "-l", "--logit-bias", action="append", default=[], type=logit_bias, metavar="ID+BIAS",
        help="make a token likelier or less likely: 15043+1 or 15043-1; may be repeated",
    )  # fmt: skip
    group.add_argument("--ignore-eos", action="store_true", help="never end by itself")


def logit_bias(text: str) -> tuple[int, float]:
    """`15043-1.5` as (15043, -1.5)."""
    match = re.fullmatch(r"([0-9]{1,9})([+-][0-9.]+|-inf)", text)
    try:
        if match is not None:
            return int(match[1]), float(match[2])
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r}: use TOKEN_ID+BIAS or TOKEN_ID-BIAS")


def sampling_params(settings: argparse.Namespace, defaults: SamplingParams) -> SamplingParams:
    """`defaults` with what the command line says.  Raises: RequestError naming the field."""
    import dataclasses

    given = {field: getattr(settings, field) for _, field, _, _ in SAMPLING_FLAGS}
    if settings.sampler_names is not None:
        given["samplers"] = settings.sampler_names.split(";")
    if settings.logit_bias:
        given["logit_bias"] = settings.logit_bias
    if settings.ignore_eos:
        given["ignore_eos"] = True
    changes = {field: value for field, value in given.items() if value is not None}
    return dataclasses.replace(defaults, **changes)


def say_demonstration(settings: argparse.Namespace) -> None:
    """Say, on standard error, that the bundled model answers, where no model was named."""
    if settings.model is None and getattr(settings, "device", "") != "fake":
        print(DEMONSTRATION, file=sys.stderr)


def engine_config(settings: argparse.Namespace, **fixed: Any) -> EngineConfig:
    """The engine's settings from the shared options; says so where the bundled model is used.

    Raises: ConfigError.
    """
    say_demonstration(settings)
    return EngineConfig(
        model=settings.model,
        n_threads=settings.threads,
        n_batch=settings.batch_size,
        device=settings.device,
        vram_limit=settings.vram_limit,
        split_mode=settings.split_mode,
        main_gpu=settings.main_gpu,
        tensor_split=None if settings.tensor_split is None else shares_in(settings.tensor_split),
        moe_expert_cache=settings.moe_expert_cache,
        moe_cache=() if settings.moe is None else moe_settings_in(settings.moe),
        vram_reserve=settings.fit_target,
        load_mode=settings.load_mode,
        name_bus_errors=True,
        **fixed,
    )
