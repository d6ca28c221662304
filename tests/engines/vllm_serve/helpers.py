"""Helpers for tests of the vllm serve engine: fake `vllm` programs, and small windows."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from modelyard.core.engine import CacheInfo, EngineSpec
from modelyard.core.events import Event
from modelyard.core.request import Message, Request, Sampling, Text
from modelyard.library.default_model import fetch
from modelyard_vllm import serve as vllm_serve
from modelyard_vllm.serve.engine import VllmServeEngine
from tests.engines.llama_server.helpers import program as llama_server
from tests.engines.llama_server.helpers import read_rest

_BINS = tempfile.TemporaryDirectory(prefix="modelyard-test-vllm-")


def _script(name: str, text: str) -> str:
    file = Path(_BINS.name) / name
    file.write_text(text)
    file.chmod(0o755)
    return str(file)


@cache
def fake_vllm() -> str:
    """The program `vllm`, which only echoes."""
    script = Path(__file__).with_name("fake_vllm.py")
    return _script("vllm", f'#!/bin/sh\nexec {shlex.join([sys.executable, "-I", str(script)])} "$@"\n')


@cache
def over_llama_server() -> str:
    """A program with the command line of `vllm serve` that runs a real llama-server."""
    flags = {"--uds": "--host", "--host": "--host", "--port": "--port", "--max-num-seqs": "--parallel"}
    text = f"""#!{sys.executable}
import os, sys
argv = sys.argv[1:]
def value(flag): return argv[argv.index(flag) + 1] if flag in argv else None
assert argv[0] == "serve", argv
line = [{llama_server()!r}, "--model", argv[1], "--jinja", "--threads", "1", "--alias", value("--served-model-name")]
line += ["--ctx-size", str(int(value("--max-model-len")) * int(value("--max-num-seqs")))]
for flag, other in {flags!r}.items():
    if flag in argv:
        line += [other, value(flag)]
if key := os.environ.pop("VLLM_API_KEY", None):
    os.environ["LLAMA_API_KEY"] = key
os.execv(line[0], line)
"""
    return _script("vllm-over-llama-server", text)


def options(**chosen: Any) -> vllm_serve.Options:
    base = {"vllm_model": "tests/echo", "vllm_serve_binary": fake_vllm(), "vllm_serve_tool_parser": "hermes"}
    return vllm_serve.Options(**base | chosen)


def behaviour(name: str, notes: Path | None = None) -> dict[str, str]:
    """The environment that makes the fake vllm behave in this way."""
    return {"FAKE_VLLM": name} | ({"FAKE_VLLM_NOTES": str(notes)} if notes is not None else {})


def recorded(notes: Path, what: str) -> list[Any]:
    lines = [json.loads(line) for line in notes.read_text().splitlines()]
    return [line[what] for line in lines if what in line]


def wait_exited(processes: Sequence[psutil.Process]) -> None:
    """Zombies count as exited: in a container it may take init seconds to reap them."""

    def is_alive(process: psutil.Process) -> bool:
        with suppress(psutil.NoSuchProcess):
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        return False

    while alive := [process for process in processes if is_alive(process)]:
        psutil.wait_procs(alive, 0.05)


def real_model() -> dict[str, Any]:
    """Fields for a real model: llama-server behind vLLM's command line."""
    return {"vllm_model": str(fetch()), "vllm_serve_binary": over_llama_server()}


def engine(caches: Mapping[str, CacheInfo] | None = None, **chosen: Any) -> VllmServeEngine:
    made = vllm_serve.create(EngineSpec("echo", options(**chosen), caches or {"main": CacheInfo(512, 2)}))
    assert isinstance(made, VllmServeEngine)
    return made


@asynccontextmanager
async def running_engine(
    caches: Mapping[str, CacheInfo] | None = None, **chosen: Any
) -> AsyncIterator[VllmServeEngine]:
    made = engine(caches, **chosen)
    try:
        await made.open(lambda *_: None)
        yield made
    finally:
        await made.close()


def chat_request(text: str = "Say hello.", **fields: Any) -> Request:
    chosen: dict[str, Any] = {"max_tokens": 8, "sampling": Sampling(temperature=0)}
    return Request(model="echo", messages=(Message("user", (Text(text),)),), **chosen | fields)


async def read_events(engine_: VllmServeEngine, request: Request) -> list[Event]:
    return await read_rest(engine_.chat(request))
