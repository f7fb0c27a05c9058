"""NVIDIA's assembler takes every text, for every architecture we name."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from dataclasses import asdict

import pytest

import ptx
from ops.gpu.catalog import every_kernel
from ops.gpu.kernel import Kernel
from tests.support.ptx.assemble import ARCHITECTURES, AssemblyError, assemble, can_assemble

pytestmark = pytest.mark.skipif(not can_assemble(), reason="nvJitLink is not installed here")

KERNELS = dict(every_kernel())

SPILLS = {"pairs": 108}
"""Bytes that a variant may spill, by a word of its name. Prompts of latents as pairs of f16 hold
two operands where others hold one, in all 255 registers; docs/gpu-attention.md has their times."""

PLAIN = """.version 8.0
.target sm_80
.address_size 64
.visible .entry copy(.param .u64 from, .param .u64 to)
{
    .reg .u64 %from, %to;
    .reg .u32 %x;
    .shared .b32 tile[16];
    ld.param.u64 %from, [from];
    ld.param.u64 %to, [to];
# 40 "inc/part.inc.ptx"
    ld.global.u32 %x, [%from];
    st.shared.u32 [tile], %x;
    bar.sync 0;
    ld.shared.u32 %x, [tile+4];
    st.global.u32 [%to], %x;
    ret;
}
"""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_resources_come_from_the_log(architecture: str) -> None:
    resources = assemble(PLAIN, architecture)["copy"]
    assert 4 <= resources.registers <= 32
    assert (resources.spill_bytes, resources.shared_bytes) == (0, 64)


def test_an_error_names_the_file_and_line_of_the_marker() -> None:
    with pytest.raises(AssemblyError, match=r"inc/part\.inc\.ptx, line 41; error"):
        assemble(PLAIN.replace("st.shared.u32", "what.u32"), "sm_90")


def test_a_text_must_not_begin_with_a_marker() -> None:
    with pytest.raises(AssemblyError, match="does not match type"):
        assemble('# 1 "k.ptx"\n' + PLAIN, "sm_80")


def test_no_text_is_left_out() -> None:
    assert {kernel.source for kernel in KERNELS.values()} == {
        p.name for p in ptx.ROOT.glob("*.ptx")
    }


def architectures_of(name: str, kernel: Kernel) -> list[str]:
    """All for the first variant of an entry; one, always the same, for each of the others."""
    able = [a for a in ARCHITECTURES if int(a[3:]) >= int(target_of(kernel.text)[3:])]
    first = next(n for n, other in KERNELS.items() if other.entry == kernel.entry)
    return able if name == first else [able[zlib.crc32(name.encode()) % len(able)]]


def target_of(text: str) -> str:
    match = re.search(r"^\.target\s+(\w+)", text, re.MULTILINE)
    assert match
    return match.group(1)


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_assemble_without_spills(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    kernel = KERNELS[name]
    allowed = max((n for word, n in SPILLS.items() if word in name), default=0)
    for architecture in architectures_of(name, kernel):
        resources = assemble(kernel.text, architecture)[kernel.entry]
        record_property(architecture, asdict(resources))
        assert resources.registers, architecture
        assert resources.spill_bytes <= allowed, (architecture, resources)


def test_line_markers_change_no_code() -> None:
    text = next(iter(KERNELS.values())).text
    without = re.sub(r"^#.*", "", text, flags=re.MULTILINE)
    assert text != without
    assert assemble(text, "sm_90") == assemble(without, "sm_90")
