"""`-hf`: what the hub's libraries raise becomes one typed line."""

from __future__ import annotations

import pytest

from runtime.errors import ConfigError
from server import download

hub = pytest.importorskip("huggingface_hub")


class Refused(Exception):
    """As an HTTP library's own error: no OSError, several lines."""


@pytest.mark.parametrize("error", [Refused("no route\nto the hub"), OSError("no route"), Refused()])
def test_no_network_is_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuse(*_: object, **__: object) -> list[str]:
        raise error

    monkeypatch.setattr(hub.HfApi, "list_repo_files", refuse)
    with pytest.raises(ConfigError, match=r"^-hf user/repo: (no route|Refused);") as caught:
        download.download("user/repo", None, None, offline=False)
    assert "\n" not in str(caught.value)


def test_a_wrong_quant_keeps_its_own_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.HfApi, "list_repo_files", lambda *_: ["a-Q8_0.gguf"])
    with pytest.raises(ConfigError, match=r"matches Q2_K; it has a-Q8_0\.gguf"):
        download.download("user/repo:Q2_K", None, None, offline=False)
