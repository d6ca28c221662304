"""The servers of a run, all at once on one machine: for a GGUF file llama-server and ours, for a folder vLLM and ours.

The llama-server is that of the library which our engine loads, if its folder has one: then both have the same kernels.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from msgspec import Struct

from modelyard.core.errors import NotFound, Unavailable
from modelyard.library.llama_cpp_package import library_folder
from modelyard.library.llama_server import PROGRAM, binary_path
from modelyard.plugins import MissingLibrary
from modelyard.processes.child_process import ChildProcess, describe_exit
from modelyard_bench.http_client import HttpClient
from modelyard_bench.targets import running_server
from modelyard_vllm import env as vllm_env

OURS, LLAMA_SERVER, VLLM = "Modelyard", PROGRAM, "vLLM"
MODEL = "bench"
_START_S, _POLL_S, _LOG_LINES = 600.0, 0.1, 12

Say = Callable[[str], None]


class Server(Struct, frozen=True):
    """`few` is ours with few slots, beside which few of many are measured."""

    name: str
    url: str
    model: str
    peer: str | None = None  # ours: beside which it is measured
    few: bool = False


async def open_servers(
    stack: AsyncExitStack, models: Sequence[Path], slots: int, window: int, say: Say
) -> list[list[Server]]:
    """A group for each model: its peer, ours, and ours with few slots. All start at once."""
    plans = [_gguf_servers(model, slots, window) if model.is_file() else _folder_servers(model, window, slots)
             for model in map(_existing, models)]  # fmt: skip
    flat = [plan for group in plans for plan in group]
    opened = await asyncio.gather(*(stack.enter_async_context(plan) for plan in flat))
    found = iter(opened)
    groups = [[next(found) for _ in group] for group in plans]
    say("ready: " + ", ".join(server.name for server in opened))
    return groups


def _existing(model: Path) -> Path:
    if not model.exists():
        raise NotFound(f"there is no {model}: --gpu takes a GGUF file, or a Hugging Face folder for vLLM")
    return model


def _gguf_servers(file: Path, slots: int, window: int) -> list[Any]:
    engine = {"backend": "llama_cpp", "path": str(file.resolve()), "speculation": "off", "kv_store": False}
    ours, few = (_ours(name, engine, LLAMA_SERVER, count, window) for name, count in ((OURS, slots), ("8 slots", 8)))
    return [_llama_server(file, slots, window), ours, *([few] if slots > 8 else [])]


def _folder_servers(folder: Path, window: int, slots: int) -> list[Any]:
    backend = "vllm" if find_spec("vllm") is not None else "vllm_serve"
    engine: dict[str, Any] = {"backend": backend, "path": str(folder.resolve())}
    return [_vllm(folder, slots, window), _ours(f"{OURS} on vLLM", engine, VLLM, slots, window)]


@asynccontextmanager
async def _ours(name: str, engine: Mapping[str, Any], peer: str, slots: int, window: int) -> AsyncIterator[Server]:
    config = {
        "models": {MODEL: engine},
        "caches": {"main": {"model": MODEL, "n_ctx": window, "parallel": slots}},
        "routes": [{"match": "*", "cache": "main"}],
    }
    with tempfile.TemporaryDirectory(prefix="modelyard-bench-") as folder:
        file = Path(folder) / "modelyard.json"
        file.write_text(json.dumps(config))
        async with running_server(file, MODEL, None, lambda _: None) as url:
            yield Server(name, url, MODEL, peer, few=name != OURS and peer == LLAMA_SERVER)


@asynccontextmanager
async def _llama_server(file: Path, slots: int, window: int) -> AsyncIterator[Server]:
    program, port = find_llama_server(), _free_port()
    command = [str(program), "--model", str(file), "--host", "127.0.0.1", "--port", str(port), "--n-gpu-layers", "99"]
    command += ["--ctx-size", str(window * slots), "--parallel", str(slots)]
    path = os.pathsep.join(filter(None, (str(program.parent), os.environ.get("LD_LIBRARY_PATH"))))
    async with _running(command, port, {**os.environ, "LD_LIBRARY_PATH": path}) as url:
        yield Server(LLAMA_SERVER, url, MODEL)


@asynccontextmanager
async def _vllm(folder: Path, slots: int, window: int) -> AsyncIterator[Server]:
    program, port = find_vllm(), _free_port()
    command = [str(program), "serve", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--max-model-len", str(window), "--max-num-seqs", str(slots), "--served-model-name", MODEL]
    async with _running(command, port, os.environ) as url:
        yield Server(VLLM, url, MODEL)


def find_llama_server() -> Path:
    try:
        beside = library_folder() / PROGRAM
    except MissingLibrary:
        beside = Path(PROGRAM)
    found = next((path for path in (beside, binary_path()) if path.is_file()), None) or shutil.which(PROGRAM)
    if found is None:
        raise NotFound(
            f"there is no {PROGRAM} beside the library in use, in the cache folder or on the PATH: docs/gpu.md"
        )
    return Path(found)


def find_vllm() -> Path:
    beside = Path(sys.executable).with_name("vllm")
    found = next((path for path in (beside, vllm_env.program()) if path.is_file()), None) or shutil.which("vllm")
    if found is None:
        raise NotFound("there is no vllm in this environment, in the cache folder or on the PATH: docs/engines.md")
    return Path(found)


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


@asynccontextmanager
async def _running(command: Sequence[str], port: int, env: Mapping[str, str]) -> AsyncIterator[str]:
    """The URL of a server that answers at /health, until the block ends."""
    url = f"http://127.0.0.1:{port}"
    child = await ChildProcess.start(command, env)
    client = HttpClient(url)
    try:
        async with asyncio.timeout(_START_S):
            while (await client.send("GET", "/health", b"", 10.0)).status != 200:
                await asyncio.wait({child.ended}, timeout=_POLL_S)
                if child.ended.done():
                    words = child.log.tail(_LOG_LINES)
                    raise Unavailable(f"{Path(command[0]).name} {describe_exit(child.ended.result())}: {words}")
        yield url
    finally:
        await client.aclose()
        await child.stop()
