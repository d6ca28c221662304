"""A small HTTP server on loopback that serves images, redirects and errors."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(100))


class ImageServer:
    def __init__(self) -> None:
        self.paths: list[str] = []
        self.hosts: list[str] = []
        self.lookups: list[str] = []
        self.port = 0
        self._server: asyncio.Server | None = None
        self._leaving = asyncio.Event()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        self._leaving.set()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def name(self, host: str, monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
        """Give a host name these addresses on the running loop, and no address to any other name."""

        async def getaddrinfo(hostname: str, port: int | None, **_: Any) -> list[Any]:
            numeric = hostname.replace(".", "").isdigit()
            if not numeric:
                self.lookups.append(hostname)
            if not numeric and hostname != host:
                raise socket.gaierror(-2, "Name or service not known")
            found = [hostname] if numeric else list(addresses)
            return [
                (socket.AF_INET6 if ":" in a else socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, port or 0))
                for a in found
            ]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._talk(reader, writer)
        finally:  # also where the loop ends first
            writer.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split(" ")[1]
        self.paths.append(path)
        self.hosts += [line[6:] for line in head.lower().split("\r\n") if line.startswith("host: ")]
        if path == "/silent":
            await self._leaving.wait()
        else:
            writer.write(self._answer(path))
            await writer.drain()

    def _answer(self, path: str) -> bytes:
        if path == "/hop/1":
            return _redirect("/ok")
        if path.startswith("/hop/"):
            return _redirect(f"/hop/{int(path[5:]) - 1}")
        known = {
            "/ok": _reply("200 OK", "Content-Type: image/png", PNG),
            "/page": _reply("200 OK", "Content-Type: text/html; charset=utf-8", b"<html>"),
            "/untyped": _reply("200 OK", "X-Nothing: 1", PNG),
            "/packed": _reply("200 OK", "Content-Type: image/png\r\nContent-Encoding: gzip", PNG),
            "/large": _head("200 OK", "Content-Type: image/png") + b"x" * 200_000,
            "/broken": b"this is not HTTP\r\n\r\n",
            "/to-localhost": _redirect(f"http://localhost:{self.port}/ok"),
            "/to-file": _redirect("file:///etc/passwd"),
        }
        return known.get(path) or _reply("404 Not Found", "Content-Type: image/png", b"")


def _head(status: str, headers: str) -> bytes:
    return f"HTTP/1.1 {status}\r\nConnection: close\r\n{headers}\r\n\r\n".encode()


def _reply(status: str, headers: str, body: bytes) -> bytes:
    return _head(status, f"{headers}\r\nContent-Length: {len(body)}") + body


def _redirect(where: str) -> bytes:
    return _reply("302 Found", f"Location: {where}", b"")


@asynccontextmanager
async def serve() -> AsyncIterator[ImageServer]:
    server = ImageServer()
    await server.open()
    try:
        yield server
    finally:
        await server.close()
