"""Hostile GGUF files end in a typed error, soon and without taking memory; sound ones open fast."""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import CorruptModel, ModelError, UnsupportedFormat
from runtime.models import open_gguf, open_model
from tests.support.gguf_writer import (
    ARRAY,
    BOOL,
    INT32,
    STRING,
    UINT32,
    Tensor,
    Typed,
    f32_tensor,
    gguf_bytes,
    string,
    write_gguf,
)
from tests.support.measure import MAX_EXTRA_BYTES, MAX_SECONDS, cost
from tests.support.tiny_models import TINY_MODELS

U64_MAX = 2**64 - 1
F32_TENSOR = f32_tensor("t.weight", np.ones((4, 8), np.float32))
Q8_0, Q4_2 = 8, 4


def refused(
    path: Path, expected: type[ModelError], match: str, opener: Callable[[Path], Any] = open_gguf
) -> None:
    """Opening `path` raises `expected` within the limits, and the message names the file."""
    with cost() as spent, pytest.raises(ModelError, match=match) as caught:
        opener(path).close()
    assert type(caught.value) is expected
    assert str(path) in str(caught.value)
    assert spent.seconds < MAX_SECONDS
    assert spent.peak_bytes < MAX_EXTRA_BYTES


def value(type_number: int, payload: bytes) -> Typed:
    return Typed(type_number, payload)


def array(element_type: int, count: int, payload: bytes = b"") -> Typed:
    return value(ARRAY, struct.pack("<IQ", element_type, count) + payload)


NESTED = b"".join(struct.pack("<IQ", ARRAY, 1) for _ in range(1000))
HEADERS: dict[str, tuple[bytes, type[ModelError], str]] = {
    "empty": (b"", CorruptModel, "magic number"),
    "three bytes": (b"GGU", CorruptModel, "magic number"),
    "magic only": (b"GGUF", CorruptModel, "byte 4: version"),
    "wrong magic": (b"GGML" + bytes(60), CorruptModel, "not a GGUF file"),
    "reversed magic": (b"FUGG" + bytes(60), UnsupportedFormat, "big-endian"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + bytes(60), UnsupportedFormat, "big-endian"),
    "version 0": (gguf_bytes(version=0), UnsupportedFormat, "version 0"),
    "version 1": (gguf_bytes(version=1), UnsupportedFormat, "version 1"),
    "version 4": (gguf_bytes(version=4), UnsupportedFormat, "version 4"),
    "version max": (gguf_bytes(version=2**32 - 1), UnsupportedFormat, "version 4294967295"),
    "no counts": (b"GGUF" + struct.pack("<I", 3), CorruptModel, "tensor count"),
    "many keys for the file": (gguf_bytes(n_keys=60000), CorruptModel, "cannot hold"),
    "many tensors for the file": (gguf_bytes(n_tensors=60000), CorruptModel, "cannot hold"),
    "one key missing": (gguf_bytes({"a": 1}, n_keys=2) + bytes(20), CorruptModel, "key has 0"),
    "key length 0": (gguf_bytes([("", 1)]), CorruptModel, "key has 0 bytes"),
    "key of 65536 bytes": (gguf_bytes([("k" * 65536, 1)]), CorruptModel, "65536 bytes"),
    "key not UTF-8": (gguf_bytes([(b"\xff\xfe", 1)]), CorruptModel, "printable ASCII"),
    "key with a newline": (gguf_bytes([("a\nb", 1)]), CorruptModel, "printable ASCII"),
    "duplicate key": (gguf_bytes([("a", 1), ("a", 2)]), CorruptModel, "'a' is there twice"),
    "long string": (
        gguf_bytes({"a": value(STRING, struct.pack("<Q", 2**40) + b"x")}),
        CorruptModel,
        "past the file",
    ),
    "string of an array not UTF-8": (
        gguf_bytes({"a": array(STRING, 3, string("ok") + string(b"\xc3") + string("ok"))}),
        CorruptModel,
        # magic, version, two counts, the key with its length, two types, the length, "ok"
        f"byte {4 + 4 + 8 + 8 + (8 + 1) + 4 + 4 + 8 + (8 + 2)}: .* UTF-8",
    ),
    "string not UTF-8": (gguf_bytes({"a": value(STRING, string(b"\xc3"))}), CorruptModel, "UTF-8"),
    "array of 2^60 bytes": (gguf_bytes({"a": array(0, 2**60)}), CorruptModel, "'a' has 115292"),
    "array of 2^61 words": (gguf_bytes({"a": array(10, 2**61)}), CorruptModel, "'a' has 230584"),
    "array of 2^63 strings": (gguf_bytes({"a": array(8, 2**63)}), CorruptModel, "'a' has 922337"),
    "array cut short": (gguf_bytes({"a": array(8, 2, string("x"))}), CorruptModel, "'a'"),
    "nested arrays": (gguf_bytes({"a": value(ARRAY, NESTED)}), CorruptModel, "array of arrays"),
    "value type 13": (gguf_bytes({"a": value(13, bytes(8))}), CorruptModel, "type 13"),
    "element type 13": (gguf_bytes({"a": array(13, 1, bytes(8))}), CorruptModel, "type 13"),
    "element type 255": (gguf_bytes({"a": array(255, 0)}), CorruptModel, "type 255"),
    "boolean 2": (gguf_bytes({"a": value(BOOL, b"\x02")}), CorruptModel, "boolean"),
    "booleans 2": (gguf_bytes({"a": array(BOOL, 2, b"\x01\x02")}), CorruptModel, "boolean"),
}
for count in (2**31, 2**63, U64_MAX):
    HEADERS[f"{count} tensors"] = gguf_bytes(n_tensors=count), CorruptModel, "tensor count is"
    HEADERS[f"{count} keys"] = gguf_bytes(n_keys=count), CorruptModel, "key count is"
for length in (2**32, 2**63):
    HEADERS[f"key length {length}"] = (
        gguf_bytes(n_keys=1) + struct.pack("<Q", length) + bytes(16),
        CorruptModel,
        "metadata key has",
    )
for alignment in (0, 1, 3, 24, 2**31):
    HEADERS[f"alignment {alignment}"] = (
        gguf_bytes({"general.alignment": alignment}, [F32_TENSOR]),
        CorruptModel,
        f"'general.alignment' is {alignment}",
    )
for name, typed in (("negative", Typed(INT32, -8)), ("text", Typed(STRING, "32"))):
    HEADERS[f"alignment {name}"] = (
        gguf_bytes({"general.alignment": typed}, [F32_TENSOR]),
        CorruptModel,
        "not uint32",
    )


@pytest.mark.parametrize("case", HEADERS)
def test_hostile_header(case: str, tmp_path: Path) -> None:
    content, expected, match = HEADERS[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    refused(path, expected, match)


def tensor(shape: tuple[int, ...] = (32,), **changes: Any) -> list[Tensor]:
    return [Tensor("t.weight", shape, bytes(128), **changes)]


TENSORS: dict[str, tuple[list[Tensor], type[ModelError], str]] = {
    "no dimension": (tensor((), n_dimensions=0), CorruptModel, "has 0 dimensions"),
    "5 dimensions": (tensor((1,) * 5), CorruptModel, "has 5 dimensions"),
    "9 dimensions": (tensor((1,) * 9), CorruptModel, "has 9 dimensions"),
    "2^32-1 dimensions": (tensor(n_dimensions=2**32 - 1), CorruptModel, "4294967295 dimensions"),
    "a dimension of 0": (tensor((32, 0)), CorruptModel, "empty shape"),
    "a dimension of 2^42+1": (tensor((2**42 + 1,)), CorruptModel, "past the file"),
    "a product that wraps": (tensor((2**32, 2**32)), CorruptModel, "past the file"),
    "a product that wraps to 32": (tensor((2**63, 2, 16, 2)), CorruptModel, "past the file"),
    "offset 2^63": (tensor(offset=2**63), CorruptModel, "past the file"),
    "offset 2^64-32": (tensor(offset=2**64 - 32), CorruptModel, "past the file"),
    "offset not aligned": (tensor(offset=4), CorruptModel, "not aligned"),
    "offset past the end": (tensor(offset=1 << 20), CorruptModel, "past the file"),
    "one value past the end": (tensor((33,)), CorruptModel, "past the file"),
    "unknown type": (tensor(ggml_type=999), UnsupportedFormat, "type 999"),
    "removed type": (tensor(ggml_type=Q4_2), UnsupportedFormat, "type 4"),
    "rows not whole blocks": (tensor((33,), ggml_type=Q8_0), CorruptModel, "blocks of 32"),
    "overlap": (
        [*tensor(), Tensor("u.weight", (32,), bytes(128), offset=96)],
        CorruptModel,
        "'t.weight' and 'u.weight' overlap",
    ),
    "duplicate": (tensor() * 2, CorruptModel, "'t.weight' is there twice"),
    "no name": ([Tensor("", (32,), bytes(128))], CorruptModel, "tensor name has 0"),
    "long name": ([Tensor("n" * 65, (32,), bytes(128))], CorruptModel, "name has 65"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_hostile_tensor_table(case: str, tmp_path: Path) -> None:
    tensors, expected, match = TENSORS[case]
    refused(write_gguf(tmp_path / "model.gguf", {}, tensors), expected, match)


@pytest.mark.parametrize("version", [2, 3])
def test_last_byte_at_the_end_of_the_file(version: int, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", {"a": [True, False]}, tensor(), version=version)
    with open_gguf(path) as file:
        info = file.tensors["t.weight"]
        assert info.offset + info.n_bytes == path.stat().st_size
        assert file.metadata == {"a": [True, False]}
        assert file.version == version
    os.truncate(path, path.stat().st_size - 1)
    refused(path, CorruptModel, "past the file")


def test_map_ranges_cover_the_views(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", {}, [F32_TENSOR])
    with open_gguf(path) as file:
        offset = file.tensors["t.weight"].offset
        view = file.data("t.weight")
        assert file.map_ranges() == [(path, view.ctypes.data - offset, path.stat().st_size)]


def test_views_are_read_only_and_outlive_the_file(tmp_path: Path) -> None:
    with open_gguf(write_gguf(tmp_path / "model.gguf", {}, [F32_TENSOR])) as file:
        view = file.data("t.weight")
        assert not view.flags.writeable
    assert view.tobytes() == F32_TENSOR.data
    with pytest.raises(ModelError, match="closed"):
        file.data("t.weight")


@pytest.mark.parametrize("alignment", [8, 4096])
def test_alignment(alignment: int, tmp_path: Path) -> None:
    tensors = [Tensor("a", (8,), bytes(32)), Tensor("b", (8,), bytes(range(32)))]
    metadata = {"general.alignment": alignment}
    path = write_gguf(tmp_path / "model.gguf", metadata, tensors, alignment=alignment)
    with open_gguf(path) as file:
        assert file.tensors["b"].offset % alignment == 0
        assert file.data("b").tobytes() == tensors[1].data


def test_sparse_file_of_a_terabyte_is_refused_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for declared in (
        array(0, 2**39),
        array(STRING, 2**36),
        value(STRING, struct.pack("<Q", 2**39)),
    ):
        path.write_bytes(gguf_bytes({"a": declared}))
        os.truncate(path, 2**40)
        refused(path, CorruptModel, "'a'")


def test_a_large_vocabulary_parses_fast(tmp_path: Path) -> None:
    n = 150_000
    metadata = {
        "tokenizer.ggml.tokens": [f"token{i}" for i in range(n)],
        "tokenizer.ggml.merges": [f"tok en{i}" for i in range(n)],
        "tokenizer.ggml.scores": [float(i) for i in range(n)],
        "tokenizer.ggml.token_type": [1] * n,
    }
    path = write_gguf(tmp_path / "model.gguf", metadata, [])
    seconds = []
    for _ in range(3):
        started = time.thread_time()
        with open_gguf(path) as file:
            seconds.append(time.thread_time() - started)
    assert file.metadata == metadata
    assert min(seconds) < 0.3


def test_what_is_not_a_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    refused(tmp_path / "fifo", ModelError, "not a regular file")
    refused(tmp_path, ModelError, "not a regular file")
    refused(tmp_path / "missing", ModelError, "No such file")
    with pytest.raises(ModelError, match="cannot be opened"):
        open_gguf("nul\0")


def test_a_medium_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    path = write_gguf(tmp_path / "model.gguf", {}, [F32_TENSOR])
    monkeypatch.setattr(os, "pread", fail)
    refused(path, ModelError, "cannot be read: Input/output error")


def test_a_refused_file_leaves_no_descriptor_open(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", {}, tensor(offset=4))
    before = len(os.listdir("/proc/self/fd"))
    refused(path, CorruptModel, "aligned")
    refused(tmp_path, ModelError, "not a regular file")
    with open_gguf(write_gguf(path, {}, tensor())):
        pass
    assert len(os.listdir("/proc/self/fd")) == before


ORIGINAL = gguf_bytes(
    {"a": 7, "b": "text", "c": ["x", "yz"], "d": [1.5, 2.5], "e": True, "general.alignment": 32},
    [F32_TENSOR, Tensor("q.weight", (64, 2), bytes(136), Q8_0)],
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(ORIGINAL) - 1), st.integers(0, 255)), max_size=4))
def test_changed_bytes_give_typed_errors_only(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]]
) -> None:
    content = bytearray(ORIGINAL)
    for position, byte in changes:
        content[position] = byte
    open_or_typed_error(tmp_path_factory.getbasetemp() / "changed.gguf", bytes(content))


TINY = TINY_MODELS["llama_dense"]()
TINY_BYTES = gguf_bytes(TINY.metadata, TINY.tensors)
N_HEADER_BYTES = TINY_BYTES.index(TINY.tensors[0].data)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, N_HEADER_BYTES - 1), st.sampled_from([0, 1, 127, 128, 254, 255]))
def test_changed_bytes_of_a_model_give_typed_errors_only(
    tmp_path_factory: pytest.TempPathFactory, position: int, byte: int
) -> None:
    content = bytearray(TINY_BYTES)
    content[position] = byte
    path = tmp_path_factory.getbasetemp() / "changed.gguf"
    path.write_bytes(content)
    with contextlib.suppress(ModelError), open_model(path):
        pass


def test_every_truncation_is_a_typed_error(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for n_bytes in range(len(ORIGINAL)):
        path.write_bytes(ORIGINAL[:n_bytes])
        with pytest.raises(ModelError):
            open_gguf(path)


def open_or_typed_error(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with contextlib.suppress(ModelError), open_gguf(path) as file:
        for name in file.tensors:
            file.data(name).sum()


def test_a_replaced_file_serves_on(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", {}, [F32_TENSOR])
    with open_gguf(path) as file:
        new = write_gguf(tmp_path / "new.gguf", {}, tensor())
        new.rename(path)
        file.check_unchanged()
        assert file.data("t.weight").tobytes() == F32_TENSOR.data


def test_a_shortened_file_is_noticed(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", {}, [F32_TENSOR])
    with open_gguf(path) as file:
        file.check_unchanged()
        os.truncate(path, 100)
        with pytest.raises(CorruptModel, match="to 100 bytes while it was open"):
            file.check_unchanged()


def test_vocabulary_items_of_odd_size(tmp_path: Path) -> None:
    """A token of 1 MB and a template of 10 MB are legal strings; they only have to stay cheap."""
    model = TINY_MODELS["llama"]()
    model.metadata["tokenizer.ggml.tokens"][5] = "x" * (1 << 20)
    model.metadata["tokenizer.chat_template"] = "{{ x }}" * 1_500_000
    path = model.write(tmp_path / "model.gguf")
    with cost() as spent, open_model(path):
        pass
    assert spent.seconds < MAX_SECONDS
    assert spent.peak_bytes < MAX_EXTRA_BYTES


@pytest.mark.parametrize("texts", [["a", "\0", "b\0c", ""], ["\0"], [], [""], ["\u0120x", "y"]])
def test_texts_may_have_any_character(texts: list[str], tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    payload = b"".join(map(string, texts))
    path.write_bytes(gguf_bytes({"a": array(STRING, len(texts), payload)}, [F32_TENSOR]))
    with open_gguf(path) as file:
        assert file.metadata["a"] == texts


def test_numbers_keep_their_kind(tmp_path: Path) -> None:
    metadata = {"a": Typed(UINT32, 7), "b": 2.5, "c": -1, "d": True, "e": "é", "f": [1, 2]}
    with open_gguf(write_gguf(tmp_path / "model.gguf", metadata, [])) as file:
        assert file.metadata == {"a": 7, "b": 2.5, "c": -1, "d": True, "e": "é", "f": [1, 2]}
        assert [type(v) for v in file.metadata.values()] == [int, float, int, bool, str, list]
