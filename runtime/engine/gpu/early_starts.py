"""Which launches of a plan start when their predecessor's blocks have begun, not when it goes on.

An overlapped kernel waits for its predecessor to end, and what it does before is on no path: it
asks for weights, say. It could start sooner than a predecessor goes on that waits itself, but then
neither of the two before it need have ended. What that takes, for a launch n of the main branch,
n-1 being the one before it there, with neither the beginning nor the end of a side branch between:

* Behind its wait n-1 has ended. n-1 waited for n-2, so that has ended too, and so on: what is read
  and written there is as safe as if nothing overlapped. All writes are there.
* What it reads before its wait has to be there when it starts. Weights, control data, the table of
  experts and what earlier steps left always are, behind the first launches. `CONSTANT` names the
  kernels that read nothing else.
* Kernels of `OLDER` also read what a launch m of the step has made. A launch k that does not start
  early starts when k-1 goes on, so all before k-1 have ended, and what comes behind k starts behind
  it. So one from m+2 up to n itself must not: `_hold_back` makes it the first of them, where
  none is one anyway.
* Others, and those with an argument `late`, may read what n-2 has made: they do not start early.
* Nor does a launch of `COUNTING` that reads where chosen keys end, which the step chooses.

Beside a mailbox's branch nothing else holds. The first launch behind its beginning or its end does
not start early, so edges of the graph say what they said. The mailbox starts when the launch before
its beginning has ended, and all older ones with it. It writes rows of experts' results: the launch
that joins it reads them behind its wait for both branches, later ones behind theirs, and no kernel
reads them before. What the mailbox reads is overwritten by launches behind that join, after their
waits. Where prompts fetch experts a side branch brings weights: such a plan starts nothing early.

Launches of the main branch start in their order and each when all blocks of the one before have
begun, so one that waits never keeps an earlier one's blocks from their place. None of them waits
for a mailbox that has no place yet: what comes behind the join starts when the mailbox has ended.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from runtime.engine.gpu.launch_plan import LaunchPlan, Mark, PlannedLaunch

FIRST = 4
"""Launches of the main branch that bring the step's data to the GPU, or wait for those."""

CONSTANT = frozenset(
    f"{name}.ptx"
    for name in (
        *("activate", "attention", "attention_join", "choose_experts", "delta_gates"),
        *("delta_inputs", "delta_net", "dense_down", "expert_gate_up", "gated_norm"),
        *("gated_rows", "gated_sum"),
        *("heads", "latent_decode", "latent_heads", "latent_join", "linear", "linear_float"),
        *("mixed_input", "norm", "quantize_q8", "route"),
    )
)
"""Kernels that read constants, control data and what earlier steps left before they wait; and
`gated_rows` what the `gate_streams` in front of it reads, one of `OLDER`.

`tests/engine/test_gpu_early_starts.py` finds in the texts what each launch of a plan reads so soon,
and that no launch that may still run makes it."""

OLDER = {"gate_streams.ptx": ("returns",), "mix_streams.ptx": ("x", "mix")}
"""Kernels that also read what a launch of the step has made, and the arguments that say where."""

COUNTING = frozenset({"attention_join.ptx", "latent_join.ptx"})
"""Kernels that read before they wait how many keys their tokens have: up to their positions, or as
many as a launch shortly before has chosen, which is what its argument `ends` says."""


def early_starts(plan: LaunchPlan) -> list[bool]:
    """Of each launch of the plan, whether it may start early."""
    early = [False] * len(plan.launches)
    chosen = {launch.arguments["ends"] for launch in plan.launches if "ends" in launch.arguments}
    if any(isinstance(node, Mark) for node in plan.nodes):  # experts are fetched
        return early
    main: list[int] = []
    n, follows = 0, False
    for node in plan.nodes:
        if not isinstance(node, PlannedLaunch):
            follows = False
            continue
        if not node.side:
            early[n] = follows and len(main) >= FIRST and _may_start(node, chosen)
            main.append(n)
            follows = True
        n += 1
    _hold_back(plan.launches, main, early)
    return early


def _hold_back(launches: Sequence[PlannedLaunch], main: Sequence[int], early: list[bool]) -> None:
    """Let no launch of `OLDER` start before what it reads is there; main: those of its branch."""
    for at, n in enumerate(main):
        names = OLDER.get(launches[n].kernel.source, ())
        reads = {int(launches[n].arguments[name]) for name in names} - {0}
        maker = at
        while maker and not reads & set(launches[main[maker - 1]].arguments.values()):
            maker -= 1
        if maker and all([early[k] for k in main[maker + 1 : at + 1]]):  # maker - 1 made it
            early[main[min(maker + 1, at)]] = False


def _may_start(launch: PlannedLaunch, chosen: Set[float]) -> bool:
    source, arguments = launch.kernel.source, launch.arguments
    # Several matrices with a vector each: a table that is made with the graph says where they lie.
    is_constant = source in CONSTANT or (source == "expert_down.ptx" and not arguments["choices"])
    if source in COUNTING and arguments["positions"] in chosen:
        return False
    return launch.overlapped and not arguments.get("late") and (is_constant or source in OLDER)
