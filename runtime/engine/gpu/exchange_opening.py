"""Opening what has the CPU compute the experts that GPUs miss: its kernels, the team, tests."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING

from runtime.config import environment
from runtime.cuda.device import Device
from runtime.engine.gpu.expert_opening import moe_blocks
from runtime.engine.gpu.results import Results
from runtime.engine.gpu.settings import GPUSettings
from runtime.engine.gpu.share_opening import ShareOpening
from runtime.engine.gpu.step_shape import StepShapes
from runtime.engine.step import StepKind
from runtime.errors import ConfigError
from runtime.experts.miss_rates import MissRates
from runtime.experts.miss_rule import MissRule, rule_in
from runtime.models.model import Model
from runtime.progress import Progress

if TYPE_CHECKING:
    from ops.cpu.compiling import Preparation
    from ops.cpu.team import Team
    from runtime.engine.gpu.table_rows import TableRows
    from runtime.experts.exchange import Exchange

logger = logging.getLogger(__name__)


def prepare_cpu(
    model: Model, shares: Sequence[ShareOpening], resources: ExitStack, *, whole: bool
) -> Preparation:
    """Start on the kernels of missed experts, unless GPUs hold the `whole` model, and of tables:
    they are ready by the time that they are wanted, or at least nearer to it."""
    from ops.cpu.compiling import Preparation, name_of

    names: list[str] = []
    if model.spec.memory_tables:
        from ops.cpu.gather_rows import gather_rows, show_rows

        names += map(name_of, (gather_rows, show_rows))
    if not whole:
        from runtime.experts import exchange  # noqa: F401  imported here, beside other work
        from runtime.experts.serve_program import kernels_of

        names += kernels_of(model.weights, moe_blocks(shares))
    preparation = Preparation(names)
    resources.callback(preparation.close)
    return preparation


def take_team(n_threads: int | None, spare: int, resources: ExitStack) -> Team:
    """So many workers, or as many as there are cores but for the `spare` ones.

    Raises: ConfigError for a number of threads that cannot be had.
    """
    from ops.cpu.team import TeamError, acquire_team

    try:
        team = acquire_team(n_threads, spare=spare)
    except TeamError as error:
        raise ConfigError(f"n_threads = {n_threads}: {error}") from error
    resources.callback(team.release)
    return team


def open_exchange(
    team: Team,
    model: Model,
    missing: Sequence[ShareOpening],
    n_tokens: int,
    done: int,
    resources: ExitStack,
) -> Exchange:
    """What has the team compute the experts that are not on these GPUs.

    n_tokens  of the largest step that misses any
    done      host address of the word that gets a step's number at its end
    Raises: PinningFailed, OutOfDeviceMemory, CudaError.
    """
    from runtime.experts.exchange import Exchange, ExchangeSizes
    from runtime.experts.host_experts import layer_experts
    from runtime.experts.page_reader import page_reader

    blocks = moe_blocks(missing)
    sizes = ExchangeSizes(n_tokens=n_tokens)
    exchange = Exchange(missing[0].device, team, model.weights, blocks, sizes, done)
    resources.callback(exchange.close)
    experts = [layer_experts(model.weights, block) for block in blocks]
    resources.enter_context(page_reader(exchange.memory, experts))
    return exchange


def open_rows(
    model: Model,
    exchange: Exchange | None,
    shapes: StepShapes,
    results: Results,
    devices: Sequence[Device],
    resources: ExitStack,
) -> TableRows | None:
    """What has rows of the model's tables gathered; None: it has none.

    The exchange's team does so; without one there is a worker for it, which sleeps between answers.
    Raises: PinningFailed, CudaError.
    """
    if not model.spec.memory_tables:
        return None
    from ops.cpu.team import Team
    from runtime.engine.gpu.table_rows import TableRows

    team = exchange.team if exchange is not None else Team(1, None)
    if exchange is None:
        resources.callback(team.end)
    rows = TableRows(devices[0], team, model, results, shapes.most_tokens(StepKind.DECODE))
    resources.callback(rows.close)
    if exchange is not None:
        # Rows wait behind the step that the team serves: it has to let go of that one first.
        resources.callback(exchange.abort)
    return rows


def start_tests(
    tester: ThreadPoolExecutor, exchange: Exchange, missing: Sequence[ShareOpening], rounds: int
) -> list[Future[None]]:
    """Exchange so many known answers with each GPU, one after the other, while other kernels are
    loaded.

    They end in DeviceUnavailable where experts cannot be handed over.
    Raises: PtxCompileError, CudaError.
    """
    from runtime.experts.self_test import KERNELS

    for share in missing:
        share.functions.load(KERNELS)
    return [tester.submit(_test, exchange, share, rounds) for share in missing]


def _test(exchange: Exchange, share: ShareOpening, rounds: int) -> None:
    from runtime.experts.self_test import self_test

    with share.device.staying():
        result = self_test(share.device, exchange.team, share.functions.function, rounds)
    logger.info(
        "exchange with the CPU: %d rounds, %.1f us each", result.rounds, result.microseconds
    )


def show_experts(exchange: Exchange, missing: Sequence[ShareOpening]) -> None:
    """Have the team see which experts these GPUs hold, from now on."""
    first = 0
    for share in missing:
        n_layers = len(moe_blocks([share]))
        share.experts.show(exchange.missing[first : first + n_layers])
        first += n_layers


def measured_misses(
    exchange: Exchange, share: ShareOpening, settings: GPUSettings, progress: Progress
) -> MissRule:
    """Who is to serve missed experts: as asked for, or by what it takes here.

    share: the first GPU that misses any.  Raises: ConfigError.
    """
    from runtime.experts.cached_experts import CachedExperts
    from runtime.experts.miss_probe import probe_misses

    asked = dict(settings.moe_cache).get("misses")
    given = rule_in(asked or environment("LLAMA_MOE_CACHE_MISSES"))
    rates = MissRates(())
    if isinstance(share.experts, CachedExperts) and settings.exchange_rounds:
        progress.start("measuring what misses take")
        n_used = max(block.n_used for block in moe_blocks([share]))
        rates = probe_misses(exchange, share.experts.host, share.device, n_used)
        logger.info("misses: %s", rates.describe())
    return MissRule(rates, given)
