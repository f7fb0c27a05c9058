"""The kernels' PTX text, written by hand, and the small preprocessor that puts it together.

`expand` is the whole of it: `#include`, `#define` and `#undef` as README.md in this folder says.
The PTX ISA names cpp for this; assemblers reject such lines, so they are expanded before loading.
Every rule that cpp would let pass and that is nearly always a slip is an error here.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from ptx.entry import Entry, Param, entries

__all__ = [
    "ROOT",
    "Entry",
    "Param",
    "PtxSourceError",
    "entries",
    "expand",
    "sources_hash",
    "text_hash",
]

ROOT = Path(__file__).parent
"""The folder of the kernels; `inc/` in it holds the fragments."""

PTX_WORDS = frozenset({"L1", "L2", "WARP_SZ"})
"""Upper-case words that belong to PTX; every other one has to be defined."""

_NAME = re.compile(r"[A-Z][A-Z0-9_]*")
_TOKEN = re.compile(r'//.*|"[^"]*"|\b[A-Z][A-Z0-9_]*\b')


class PtxSourceError(ValueError):
    """A source file breaks a rule of the preprocessor; the message starts with `file:line:`."""


def expand(name: str, /, *, root: Path = ROOT, **defines: str | int) -> str:
    """The text of `name` with its includes and macros expanded, ready for an assembler.

    `defines` are macros set from outside, such as a format's constants. Files are looked up in
    `root`, then in this folder. Line markers (`# 7 "inc/exp.inc.ptx"`) stay in the text, so an
    assembler's messages name the file and line that a person edits.

    Raises:
        PtxSourceError: a file is missing or includes itself; a directive is unknown; an upper-case
            word is not defined; a define is unused, made twice, or left behind by a fragment.
    """
    source = _Source(root, name)
    for macro, value in defines.items():
        source.define(macro, str(value), name, 0)
    source.include(name, f"{name}:0", ())
    for macro in defines:
        source.undefine(macro, name, 0)
    return "\n".join(source.lines) + "\n"


def text_hash(text: str) -> str:
    """SHA-256 in hex of what an assembler sees: comments, markers and spacing do not count."""
    code = re.sub(r"//.*|^#.*", "", text, flags=re.MULTILINE)
    return hashlib.sha256(" ".join(code.split()).encode()).hexdigest()


@cache
def sources_hash() -> str:
    """SHA-256 in hex of all sources and of this file, as they were when it was first asked for: the
    same macros make the same texts of them."""
    found = hashlib.sha256()
    for path in (*sorted(ROOT.rglob("*.ptx")), Path(__file__)):
        content = path.read_bytes()
        found.update(f"{path.relative_to(ROOT)} {len(content)} ".encode() + content)
    return found.hexdigest()


@dataclass
class _Macro:
    value: str
    file: str
    line: int
    used: bool = False


@dataclass
class _Source:
    """An expansion under way: the lines so far and the macros now defined."""

    root: Path
    main: str
    lines: list[str] = field(default_factory=list)
    macros: dict[str, _Macro] = field(default_factory=dict)

    def include(self, name: str, place: str, parents: tuple[str, ...]) -> None:
        """Append the file's expanded lines. `place` is the including file:line."""
        if name in parents:
            cycle = " -> ".join((*parents[parents.index(name) :], name))
            raise PtxSourceError(f"{place}: include cycle {cycle}")
        path = next((p for p in (self.root / name, ROOT / name) if p.is_file()), None)
        if path is None:
            raise PtxSourceError(f"{place}: there is no file {name}")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if line.startswith("#"):
                self._directive(line, name, number, (*parents, name))
            else:
                self.lines.append(self._substitute(line, f"{name}:{number}"))
        for macro, definition in self.macros.items():
            if definition.file == name and definition.line:
                raise PtxSourceError(f"{name}:{definition.line}: {macro} is not undefined here")

    def define(self, macro: str, value: str, file: str, line: int) -> None:
        if not _NAME.fullmatch(macro) or macro in PTX_WORDS:
            raise PtxSourceError(f"{file}:{line}: {macro!r} cannot be a macro's name")
        if macro in self.macros:
            old = self.macros[macro]
            raise PtxSourceError(
                f"{file}:{line}: {macro} is defined already, at {old.file}:{old.line}"
            )
        self.macros[macro] = _Macro(value, file, line)

    def undefine(self, macro: str, file: str, line: int) -> None:
        definition = self.macros.get(macro)
        if definition is None or definition.file != file or (line > 0) != (definition.line > 0):
            raise PtxSourceError(f"{file}:{line}: {macro} is not defined in this file")
        if not definition.used:
            raise PtxSourceError(f"{file}:{definition.line}: {macro} is defined but never used")
        del self.macros[macro]

    def _directive(self, line: str, file: str, number: int, parents: tuple[str, ...]) -> None:
        words = line.split("//")[0].split(maxsplit=2)
        match words:
            case ["#include", operand]:
                place = f"{file}:{number}"
                included = operand if operand[0] == '"' else self._substitute(operand, place)
                included = included.strip('"')
                self.lines.append(f'# 1 "{included}"')
                self.include(included, place, parents)
                self.lines.append(f'# {number + 1} "{file}"')
                return
            case ["#define", macro, *value]:
                self.define(macro, value[0].strip() if value else "", file, number)
            case ["#undef", macro]:
                self.undefine(macro, file, number)
            case _:
                raise PtxSourceError(f"{file}:{number}: cannot read the directive {line!r}")
        self.lines.append("")

    def _substitute(self, line: str, place: str, inside: tuple[str, ...] = ()) -> str:
        """The line with every macro replaced, and the macros in its value in turn."""

        def value(match: re.Match[str]) -> str:
            word = match[0]
            if word[0] in '/"' or word in PTX_WORDS:
                return word
            macro = self.macros.get(word)
            if macro is None or word in inside:
                raise PtxSourceError(f"{place}: {word} is not defined")
            macro.used = True
            return self._substitute(macro.value, place, (*inside, word))

        if "/*" in line.split("//")[0]:
            raise PtxSourceError(f"{place}: only // comments are read")
        return _TOKEN.sub(value, line)
