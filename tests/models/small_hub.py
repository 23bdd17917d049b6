"""A Hub of one model on a local port: the parts of its protocol that a download uses."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class SmallHub(ThreadingHTTPServer):
    """Serves ``folder`` as ``name``; ``asked`` lists the files whose bytes were sent."""

    daemon_threads = True

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.name, self.folder = name, folder
        self.asked: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def files(self) -> list[Path]:
        return sorted(p for p in self.folder.iterdir() if p.is_file())


class _Handler(BaseHTTPRequestHandler):
    server: SmallHub

    def log_message(self, *args: object) -> None:
        """Nothing on standard error."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        hub, path = self.server, self.path.partition("?")[0]
        api = f"/api/models/{hub.name}"
        resolved = f"/{hub.name}/resolve/{COMMIT}/"
        if path in (api, f"{api}/revision/main"):
            siblings = [{"rfilename": p.name, "size": p.stat().st_size} for p in hub.files()]
            self._json({"id": hub.name, "sha": COMMIT, "siblings": siblings})
        elif path == f"{api}/tree/{COMMIT}":
            self._json(
                [
                    {"type": "file", "path": p.name, "size": p.stat().st_size, "oid": _etag(p)}
                    for p in hub.files()
                ]
            )
        elif path.startswith(resolved) and (file := hub.folder / path[len(resolved) :]).is_file():
            if body:
                hub.asked.append(file.name)
            self._send(file.read_bytes(), body=body, ETag=f'"{_etag(file)}"')
        elif path.startswith(f"{api}/revision/"):
            self._missing("RevisionNotFound")
        else:
            self._missing("RepoNotFound")

    def _json(self, value: object) -> None:
        self._send(json.dumps(value).encode(), body=True)

    def _send(self, data: bytes, *, body: bool, **headers: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Repo-Commit", COMMIT)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def _missing(self, code: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest()


@contextmanager
def small_hub(name: str, folder: Path) -> Iterator[SmallHub]:
    """A running ``SmallHub``."""
    hub = SmallHub(name, folder)
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
