"""Files of arrays: what was written comes back, all else is refused, a crash breaks nothing."""

from __future__ import annotations

import os
import random
import signal
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from profiles import ProfileError, container

MANY = 1 << 20


def a_file(path: Path, *, packed: bool = True) -> Path:
    arrays = {"a": np.arange(6, dtype=np.uint8).reshape(2, 3), "b": np.array([7, 8], np.uint64)}
    container.write(path, "test", {"x": 1}, arrays, packed=packed)
    return path


def raw(path: Path, header: object, body: bytes = b"") -> Path:
    encoded = msgpack.packb(header)
    path.write_bytes(container.MAGIC + struct.pack("<I", len(encoded)) + encoded + body)
    return path


def row(**changes: Any) -> dict[str, Any]:
    body = bytes(6)
    good = {"name": "a", "type": "|u1", "shape": [6], "packed": False, "bytes": 6,
            "crc32": zlib.crc32(body)}  # fmt: skip
    return {**good, **changes}


def header(*rows: object) -> dict[str, object]:
    return {"kind": "test", "version": 1, "facts": {}, "arrays": list(rows)}


@pytest.mark.parametrize("packed", [True, False])
def test_what_was_written_comes_back(tmp_path: Path, packed: bool) -> None:
    contents = container.read(a_file(tmp_path / "f", packed=packed), "test", MANY)
    assert contents.facts == {"x": 1}
    assert contents.arrays["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert contents.arrays["b"].tolist() == [7, 8] and contents.arrays["b"].dtype == np.uint64


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = a_file(tmp_path / "f").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "f").write_bytes(whole[:length])
        with pytest.raises(ProfileError):
            container.read(tmp_path / "f", "test", MANY)


def test_a_changed_byte_is_refused_or_changes_only_facts(tmp_path: Path) -> None:
    whole = a_file(tmp_path / "f").read_bytes()
    generator = random.Random(1)
    n_refused = 0
    for position in range(len(whole)):
        changed = bytearray(whole)
        changed[position] ^= 1 << generator.randrange(8)
        (tmp_path / "f").write_bytes(changed)
        try:
            contents = container.read(tmp_path / "f", "test", MANY)
        except ProfileError:
            n_refused += 1
        else:
            assert [a.nbytes for a in contents.arrays.values()] == [6, 16]
    assert n_refused > 0.9 * len(whole)


@pytest.mark.parametrize(
    "wrong",
    [
        row(shape=[1 << 30]),
        row(shape=[1 << 20, 1 << 20, 1 << 20]),
        row(shape=[-6]),
        row(shape=[True] * 3),
        row(shape=[6, 1, 1, 1, 1]),
        row(type="|O"),
        row(type="<f8"),
        row(bytes=1 << 39),
        row(bytes=-1),
        row(crc32=1),
        row(packed=1),
        row(name=3),
        row(packed=True),
        "row",
        None,
    ],
)
def test_a_wrong_description_is_refused(tmp_path: Path, wrong: object) -> None:
    path = raw(tmp_path / "f", header(wrong), bytes(6))
    with pytest.raises(ProfileError):
        container.read(path, "test", MANY)
    assert container.read(raw(path, header(row()), bytes(6)), "test", MANY).arrays["a"].sum() == 0


@pytest.mark.parametrize(
    "wrong",
    [[], 1, {"kind": "test"}, {**header(), "version": 2}, {**header(), "kind": "other"},
     {**header(), "facts": []}, header(*[row()] * 17)],
)  # fmt: skip
def test_a_wrong_header_is_refused(tmp_path: Path, wrong: object) -> None:
    with pytest.raises(ProfileError):
        container.read(raw(tmp_path / "f", wrong), "test", MANY)


def test_a_packed_array_is_unpacked_no_further_than_its_shape(tmp_path: Path) -> None:
    bomb = zlib.compress(bytes(50_000_000))
    path = raw(
        tmp_path / "f", header(row(packed=True, bytes=len(bomb), crc32=zlib.crc32(bomb))), bomb
    )
    with pytest.raises(ProfileError):
        container.read(path, "test", MANY)


def test_what_is_no_file_is_neither_waited_for_nor_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/null")
    for name in ("pipe", "link"):
        with pytest.raises(ProfileError, match="not a regular file"):
            container.read(tmp_path / name, "test", MANY)
        with pytest.raises(FileExistsError, match="not a file of hotexpert's"):
            a_file(tmp_path / name)
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "link").is_symlink()


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path: Path) -> None:
    for name in ("there", "not there yet"):
        target, link = tmp_path / "elsewhere" / name, tmp_path / f"link to {name}"
        link.symlink_to(target)
        if name == "there":
            a_file(target)
        container.write(link, "test", {"x": 2}, {})
        assert link.is_symlink() and container.read(target, "test", MANY).facts == {"x": 2}
    assert not list(tmp_path.glob(".*.tmp"))


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = a_file(tmp_path / "f").read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("profiles.container.os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        container.write(tmp_path / "f", "test", {"x": 2}, {})
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
    assert (tmp_path / "f").read_bytes() == before


def test_what_killed_writers_left_is_removed_when_it_is_old(tmp_path: Path) -> None:
    old, new, other = tmp_path / ".f.aa.tmp", tmp_path / ".f.bb.tmp", tmp_path / ".g.aa.tmp"
    for path in (old, new, other):
        path.write_bytes(b"")
    long_ago = time.time() - 2 * container.STALE_SECONDS
    for path in (old, other):
        os.utime(path, (long_ago, long_ago))
    a_file(tmp_path / "f")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".f.bb.tmp", ".g.aa.tmp", "f"]


WRITER = """
import itertools, sys
import numpy as np
from pathlib import Path
from profiles import container
path = Path(sys.argv[1])
for i in itertools.count():
    container.write(path, "test", {"i": i}, {"a": np.full(20_000, i % 251, np.uint8)}, packed=False)
    if i == 0:
        print("ready", flush=True)
"""


def test_a_killed_writer_leaves_a_whole_file(tmp_path: Path) -> None:
    path, generator = tmp_path / "f", random.Random(2)
    for _ in range(4):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)],
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
        with writer:
            assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
            for _ in range(generator.randrange(1, 200)):
                container.read(path, "test", MANY)  # readers beside the writer never see half
            writer.send_signal(signal.SIGKILL)
        contents = container.read(path, "test", MANY)
        assert set(contents.arrays["a"].tolist()) == {contents.facts["i"] % 251}
