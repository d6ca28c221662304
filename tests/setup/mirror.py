"""A Debian mirror with small packages over HTTP, built by the real dpkg-deb."""

from __future__ import annotations

import hashlib
import lzma
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

Files = Mapping[str, str]


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


class Mirror:
    def __init__(self, folder: Path) -> None:
        self._folder, self._stanzas = folder, list[str]()
        self.url = ""

    def add(self, name: str, files: Files, sha256: str = "") -> None:
        """Add a package with these executable files. `sha256` overrides the checksum in the index."""
        tree = self._folder / f"{name}-tree"
        (tree / "DEBIAN").mkdir(parents=True)
        (tree / "DEBIAN" / "control").write_text(
            f"Package: {name}\nVersion: 1.0\nArchitecture: all\nMaintainer: t <t@example.org>\nDescription: tiny\n"
        )
        for path, text in files.items():
            file = tree / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            file.chmod(0o755)
        deb = self._folder / f"{name}.deb"
        subprocess.run(["dpkg-deb", "--root-owner-group", "-b", tree, deb], check=True, capture_output=True)
        self._list(name, deb, sha256 or hashlib.sha256(deb.read_bytes()).hexdigest())

    def _list(self, name: str, deb: Path, sha256: str) -> None:
        stanza = f"Package: {name}\nVersion: 1.0\nFilename: {deb.name}\nSize: {deb.stat().st_size}\nSHA256: {sha256}\n"
        self._stanzas.append(stanza + "Description: tiny\n more: of it")

    def publish(self, suite: str, kind: str) -> None:
        folder = self._folder / "dists" / suite / "main" / f"binary-{kind}"
        folder.mkdir(parents=True)
        (folder / "Packages.xz").write_bytes(lzma.compress("\n\n".join(self._stanzas).encode()))


@contextmanager
def mirror(folder: Path) -> Iterator[Mirror]:
    web = Mirror(folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        web.url = f"http://127.0.0.1:{server.server_port}/"
        try:
            yield web
        finally:
            server.shutdown()
            thread.join(30)
