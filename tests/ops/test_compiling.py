"""Kernels are compiled by processes of their own, and found by all copies of the sources."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numba
import pytest

from ops.cpu import cache
from ops.cpu.attention import attention_end
from ops.cpu.compiling import Preparation, name_of, product_name
from ops.cpu.norm import quantize
from ops.cpu.step_inputs import fill_function

KERNELS = [name_of(quantize), name_of(attention_end)]


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """An empty cache."""
    before = numba.config.CACHE_DIR
    yield cache.use_directory(tmp_path).directory
    numba.config.CACHE_DIR = before


def test_names_say_where_a_kernel_is() -> None:
    assert KERNELS == ["ops.cpu.norm:quantize", "ops.cpu.attention:attention_end"]
    assert name_of(fill_function) == "ops.cpu.step_inputs:fill_function"
    assert product_name("Q4_K") == "product:Q4_K"


def test_processes_fill_the_cache(directory: Path) -> None:
    """This one has the kernels already, so it writes none."""
    quantize.compile()
    attention_end.compile()
    told: list[tuple[int, int]] = []
    preparation = Preparation(KERNELS, n_processes=2)
    preparation.wait(lambda *numbers: told.append(numbers))
    preparation.close()
    assert told == [(0, 2), (1, 2), (2, 2)]
    kept = {path.name.split("-")[0] for path in (directory / "ops-cpu").glob("*.nbi")}
    assert kept == {"norm.quantize", "attention.attention_end"}

    again = Preparation([*KERNELS, KERNELS[0]], n_processes=2)
    assert (again.n_kernels, again._threads) == (2, [])
    again.wait()
    again.close()


def test_what_no_process_can_compile_is_an_error_here(directory: Path) -> None:
    preparation = Preparation([product_name("Q9_X"), product_name("Q9_Y")], n_processes=2)
    with pytest.raises(LookupError, match="Q9_X"):
        preparation.wait()
    preparation.close()


def test_an_end_before_all_is_compiled_leaves_no_process(directory: Path) -> None:
    preparation = Preparation(KERNELS, n_processes=2)
    preparation.close()
    assert all(child.poll() is not None for child in preparation._children)
    assert not any(thread.is_alive() for thread in preparation._threads)


def test_files_are_named_by_what_a_kernel_is(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by where its source lies, nor when that was written; of two formats they differ."""
    source = quantize._function.__code__.co_filename
    here = cache.KernelLocator.from_function(quantize._function, source)
    copy = tmp_path / "copy" / "ops"
    shutil.copytree(cache.SOURCES / "cpu", copy / "cpu", ignore=shutil.ignore_patterns("*.pyc"))
    monkeypatch.setattr(cache, "SOURCES", copy)
    there = cache.KernelLocator.from_function(quantize._function, str(copy / "cpu" / "norm.py"))
    assert here is not None and there is not None
    assert here.get_cache_path() == there.get_cache_path() == str(directory / "ops-cpu")
    assert here.get_source_stamp() == there.get_source_stamp()
    monkeypatch.undo()

    assert cache.KernelLocator.from_function(quantize._function, __file__) is None

    def product_of(name: str) -> Callable[[], str]:
        return lambda: name

    file = cache.SOURCES / "cpu" / "matmul.py"
    first, second = (cache.KernelLocator(product_of(name), file) for name in ("F32", "F16"))
    assert first.get_disambiguator() != second.get_disambiguator()
