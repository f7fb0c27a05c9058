"""What a kernel takes: the `.entry` names of a PTX text and their parameter lists."""

from __future__ import annotations

import re
from dataclasses import dataclass

_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*(?:\(([^)]*)\))?")
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>[a-z]\d+)"
    r"(?:\s+\.ptr(?:\s+\.(?:global|shared|const|local))?(?:\s+\.align\s+\d+)?)?"
    r"\s+(?P<name>[\w$]+)(?:\s*\[\s*(?P<count>\d+)\s*\])?"
)


@dataclass(frozen=True)
class Param:
    """One kernel parameter: a value, or an array of `count` values passed by copy."""

    name: str
    type: str
    """PTX type without the dot: "u64", "f32", ..."""
    count: int | None
    offset: int
    """Bytes from the start of the parameter block."""

    @property
    def n_bytes(self) -> int:
        return int(self.type[1:]) // 8 * (self.count or 1)


@dataclass(frozen=True)
class Entry:
    """A kernel of a module."""

    name: str
    params: tuple[Param, ...]


def entries(text: str) -> tuple[Entry, ...]:
    """The kernels of an expanded PTX text, in its order.

    Raises:
        ValueError: a parameter list cannot be read.
    """
    code = re.sub(r"//.*|^#.*", "", text, flags=re.MULTILINE)
    return tuple(Entry(m[1], _params(m[1], m[2] or "")) for m in _ENTRY.finditer(code))


def _params(entry: str, text: str) -> tuple[Param, ...]:
    params: list[Param] = []
    offset = 0
    for declaration in filter(None, map(str.strip, text.split(","))):
        match = _PARAM.fullmatch(declaration)
        if match is None:
            raise ValueError(f"{entry}: cannot read the parameter {declaration!r}")
        size = int(match["type"][1:]) // 8
        alignment = int(match["align"] or size)
        offset = -(-offset // alignment) * alignment
        count = int(match["count"]) if match["count"] else None
        params.append(Param(match["name"], match["type"], count, offset))
        offset += params[-1].n_bytes
    return tuple(params)
