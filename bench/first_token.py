"""From a fresh clone with empty caches to the first token, split into its parts.

    python -m bench.first_token [--compiled] [--no-npm] [--keep] [--json FILE]

Clones the last commit into a temporary folder, runs `make serve` with an empty home and cache folder, and asks for one
token as soon as the server listens. The parts are read from the times of the files that each part leaves. With
`--compiled` llama.cpp is compiled before the server starts, as every first start did before there were prebuilt
libraries. With `--no-npm` the machine's own npm is hidden. The sizes are those of `du`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
from msgspec import Struct

from bench.report import console, machine

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S, TARGET_S, TARGET_MB = 1800.0, 90.0, 286
_BODY = {"model": "smollm2", "max_tokens": 1, "messages": [{"role": "user", "content": "Hello"}]}


class FirstToken(Struct, frozen=True):
    """Seconds of each part in the order in which they ended, and sizes in MiB."""

    parts: dict[str, float]
    total: float
    environment_mb: int
    cache_mb: int


def measure(folder: Path, *, compiled: bool, no_npm: bool) -> FirstToken:
    clone, home = folder / "clone", folder / "home"
    home.mkdir()
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", f"file://{ROOT}", str(clone)], check=True)
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    env = environment(folder, home, port, no_npm=no_npm)
    began = time.time()
    if compiled:
        subprocess.run(["make", ".venv/.installed"], cwd=clone, env=env, check=True)
        subprocess.run([".venv/bin/modelyard", "setup", "--build"], cwd=clone, env=env, check=True)
    with running(["make", "serve"], clone, env) as process:
        listens, first = wait_for_token(process, f"http://127.0.0.1:{port}", began + LIMIT_S)
    marks = {**file_marks(clone, home / ".cache" / "modelyard", compiled=compiled), "server listens": listens}
    parts, last = {}, began
    for name, at in sorted({**marks, "first token": first}.items(), key=lambda mark: mark[1]):
        parts[name], last = at - last, at
    return FirstToken(parts, first - began, megabytes(clone / ".venv"), megabytes(home))


def environment(folder: Path, home: Path, port: int, *, no_npm: bool) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MODELYARD_", "XDG_", "LLAMA_", "VIRTUAL_ENV"))}
    path = kept.get("PATH", "")
    if no_npm:
        path = str(programs_without_npm(folder / "bin", path))
    return {**kept, "HOME": str(home), "PATH": path, "MODELYARD_HTTP_PORT": str(port)}


def programs_without_npm(folder: Path, path: str) -> Path:
    folder.mkdir()
    for place in path.split(os.pathsep):
        for program in Path(place).glob("*"):
            link = folder / program.name
            if program.name not in ("npm", "npx") and not link.is_symlink():
                link.symlink_to(program)
    return folder


@contextmanager
def running(command: list[str], folder: Path, env: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, cwd=folder, env=env, start_new_session=True)
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


def wait_for_token(process: subprocess.Popen[bytes], url: str, deadline: float) -> tuple[float, float]:
    """When the server listened, and when the first token came."""
    with httpx.Client(timeout=60, trust_env=False) as client:
        while time.time() < deadline and process.poll() is None:
            try:
                client.get(f"{url}/health")
            except httpx.TransportError:
                time.sleep(0.05)
                continue
            listens = time.time()
            reply = client.post(f"{url}/v1/chat/completions", json=_BODY)
            reply.raise_for_status()
            if not reply.json()["choices"][0]["message"]["content"]:
                sys.exit("the reply has no text")
            return listens, time.time()
    sys.exit("the server did not start")


def file_marks(clone: Path, cache: Path, *, compiled: bool) -> dict[str, float]:
    """When each part ended, by the file that it leaves."""
    chosen = json.loads((cache / "llama_cpp" / "library.json").read_text())["folder"]
    files = {
        "virtual environment": clone / ".venv" / "pyvenv.cfg",
        "Python packages": clone / ".venv" / ".installed",
        "llama.cpp compiled" if compiled else "llama.cpp fetched": cache / "llama_cpp" / chosen,
        "self-test": cache / "llama_cpp" / "library.json",
        "model": cache / "models" / "smollm2",
    }
    return {name: file.stat().st_mtime for name, file in files.items()}


def megabytes(folder: Path) -> int:
    done = subprocess.run(["du", "-sm", str(folder)], stdout=subprocess.PIPE, text=True, check=True)
    return int(done.stdout.split()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiled", action="store_true", help="compile llama.cpp first")
    parser.add_argument("--no-npm", action="store_true", help="hide this machine's npm")
    parser.add_argument("--keep", action="store_true", help="keep the folder and print its path")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="modelyard-first-token-"))
    try:
        found = measure(folder, compiled=options.compiled, no_npm=options.no_npm)
    finally:
        if options.keep:
            print(folder)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    out = console()
    for name, seconds in found.parts.items():
        out.print(f"{name:<22} {seconds:6.1f} s")
    out.print(f"{'total':<22} {found.total:6.1f} s  (target {TARGET_S:.0f})")
    out.print(f"environment {found.environment_mb} MiB (target {TARGET_MB}), home with caches {found.cache_mb} MiB")
    out.print(f"{machine()}, load {os.getloadavg()[0]:.1f}")
    if options.json:
        options.json.write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
