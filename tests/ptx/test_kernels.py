"""Every kernel that ships: its text, interpreted, computes what it has to; no part is unused."""

from __future__ import annotations

from collections import defaultdict

import pytest

import ptx
from ops.gpu.catalog import every_kernel
from ops.gpu.kernel import Kernel
from tests.support.cases import every_case
from tests.support.cases.case import Case
from tests.support.machines import InterpretedMachine
from tests.support.ptx import PtxError, mutations

CATALOG = dict(every_kernel())

CASES: dict[str, list[Case]] = defaultdict(list)
for case in every_case():
    CASES[case.kernel.text_hash].append(case)

N_FAULTS = 6
FAULT_SEEDS = {
    "mailbox": 1,
    "quantize_q8_256": 1,
    "quantize_q8_32": 1,
    "expert_gate_up_q4_k (team 16)": 2,
    "linear_iq2_s (team 8)": 1,
    "linear_f16 (team 32)": 2,
    "embed_q5_1": 1,
    "expert_down_iq3_xxs (team 16, overlapped)": 3,
    "norm (256 threads)": 1,
    "gemm_q4_k (32 rows, 8 slots)": 1,
    "gemm_mxfp4 (16 rows, 8 slots)": 1,
    "gemm_bf16": 1,
    "fetch_experts": 1,
    "route (128 threads)": 1,
    "choose_experts_f32 (256 threads)": 1,
    "sample": 1,
    "take_over": 3,
    "hand_over": 1,
    "take_tokens": 2,
    "take_rows": 1,
    "heads": 2,
    "attention (64 64)": 1,
    "attention (576 512, rows in 1)": 1,
    "attention_join": 1,
    "latent_heads": 1,
    "latent_prompt (576, 64 rows, overlapped)": 1,
    "latent_decode (576, 1 buffers)": 1,
    "delta_inputs": 1,
    "delta_net": 1,
    "delta_chunk": 1,
    "gated_norm": 1,
    "index_keys": 1,
    "index_scores": 1,
    "index_select (128 threads)": 2,
    "enter_streams (128 threads)": 1,
    "sinkhorn_input (128 threads)": 1,
    "mix_streams": 1,
    "mixed_input": 1,
    "attention_prompt (64 64)": 1,
}
"""Kernels whose text is changed in `N_FAULTS` places, one at a time."""

SURVIVING_SHARE = 0.34
"""Of the faults, how many may change nothing: an alignment taken with more bits, say."""


def small_cases(kernel: Kernel) -> list[Case]:
    return [case for case in CASES[kernel.text_hash] if not case.large]


def test_every_entry_of_the_catalog_differs() -> None:
    names = [name for name, _ in every_kernel()]
    assert len(names) == len(set(names))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", CATALOG)
def test_results_and_every_instruction(name: str) -> None:
    kernel = CATALOG[name]
    cases = small_cases(kernel)
    assert cases, f"no case of tests/support/cases runs {name}"
    idle: set[str] | None = None
    for case in cases:
        machine = InterpretedMachine()
        outcome = case.run(machine)
        assert outcome.passed, f"{name}, {case.name}: off by {outcome.max_error}"
        unused = set(machine.loaded[kernel.text].never_executed())
        idle = unused if idle is None else idle & unused
    assert not idle, "\n".join(sorted(idle))


@pytest.mark.parametrize("name", CATALOG)
def test_parameters_are_those_of_the_text(name: str) -> None:
    kernel = CATALOG[name]
    (entry,) = ptx.entries(kernel.text)
    assert entry.name == kernel.entry
    assert [(param.name, param.type) for param in entry.params] == list(kernel.params)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", FAULT_SEEDS)
def test_faults_are_noticed(name: str) -> None:
    kernel = CATALOG[name]
    survivors = []
    for mutation in mutations(kernel.text, FAULT_SEEDS[name], N_FAULTS):
        try:
            passed = all(
                case.run(InterpretedMachine(text=mutation.text)).passed
                for case in small_cases(kernel)
            )
        except (PtxError, IndexError):
            continue
        if passed:
            survivors.append(str(mutation))
    assert len(survivors) <= SURVIVING_SHARE * N_FAULTS, survivors
