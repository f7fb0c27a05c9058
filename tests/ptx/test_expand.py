"""The preprocessor: what it expands, what it refuses, and that cpp agrees."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

import ptx
from ops.gpu.catalog import every_kernel
from ops.gpu.kernel import Kernel
from ptx import Entry, Param, PtxSourceError, entries, expand, text_hash

KERNELS = dict(every_kernel())


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with a kernel that includes two fragments."""
    (tmp_path / "inc").mkdir()
    (tmp_path / "k.ptx").write_text(
        "// k: UPPER words in comments are left alone\n"
        "add.u32 %x, %x, SIZE; // SIZE\n"
        "#define OPERAND %x\n"
        "#define TWICE OPERAND, OPERAND\n"
        '#include "inc/a.inc.ptx"\n'
        "#include PART\n"
        "#undef TWICE\n"
        "#undef OPERAND\n"
        "ld.global.L1::no_allocate.u32 %x, [%p];\n"
    )
    (tmp_path / "inc/a.inc.ptx").write_text("{\nadd.u32 OPERAND, TWICE;\n}\n")
    (tmp_path / "inc/b.inc.ptx").write_text("mul.lo.u32 OPERAND, TWICE;\n")
    return tmp_path


def test_includes_and_macros_expand_with_line_markers(source: Path) -> None:
    assert expand("k.ptx", root=source, SIZE=34, PART="inc/b.inc.ptx").splitlines() == [
        "// k: UPPER words in comments are left alone",
        "add.u32 %x, %x, 34; // SIZE",
        "",
        "",
        '# 1 "inc/a.inc.ptx"',
        "{",
        "add.u32 %x, %x, %x;",
        "}",
        '# 6 "k.ptx"',
        '# 1 "inc/b.inc.ptx"',
        "mul.lo.u32 %x, %x, %x;",
        '# 7 "k.ptx"',
        "",
        "",
        "ld.global.L1::no_allocate.u32 %x, [%p];",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("add.u32 %x, %x, COUNT;", "k.ptx:1: COUNT is not defined"),
        ("#define A 1\nadd A;\n#undef A\nadd A;", "k.ptx:4: A is not defined"),
        ("#define A B\n#define B A\nadd A;\n#undef A\n#undef B", "k.ptx:3: A is not defined"),
        ("#define A 1\n#undef A", "k.ptx:1: A is defined but never used"),
        ("#define A 1\n#define A 2", "k.ptx:2: A is defined already, at k.ptx:1"),
        ("#define A 1\nadd A;", "k.ptx:1: A is not undefined here"),
        ("#undef A", "k.ptx:1: A is not defined in this file"),
        ("#define lower 1", "k.ptx:1: 'lower' cannot be a macro's name"),
        ("#define L2 1", "k.ptx:1: 'L2' cannot be a macro's name"),
        ("#define F(x) x", "k.ptx:1: 'F(x)' cannot be a macro's name"),
        ("ret;\n#ifdef A", "k.ptx:2: cannot read the directive '#ifdef A'"),
        ('#include "inc/none.ptx"', "k.ptx:1: there is no file inc/none.ptx"),
        ('#include "k.ptx"', "k.ptx:1: include cycle k.ptx -> k.ptx"),
        ('#include "inc/loop.inc.ptx"', "inc/loop.inc.ptx:2: include cycle k.ptx -> inc/loop.inc"),
        ('#include "inc/leak.inc.ptx"', "inc/leak.inc.ptx:1: LEAK is not undefined here"),
        ("#define A 1\n#include \"inc/undef.inc.ptx\"", "inc/undef.inc.ptx:1: A is not defined in"),
        ("/* no */", "k.ptx:1: only // comments are read"),
    ],
)  # fmt: skip
def test_slips_are_errors_that_name_the_place(source: Path, text: str, message: str) -> None:
    (source / "k.ptx").write_text(text + "\n")
    (source / "inc/loop.inc.ptx").write_text('ret;\n#include "k.ptx"\n')
    (source / "inc/leak.inc.ptx").write_text("#define LEAK 1\nadd LEAK;\n")
    (source / "inc/undef.inc.ptx").write_text("#undef A\n")

    with pytest.raises(PtxSourceError, match="^" + re.escape(message)):
        expand("k.ptx", root=source)


def test_defines_from_outside_have_to_be_used(source: Path) -> None:
    with pytest.raises(PtxSourceError, match=r"^k\.ptx:0: UNUSED is defined but never used"):
        expand("k.ptx", root=source, SIZE=34, PART='"inc/b.inc.ptx"', UNUSED=1)
    with pytest.raises(PtxSourceError, match="'size' cannot be"):
        expand("k.ptx", root=source, size=34)


def test_fragments_come_from_the_kernels_folder_too(tmp_path: Path) -> None:
    (tmp_path / "k.ptx").write_text('#define SUM %x\n#include "inc/warp_sum.inc.ptx"\n#undef SUM\n')
    assert "shfl.sync.bfly.b32  %warp_sum_other, %x, 16" in expand("k.ptx", root=tmp_path)


def test_the_hash_is_of_what_the_assembler_sees() -> None:
    text = "add.u32 %x, %x, 1;\nret;\n"
    assert text_hash(text) == text_hash(
        '// a comment\n# 3 "k.ptx"\nadd.u32  %x, %x, 1; // more\nret;'
    )
    assert text_hash(text) != text_hash(text.replace("1", "2"))
    assert len(text_hash(text)) == 64


def test_a_recipe_is_of_all_that_makes_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = [kernel for _, kernel in every_kernel()]
    made_of = {(k.entry, k.source, *sorted(k.defines.items())) for k in kernels}
    recipes = {kernel.recipe for kernel in kernels}
    assert len(recipes) == len(made_of) > 100
    monkeypatch.setattr(ptx, "sources_hash", lambda: "of other sources")
    assert recipes.isdisjoint(kernel.recipe for kernel in kernels)


def test_entries_and_their_parameters() -> None:
    text = """
// .entry not_this(.param .u64 x)
.visible .entry first(
    .param .u64 slots, .param .u32 n,   // why
    .param .align 8 .b8 pair[12], .param .u8 flag, .param .f32 scale,
    .param .u64 .ptr .global .align 16 data)
.maxntid 32, 1, 1
{ ret; }
.entry second { ret; }
"""
    assert entries(text) == (
        Entry(
            "first",
            (
                Param("slots", "u64", None, 0),
                Param("n", "u32", None, 8),
                Param("pair", "b8", 12, 16),
                Param("flag", "u8", None, 28),
                Param("scale", "f32", None, 32),
                Param("data", "u64", None, 40),
            ),
        ),
        Entry("second", ()),
    )
    assert [p.n_bytes for p in entries(text)[0].params] == [8, 4, 12, 1, 4, 8]
    with pytest.raises(ValueError, match=r"k: cannot read the parameter '\.reg \.u32 x'"):
        entries(".entry k(.reg .u32 x)")


@pytest.mark.skipif(shutil.which("cpp") is None, reason="no cpp on this machine")
def test_cpp_gives_the_same_tokens(source: Path) -> None:
    defines = {"SIZE": 34, "PART": '"inc/b.inc.ptx"'}
    ours = expand("k.ptx", root=source, **defines)
    assert tokens(ours) == tokens(preprocessed(source / "k.ptx", source, defines))


@pytest.mark.skipif(shutil.which("cpp") is None, reason="no cpp on this machine")
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_cpp_reads_our_kernels_as_we_do(kernel: Kernel) -> None:
    defines = {"ENTRY": kernel.entry, **kernel.defines}
    theirs = preprocessed(ptx.ROOT / kernel.source, ptx.ROOT, defines)
    assert tokens(kernel.text) == tokens(theirs)


def preprocessed(path: Path, root: Path, defines: Mapping[str, str | int]) -> str:
    options = [f"-D{name}={value}" for name, value in defines.items()]
    return subprocess.run(
        ["cpp", "-P", "-undef", "-nostdinc", "-I", str(root), *options, str(path)],
        check=True,
        capture_output=True,
        text=True,
        timeout=20,
    ).stdout


def tokens(text: str) -> list[str]:
    code = re.sub(r"//.*|^#.*", "", text, flags=re.MULTILINE)
    return re.findall(r"[\w.$%]+|\S", code)
