"""A web server with the three endpoints of a Hugging Face hub that we use, and a folder of wheels for pip."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """`repos` maps repositories to their files; `wheels` are served under /wheels/. `gated` repositories need a token.

    Files in `corrupted` are sent with other bytes than listed. `requested` records all paths in order.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.repos: dict[str, dict[str, bytes]] = {}
        self.wheels: dict[str, bytes] = {}
        self.gated: set[str] = set()
        self.corrupted: set[str] = set()
        self.requested: list[str] = []

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        self.requested.append(path)
        path = path.partition("?")[0]
        if path.startswith("/api/models/"):
            return self._listing(path.removeprefix("/api/models/").partition("/revision/")[0])
        if path.startswith("/wheels/"):
            return self._wheel(path.removeprefix("/wheels/"))
        repo, _, rest = path.removeprefix("/").partition("/resolve/")
        return self._file(repo, rest.partition("/")[2])

    def _listing(self, repo: str) -> tuple[int, dict[str, str], bytes]:
        if repo in self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b"{}"
        if repo not in self.repos:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        files = [_sibling(name, data) for name, data in self.repos[repo].items()]
        about = {"_id": "1", "id": repo, "sha": COMMIT, "private": False, "siblings": files}
        return 200, {"Content-Type": "application/json"}, json.dumps(about).encode()

    def _file(self, repo: str, name: str) -> tuple[int, dict[str, str], bytes]:
        data = self.repos.get(repo, {}).get(name)
        if data is None:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        sent = bytes(len(data)) if name in self.corrupted else data
        digest = f'"{hashlib.sha256(data).hexdigest()}"'
        return 200, {"ETag": digest, "X-Linked-Size": str(len(data)), "X-Repo-Commit": COMMIT}, sent

    def _wheel(self, name: str) -> tuple[int, dict[str, str], bytes]:
        if not name:
            links = "".join(f'<a href="/wheels/{wheel}">{wheel}</a>' for wheel in self.wheels)
            return 200, {"Content-Type": "text/html"}, f"<!DOCTYPE html><html><body>{links}</body></html>".encode()
        return (200, {}, self.wheels[name]) if name in self.wheels else (404, {}, b"")


def _sibling(name: str, data: bytes) -> dict[str, Any]:
    lfs = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return {"rfilename": name, "size": len(data), "blobId": "0", "lfs": lfs}


@contextmanager
def serve_hub() -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, headers, body = hub.answer(self.path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = Hub(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
