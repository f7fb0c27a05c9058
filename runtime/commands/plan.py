"""Show what a model would take and how it would be run, here or on a machine that is described.

Nothing is loaded: only the model's file is opened, and the GPUs are asked what is free.

  hotexpert plan model.gguf
  hotexpert plan model.gguf --gpu "RTX 3090:24GiB x2" --ram 64GiB --cores 12
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import TYPE_CHECKING

from runtime.commands.options import (
    add_cache_options,
    add_model_options,
    engine_config,
    whole_number,
)

if TYPE_CHECKING:
    from runtime.engine.machine import MachineFacts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser)
    add_cache_options(parser)
    add = parser.add_argument
    add("-c", "--ctx-size", type=whole_number(1), metavar="N", help="tokens of context")
    add("-np", "--parallel", type=whole_number(1), metavar="N", help="answers at the same time")
    add("--json", action="store_true", help="print all of it as JSON")
    group = parser.add_argument_group("another machine (what is not said is as it is here)")
    group.add_argument(
        "--gpu", action="append", metavar="NAME[:GiB][ xN]",
        help="a GPU such as 'RTX 3090:24GiB x2', may be repeated; 'none': there is none",
    )  # fmt: skip
    group.add_argument("--ram", metavar="GiB", help="memory that the model may take")
    group.add_argument("--cores", type=whole_number(1), metavar="N", help="physical cores")


def run(settings: argparse.Namespace) -> int:
    from runtime.engine.planning import plan_engine
    from runtime.models.model import open_model

    config = engine_config(
        settings,
        n_ctx=settings.ctx_size,
        n_parallel=settings.parallel,
        cache_type_k=settings.cache_type_k,
        cache_type_v=settings.cache_type_v,
    )
    machine = described(settings)
    with open_model(config.model_path) as model:
        plan = plan_engine(model, config, machine)
    print(json.dumps(plan.as_json(), indent=2) if settings.json else "\n".join(plan.lines()))
    return 0


def described(settings: argparse.Namespace) -> MachineFacts:
    """The machine to plan for.  Raises: ConfigError."""
    from runtime.engine.machine import described_gpus, gibibytes, numbered
    from runtime.engine.planning import machine_here

    if settings.gpu is None:
        machine = machine_here()
    else:
        named = [text for text in settings.gpu if text != "none"]
        gpus = numbered([gpu for text in named for gpu in described_gpus(text)])
        machine = replace(machine_here(with_gpus=False), gpus=gpus)
    if settings.ram is not None:
        machine = replace(machine, ram_bytes=gibibytes(settings.ram))
    if settings.cores is not None:
        machine = replace(machine, n_cores=settings.cores)
    return machine
