"""`-mu`: a whole file or none."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from runtime.errors import ConfigError
from server.model_url import fetch

CONTENT = b"GGUF" * 1000


class Files(BaseHTTPRequestHandler):
    """/whole.gguf is served, /half.gguf breaks off, the rest is not there."""

    def do_GET(self) -> None:
        if self.path not in ("/whole.gguf", "/half.gguf"):
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT if self.path == "/whole.gguf" else CONTENT[:100])

    def log_message(self, format: str, *args: object) -> None:
        """Stay silent."""


@pytest.fixture
def address() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Files) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_file_is_fetched_once(address: str, tmp_path: Path) -> None:
    path = fetch(f"{address}/whole.gguf", tmp_path / "new", offline=False)
    assert path.read_bytes() == CONTENT and path.name.endswith("-whole.gguf")
    assert fetch(f"{address}/whole.gguf", tmp_path / "new", offline=True) == path


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/half.gguf", "100 of 4000|IncompleteRead|ended"),
        ("/none.gguf", "404"),
        ("/x.bin", "of a .gguf file"),
    ],
)
def test_anything_else_leaves_nothing(
    address: str, tmp_path: Path, path: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        fetch(address + path, tmp_path, offline=False)
    assert not list(tmp_path.iterdir())


def test_offline_and_other_schemes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--offline"):
        fetch("http://127.0.0.1:1/a.gguf", tmp_path, offline=True)
    with pytest.raises(ConfigError, match="http or https"):
        fetch("file:///etc/a.gguf", tmp_path, offline=False)
