"""Split models: all shards or a typed error, and only siblings of the first are ever opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.errors import CorruptModel, ModelError
from runtime.models import open_gguf
from tests.support.gguf_writer import f32_tensor, write_gguf
from tests.support.measure import MAX_EXTRA_BYTES, MAX_SECONDS, cost


def split_model(folder: Path, n: int = 3, **changes: dict[str, Any]) -> Path:
    """Write `n` shards of one tensor each; changes["shard2"] overrides metadata of that shard."""
    for i in range(n):
        metadata = {"split.no": i, "split.count": n, "split.tensors.count": n}
        if i == 0:
            metadata["general.architecture"] = "llama"
        metadata |= changes.get(f"shard{i + 1}", {})
        values = np.full((4, 8), i, np.float32)
        path = folder / f"model-{i + 1:05}-of-{n:05}.gguf"
        write_gguf(path, metadata, [f32_tensor(f"t{i}.weight", values)])
    return folder / f"model-00001-of-{n:05}.gguf"


def test_split_model(tmp_path: Path) -> None:
    with open_gguf(split_model(tmp_path)) as file:
        assert len(file.paths) == 3
        for i in range(3):
            assert file.data(f"t{i}.weight").view(np.float32)[0] == i


def test_split_model_through_symbolic_links(tmp_path: Path) -> None:
    """As in a download cache: the links have the names, the files they point to do not."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "links").mkdir()
    split_model(tmp_path)
    for i, path in enumerate(sorted(tmp_path.glob("*.gguf"))):
        path.rename(tmp_path / "blobs" / str(i))
        (tmp_path / "links" / path.name).symlink_to(tmp_path / "blobs" / str(i))
    with open_gguf(tmp_path / "links" / "model-00001-of-00003.gguf") as file:
        assert len(file.tensors) == 3


SPLITS: dict[str, tuple[dict[str, dict[str, Any]], str]] = {
    "number repeated": ({"shard3": {"split.no": 1}}, "'split.no' is 1"),
    "other count": ({"shard2": {"split.count": 4}}, "'split.count' is 4"),
    "65535 shards": ({"shard1": {"split.count": 65535}}, "shard 1 of 65535"),
    "tensors missing": ({f"shard{i}": {"split.tensors.count": 9} for i in (1, 2, 3)}, "is 9"),
    "other model": ({"shard2": {"general.architecture": "olmoe"}}, "parts of two models"),
    "number is text": ({"shard1": {"split.no": "../x"}}, "not a whole number"),
    "count is text": ({"shard1": {"split.count": "/etc/x"}}, "not a whole number"),
}


@pytest.mark.parametrize("case", SPLITS)
def test_hostile_split(case: str, tmp_path: Path) -> None:
    changes, match = SPLITS[case]
    first = split_model(tmp_path, **changes)
    with cost() as spent, pytest.raises(CorruptModel, match=match):
        open_gguf(first)
    assert spent.seconds < MAX_SECONDS
    assert spent.peak_bytes < MAX_EXTRA_BYTES


def test_split_model_with_wrong_files(tmp_path: Path) -> None:
    first = split_model(tmp_path)
    with pytest.raises(ModelError, match="open the first: model-00001-of-00003"):
        open_gguf(tmp_path / "model-00002-of-00003.gguf")
    (tmp_path / "renamed.gguf").write_bytes(first.read_bytes())
    with pytest.raises(CorruptModel, match="is not named"):
        open_gguf(tmp_path / "renamed.gguf")
    (tmp_path / "model-00002-of-00003.gguf").unlink()
    with pytest.raises(ModelError, match=r"00002-of-00003\.gguf: cannot be opened: No such"):
        open_gguf(first)


def test_same_tensor_in_two_shards(tmp_path: Path) -> None:
    first = split_model(tmp_path)
    second = tmp_path / "model-00002-of-00003.gguf"
    write_gguf(
        second,
        {"split.no": 1, "split.count": 3},
        [f32_tensor("t0.weight", np.zeros((4, 8), np.float32))],
    )
    with pytest.raises(CorruptModel, match=r"'t0\.weight' is also in another shard"):
        open_gguf(first)
