"""Parts of a split server killed at random moments under load: `python -m bench.faults [--rounds 20] [--streams 32]`

Starts a scheduler, two gateways and a worker with the fake engine, keeps streams running, and in each round kills or
stops one part. Every client must get its whole answer or a proper error within five seconds of the fault, and only its
own words; memory and open files come back. Exit code 1 where that does not hold.

The five seconds are a sum: a silent worker is missed after at most two, `timeout_ms` lets clients wait one and a
half for its successor, and the rest is for the answer. Clients of a server with the usual 30 seconds are told nothing
so soon: they would rather wait for a model that takes long to load.

`--only ray-node` drops nodes of a Ray cluster on this machine instead, which wants a network of its own:

    PYTHONPATH=.venv/ray unshare --map-root-user --net sh -c \\
        'ip link set lo up && .venv/bin/python -m bench.faults --only ray-node'
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench.fates import PORTS, Fates, client
from tests.workers.nodes import HEAD, nodes

CONFIG = """
[scheduler]
timeout_ms = 1500
[log]
history_requests = 100
history_texts = false
[models.demo]
backend = "fake"
echo = true
token_delay = 0.004
[caches.main]
model = "demo"
n_ctx = 4096
parallel = 64
[[routes]]
match = "*"
cache = "main"
"""
RAY = f"""
[workers]
cluster = "ray"
ray_address = "{HEAD}"
"""
PLAIN = ("worker", "worker-stopped", "scheduler", "gateway-0")
MOST_GROWTH = 24 << 20  # bytes of one process: an allocator's own; what a round leaves behind comes twenty times
_SETTLE_S = 20.0  # for files and processes of the last fault to go
_NEXT_S = 60.0  # for a successor to be there


class Stage:
    """`more` is added to the configuration; `replace` makes good what a fault took from the cluster."""

    def __init__(self, folder: Path, more: str = "", replace: Callable[[], None] = lambda: None) -> None:
        self._folder, self.endpoint, self._replace = folder, f"ipc://{folder / 'scheduler'}", replace
        (folder / "c.toml").write_text(CONFIG + more)
        self.parts: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        words = {
            "scheduler": ["scheduler", "--listen", self.endpoint],
            "gateway-0": ["serve", "--scheduler", self.endpoint, "--port", str(PORTS[0])],
            "gateway-1": ["serve", "--scheduler", self.endpoint, "--port", str(PORTS[1])],
        }[name]
        argv = [sys.executable, "-m", "modelyard", *words, "--config", str(self._folder / "c.toml")]
        with (self._folder / f"{name}.log").open("ab") as log:
            self.parts[name] = subprocess.Popen(argv, stdout=log, stderr=log)

    def worker(self) -> int | None:
        for port in PORTS:
            try:
                model = httpx.get(f"http://127.0.0.1:{port}/v1/admin/models/demo", timeout=5).json()
                return int(model["replicas"]["items"][0]["pid"])
            except (httpx.HTTPError, KeyError, IndexError, TypeError, ValueError):
                continue
        return None

    def break_(self, what: str, told: Callable[[], None]) -> None:
        """`told` is called in the moment. Done when the successor is there: one that still loads may be silent for as
        long as it likes."""
        if what in self.parts:
            told()
            self.parts[what].kill()
            self.parts[what].wait()
            self.start(what)
        elif (pid := self.worker()) is not None:
            hit = _node_of(pid) if what == "ray-node" else [psutil.Process(pid)]
            told()
            for each in hit:
                each.send_signal(signal.SIGKILL if what == "worker" else signal.SIGSTOP)
            self._succeeded(pid)
            if what == "ray-node":  # a machine that is gone: first it was only silent
                for each in hit:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.kill()
                self._replace()

    def _succeeded(self, pid: int) -> None:
        deadline = time.monotonic() + _NEXT_S
        while self.worker() in (pid, None) and time.monotonic() < deadline:
            time.sleep(0.05)

    def held(self) -> dict[str, tuple[int, int]]:
        """Open files and bytes of each part that is ours."""
        seen = {name: psutil.Process(part.pid) for name, part in self.parts.items()}
        return {name: (each.num_fds(), _own(each)) for name, each in seen.items()}

    def stop(self) -> None:
        for part in self.parts.values():
            part.terminate()
        for part in self.parts.values():
            part.wait(30)


def _own(process: psutil.Process) -> int:
    memory = process.memory_info()
    return int(memory.rss - memory.shared)


def _node_of(pid: int) -> list[psutil.Process]:
    for parent in psutil.Process(pid).parents():
        if "raylet" in parent.name():
            return [parent, *parent.children(recursive=True)]
    raise SystemExit(f"{pid} is not on a node")


async def until_ready() -> None:
    async with asyncio.timeout(_NEXT_S), httpx.AsyncClient() as http:
        for port in PORTS:
            while True:
                try:
                    health = (await http.get(f"http://127.0.0.1:{port}/health")).json()
                    if health["scheduler_connected"] and health["status"] == "healthy":
                        break
                except httpx.HTTPError:
                    pass
                await asyncio.sleep(0.1)


async def spell(stage: Stage, what: str, rounds: int, streams: int, chance: random.Random) -> Fates:
    """So many rounds of one fault under load."""
    fates = Fates()
    clients = [asyncio.create_task(client(i, fates)) for i in range(streams)]
    for _ in range(rounds):
        await asyncio.sleep(chance.uniform(0.5, 1.5))
        await asyncio.to_thread(stage.break_, what, lambda: fates.faults.append(time.monotonic()))
        await until_ready()
    await asyncio.sleep(1.0)
    fates.over.set()
    await asyncio.gather(*clients)
    return fates


async def settled(stage: Stage, before: dict[str, tuple[int, int]]) -> dict[str, str]:
    """What has not come back, of the parts that were there all the time."""
    deadline = time.monotonic() + _SETTLE_S
    while (left := _left(before, stage.held())) and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.2)
    return left


def _left(before: dict[str, tuple[int, int]], now: dict[str, tuple[int, int]]) -> dict[str, str]:
    left = {}
    for name in before:
        files, grown = now[name][0] - before[name][0], now[name][1] - before[name][1]
        if files > 0 or grown > MOST_GROWTH:
            left[name] = f"{files:+d} files, {grown / 2**20:+.0f} MB"
    return left


async def run(stage: Stage, faults: tuple[str, ...], rounds: int, streams: int) -> bool:
    await until_ready()
    chance, good = random.Random(1), True
    for what in faults:
        await spell(stage, what, 2, streams, chance)  # what is made once is made now
        idle = stage.held()
        before = {name: each for name, each in (await _idle(stage, idle)).items() if name != what}
        fates = await spell(stage, what, rounds, streams, chance)
        bad = fates.bad(("cut", "refused") if what == "gateway-0" else ())
        left = await settled(stage, before)
        good = good and not bad and not left
        print(f"{what:16} {rounds} times: {dict(fates.counts)}, the longest wait {fates.worst:.1f} s", flush=True)
        for words, count in fates.words.most_common(4):
            print(f"{'':16} {count} × {words}", flush=True)
        grown = {name: f"{stage.held()[name][0]} files, {stage.held()[name][1] >> 20} MB" for name in before}
        print(f"{'':16} after: {grown}" + (f"  BAD {bad or ''} {left or ''}" if bad or left else ""), flush=True)
    return good


async def _idle(stage: Stage, held: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """What it holds when nothing more is let go."""
    while True:
        await asyncio.sleep(2.0)
        now = stage.held()
        if all(now[name][0] >= files for name, (files, _) in held.items()):
            return now
        held = now


def complaints(folder: Path) -> None:
    for log in folder.glob("*.log"):
        if "Traceback" in (text := log.read_text()):
            print(log.name, text[text.index("Traceback") :][:3000])


def staged(folder: Path, options: Any, faults: tuple[str, ...], *more: Any) -> bool:
    stage = Stage(folder, *more)
    try:
        for name in ("scheduler", "gateway-0", "gateway-1"):
            stage.start(name)
        return asyncio.run(run(stage, faults, options.rounds, options.streams))
    finally:
        stage.stop()
        complaints(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--only", choices=[*PLAIN, "ray-node"], help="this fault alone")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="my-faults-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        os.environ["MODELYARD_CACHE"] = name  # what was measured elsewhere is not ours
        if options.only == "ray-node":
            return 0 if staged(folder, options, ("ray-node",), RAY, stack.enter_context(nodes()).add) else 1
        return 0 if staged(folder, options, (options.only,) if options.only else PLAIN) else 1


if __name__ == "__main__":
    sys.exit(main())
