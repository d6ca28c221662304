"""A test bench for one agent: a scripted server, a private home, a work folder, and no network except loopback."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from modelyard.core.errors import Unavailable
from modelyard.core.request import Caller, Image, Part, Request, Text, Thinking, ToolCall, ToolResult
from modelyard.gateway.gateway import Gateway
from modelyard.gateway.prepared_request import PreparedRequest
from modelyard.launch.agents import get_agent
from modelyard.launch.launch import TargetServer
from modelyard.launch.plan import LaunchTarget, write_files
from modelyard_fake import engine as fake_engine
from modelyard_fake.script import Script, ScriptRule
from tests.e2e.helpers import wait_until
from tests.live_server import LiveServer, live_server

DEADLINE = 240.0  # seconds, for a busy machine: an agent usually needs a few
_UNREACHABLE_PROXY = "http://127.0.0.1:9"  # the discard port has no listener


class AgentResult:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    def __repr__(self) -> str:
        return f"<AgentResult {self.code}\n--- out\n{self.out[-4000:]}\n--- err\n{self.err[-4000:]}>"


class AgentBench:
    """`work` is the folder of the agent; `requests` are its requests as parsed by the server, in order of arrival."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.agent = get_agent(name)
        self.work = folder / "work"
        self.work.mkdir()
        self.program = self.agent.pinned_program()
        assert self.program.is_file(), f"{self.agent.title} is not installed: .venv/bin/python setup/clients.py"
        self.server: LiveServer
        self.requests: list[Request] = []
        self._started: list[subprocess.Popen[str]] = []

    @contextmanager
    def serve(self, script: list[dict[str, Any]], *, n_ctx: int = 131072, **model: Any) -> Iterator[LiveServer]:
        with ExitStack() as self._stack, live_server(_config(script, n_ctx, model)) as server:
            self.connect(server)
            try:
                yield server
            finally:
                self._kill_started()

    def _kill_started(self) -> None:
        """Also after a failed test: a process that keeps running could break other tests."""
        for process in self._started:
            process.kill()
            process.communicate()

    def connect(self, server: LiveServer) -> None:
        self.server = server
        record_requests(server.app.gateway, self.requests)

    @property
    def turns(self) -> list[Request]:
        """Requests with tools, that is, without side requests such as those for a title."""
        return [request for request in self.requests if request.tools]

    def target(self, **more: Any) -> LaunchTarget:
        server = TargetServer(self.server.url)
        try:
            return msgspec.structs.replace(server.launch_target(None), **more)
        finally:
            server.close()

    def run(self, *own: str, target: LaunchTarget | None = None, **env: str) -> AgentResult:
        """Run the agent with these arguments to its end. If it fails before its first request, it is started once more:
        such a failure has nothing to do with the server."""
        before = len(self.requests)
        try:
            done = _wait_for_end(self.start(*own, target=target, **env))
            if done.code == 0 or len(self.requests) > before:
                return done
        except AssertionError:
            if len(self.requests) > before:
                raise
        return _wait_for_end(self.start(*own, target=target, **env))

    def start(
        self, *own: str, target: LaunchTarget | None = None, stdin: int = subprocess.DEVNULL, **env: str
    ) -> subprocess.Popen[str]:
        plan = self.agent.plan(target or self.target(), self.folder / "settings")
        write_files(plan)
        process = subprocess.Popen(
            [str(self.program), *plan.arguments, *own],
            cwd=self.work,
            env={**self.environment(), **plan.env, **env},
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process

    def environment(self) -> dict[str, str]:
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), _UNREACHABLE_PROXY)
        loopback = {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}
        own = {"HOME": str(home), "PATH": os.environ["PATH"], "LANG": "C.UTF-8", "IS_SANDBOX": "1"}
        return own | proxies | loopback

    def interrupt(self, process: subprocess.Popen[str]) -> AgentResult:
        process.send_signal(signal.SIGINT)
        return _wait_for_end(process)

    def wait_for_request(self, wanted: int = 1) -> None:
        wait_until(lambda: self.server.status("demo").running >= wanted, "the agent sent a request", DEADLINE)

    def kill_engine(self, afterwards: list[dict[str, Any]]) -> None:
        """The engine dies during a reply; the next engine follows another script."""
        rules = [ScriptRule.model_validate(each) for each in afterwards]
        self._stack.enter_context(mock.patch.object(fake_engine, "Script", return_value=Script(rules)))
        engine: Any = self.server.app.scheduler.engine("demo")
        self.server.loop.call_soon_threadsafe(engine.die, Unavailable("segmentation fault"))


def record_requests(gateway: Gateway, requests: list[Request]) -> None:
    """Every request as the server has read it, in order of arrival."""
    prepare = gateway.prepare

    async def recording(request: Request, caller: Caller, *more: Any, **named: Any) -> PreparedRequest:
        requests.append(request)
        return await prepare(request, caller, *more, **named)

    gateway.prepare = recording  # type: ignore[method-assign]


def _wait_for_end(process: subprocess.Popen[str]) -> AgentResult:
    try:
        out, err = process.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"the agent did not end: {AgentResult(-9, out, err)}") from None
    return AgentResult(process.returncode, out, err)


def _config(script: list[dict[str, Any]], n_ctx: int, model: dict[str, Any]) -> dict[str, Any]:
    demo = {"backend": "fake", "token_delay": 0, "modalities": ["text", "image"], "script": script, **model}
    return {
        "models": {"demo": demo},
        "caches": {"main": {"model": "demo", "n_ctx": n_ctx, "parallel": 4}},
        "routes": [{"match": "*", "cache": "main"}],
    }


# --- parts of a request -----------------------------------------------------------------------------------------------


def parts_of_kind(request: Request, kind: type[Part]) -> list[Any]:
    return [part for message in request.messages for part in message.parts if isinstance(part, kind)]


def request_text(request: Request) -> str:
    return "\n".join(part.text for part in parts_of_kind(request, Text))


def reasoning_texts(request: Request) -> list[str]:
    return [part.text for part in parts_of_kind(request, Thinking)]


def called_tools(request: Request) -> list[str]:
    return [part.name for part in parts_of_kind(request, ToolCall)]


def tool_results(request: Request) -> str:
    found = (inner for part in parts_of_kind(request, ToolResult) for inner in part.content)
    return "\n".join(part.text for part in found if isinstance(part, Text))


def count_images(request: Request) -> int:
    inside = [inner for part in parts_of_kind(request, ToolResult) for inner in part.content]
    return sum(isinstance(part, Image) for part in [*parts_of_kind(request, Image), *inside])


# --- scripts ----------------------------------------------------------------------------------------------------------


def text_step(text: str) -> dict[str, str]:
    return {"text": text}


def call_step(name: str, **arguments: Any) -> dict[str, Any]:
    return {"call": {"name": name, "arguments": arguments}}


def rule(*steps: dict[str, Any], **conditions: Any) -> dict[str, Any]:
    return {**conditions, "steps": list(steps)}


# --- images -----------------------------------------------------------------------------------------------------------


def red_png(size: int = 16) -> bytes:
    """Red, `size` by `size`."""
    rows = b"".join(b"\x00" + b"\xff\x00\x00" * size for _ in range(size))
    head = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    chunks = _chunk(b"IHDR", head) + _chunk(b"IDAT", zlib.compress(rows)) + _chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
