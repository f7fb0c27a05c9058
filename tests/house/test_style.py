"""House rules that a reader relies on: sizes, annotations, prints, excepts, globals."""

from __future__ import annotations

import ast

import pytest

from tests.house.test_layers import PACKAGES, ROOT, sources

FILE_LINES = 400
FUNCTION_LINES = 60
MAY_PRINT = ("runtime/commands/", "server/cli.py")


def functions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def test_files_and_functions_fit_a_reader() -> None:
    long = []
    for path, tree in sources((*PACKAGES, "bench", "examples", "tests")):
        n_lines = (ROOT / path).read_text().count("\n")
        if n_lines > FILE_LINES:
            long.append(f"{path}: {n_lines} lines (limit {FILE_LINES}): split it by noun")
        for function in functions(tree):
            length = (function.end_lineno or function.lineno) - function.lineno + 1
            if length > FUNCTION_LINES:
                long.append(
                    f"{path}:{function.lineno} {function.name}: {length} lines "
                    f"(limit {FUNCTION_LINES}): name its steps and extract them"
                )
    assert not long, "\n".join(long)


def test_every_function_says_what_it_returns() -> None:
    bare = [
        f"{path}:{function.lineno} {function.name} has no return annotation"
        for path, tree in sources()
        for function in functions(tree)
        if function.returns is None and not is_compiled(function)
    ]
    assert not bare, "\n".join(bare)


def is_compiled(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether Numba compiles the function: its types are in the decorator's signature."""
    text = " ".join(ast.unparse(decorator) for decorator in function.decorator_list)
    return any(word in text for word in ("njit", "cfunc", "intrinsic", "overload"))


def test_nothing_prints_outside_the_command_line() -> None:
    prints = [
        f"{path}:{node.lineno} prints: use logging, or move it to runtime/commands"
        for path, tree in sources()
        if not path.startswith(MAY_PRINT)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert not prints, "\n".join(prints)


def test_no_bare_except_and_no_global_statement() -> None:
    wrong = [
        f"{path}:{node.lineno} {'bare except' if isinstance(node, ast.ExceptHandler) else 'global'}"
        for path, tree in sources()
        for node in ast.walk(tree)
        if (isinstance(node, ast.ExceptHandler) and node.type is None)
        or isinstance(node, ast.Global)
    ]
    assert not wrong, "\n".join(wrong)


def test_every_public_module_has_a_docstring() -> None:
    silent = [path for path, tree in sources() if tree.body and ast.get_docstring(tree) is None]
    assert not silent, f"no module docstring (the one idea of the file): {silent}"


@pytest.mark.parametrize("word", ["TODO", "FIXME", "XXX", "HACK"])
def test_nothing_is_left_for_later(word: str) -> None:
    left = [path for path, _ in sources() if word in (ROOT / path).read_text()]
    assert not left, f"{word} in {left}: do it, or write it into an issue"
