"""A web server with the endpoints of a Hugging Face hub that we use, and a folder of wheels for pip.

Like the hub it redirects a download to a CDN path, answers ranges, and lists sha256 for large files and git's hash for
small ones.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_LARGE = (".gguf", ".safetensors", ".bin")


class Hub:
    """`repos` maps repositories to their files, `owner/name@branch` to those of a branch; `wheels` are served under
    /wheels/. `gated` and `private` repositories need `token`.

    `corrupted` files are sent with other bytes than listed; `without_ranges` are always sent as a whole. `cut` maps
    files to the bytes after which the next connections are closed. `held` files stop in the middle until `gate` is set.
    `requested` records all paths in order, `ranges` the Range headers, `authorized` whether a token came along.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.repos: dict[str, dict[str, bytes]] = {}
        self.wheels: dict[str, bytes] = {}
        self.gated: set[str] = set()
        self.private: set[str] = set()
        self.token = "secret"
        self.corrupted: set[str] = set()
        self.without_ranges: set[str] = set()
        self.cut: dict[str, list[int]] = {}
        self.held: set[str] = set()
        self.gate, self.holding = threading.Event(), threading.Event()
        self.failures: list[int] = []  # status codes of the next answers
        self.requested: list[str] = []
        self.ranges: list[str] = []
        self.authorized: list[tuple[str, bool]] = []

    @property
    def downloads(self) -> list[str]:
        """The files that were sent, in order: their paths on the CDN."""
        return [path for path in self.requested if path.startswith("/cdn/")]

    def answer(self, path: str, headers: Any) -> tuple[int, dict[str, str], bytes]:
        self.requested.append(path)
        allowed = headers.get("authorization") == f"Bearer {self.token}"
        self.authorized.append((path, headers.get("authorization") is not None))
        path, _, query = path.partition("?")
        path = unquote(path)
        if self.failures:
            return self.failures.pop(0), {}, b""
        if path.startswith("/wheels/"):
            return self._wheel(path.removeprefix("/wheels/"))
        if path.startswith("/cdn/"):
            return self._file(path.removeprefix("/cdn/"), headers.get("range"))
        if path == "/api/models":
            words = parse_qs(query).get("search", [""])[0].lower().split()
            found = [repo for repo in self.repos if "@" not in repo and all(word in repo.lower() for word in words)]
            rows = [{"id": repo, "downloads": 9, "likes": 2, "gated": repo in self.gated} for repo in found]
            return 200, {}, json.dumps(rows).encode()
        if path.startswith("/api/models/"):
            repo, _, rest = path.removeprefix("/api/models/").partition("/revision/")
            return self._listing(repo, rest, allowed)
        repo, _, rest = path.removeprefix("/").partition("/resolve/")
        if refusal := self._refusal(repo, allowed):
            return refusal
        commit, _, name = rest.partition("/")
        key = f"{repo}@{commit}" if f"{repo}@{commit}" in self.repos else repo
        if name not in self.repos.get(key, {}):
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        data = self.repos[key][name]
        about = {"X-Repo-Commit": COMMIT, "X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{_hash(name, data)}"'}
        return 302, {"Location": f"{self.url.replace('127.0.0.1', 'localhost')}/cdn/{key}//{name}"} | about, b""

    def _refusal(self, repo: str, allowed: bool) -> tuple[int, dict[str, str], bytes] | None:
        if repo in self.gated and not allowed:
            return 401, {"X-Error-Code": "GatedRepo"}, b"{}"
        if repo not in self.repos or (repo in self.private and not allowed):
            return 401, {"X-Error-Code": "RepoNotFound"}, b"{}"
        return None

    def _listing(self, repo: str, revision: str, allowed: bool) -> tuple[int, dict[str, str], bytes]:
        is_refs, repo = repo.endswith("/refs"), repo.removesuffix("/refs")
        if refusal := self._refusal(repo, allowed or repo in self.gated):  # a gated repository is listed for all
            return refusal
        branches = ["main", *(name.partition("@")[2] for name in self.repos if name.startswith(f"{repo}@"))]
        about: dict[str, Any]
        if is_refs:
            refs = [{"name": name, "ref": f"refs/heads/{name}", "targetCommit": COMMIT} for name in branches]
            about = {"branches": refs, "converts": [], "tags": []}
        elif revision not in branches and revision != COMMIT:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        else:
            key, sha = (repo, COMMIT) if revision in ("main", COMMIT) else (f"{repo}@{revision}", revision)
            files = [_sibling(name, data) for name, data in self.repos[key].items()]
            about = {"_id": "1", "id": repo, "sha": sha, "private": False, "siblings": files}
        return 200, {"Content-Type": "application/json"}, json.dumps(about).encode()

    def _file(self, path: str, range_: str | None) -> tuple[int, dict[str, str], bytes]:
        repo, _, name = path.partition("//")
        data = self.repos[repo][name]
        sent = bytes(len(data)) if name in self.corrupted else data
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "Accept-Ranges": "bytes"}
        if range_ is None or name in self.without_ranges:
            return 200, headers, sent
        self.ranges.append(range_)
        first, _, last = range_.removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last or len(data) - 1), len(data) - 1)
        return 206, {**headers, "Content-Range": f"bytes {start}-{end}/{len(data)}"}, sent[start : end + 1]

    def _wheel(self, name: str) -> tuple[int, dict[str, str], bytes]:
        if not name:
            links = "".join(f'<a href="/wheels/{wheel}">{wheel}</a>' for wheel in self.wheels)
            return 200, {"Content-Type": "text/html"}, f"<!DOCTYPE html><html><body>{links}</body></html>".encode()
        return (200, {}, self.wheels[name]) if name in self.wheels else (404, {}, b"")


def _sibling(name: str, data: bytes) -> dict[str, Any]:
    about: dict[str, Any] = {"rfilename": name, "size": len(data)}
    if name.endswith(_LARGE):
        lfs = {"sha256": _hash(name, data), "size": len(data), "pointerSize": 134}
        return about | {"blobId": "0" * 40, "lfs": lfs}
    return about | {"blobId": _hash(name, data)}


def _hash(name: str, data: bytes) -> str:
    if name.endswith(_LARGE):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


@contextmanager
def serve_hub() -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, headers, body = hub.answer(self.path, self.headers)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self._send(body)

        do_HEAD = do_GET  # noqa: N815

        def _send(self, body: bytes) -> None:
            name = self.path.rpartition("//")[2].removeprefix("/wheels/")
            if self.path.startswith("/cdn/") and hub.cut.get(name):
                self.wfile.write(body[: hub.cut[name].pop(0)])
                self.close_connection = True
            elif self.path.startswith(("/cdn/", "/wheels/")) and name in hub.held:
                self.wfile.write(body[: len(body) // 2])
                hub.holding.set()
                hub.gate.wait(30)
                self.wfile.write(body[len(body) // 2 :])
            else:
                self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            """A client that disconnects in the middle of a file is part of the tests."""

    server = Server(("127.0.0.1", 0), Handler)
    hub = Hub(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.gate.set()
        server.shutdown()
        server.server_close()
        thread.join()
