"""Kills parts of a split server at random moments under load: `python -m bench.faults [--rounds 20] [--streams 32]`

Starts a scheduler, two gateways and a worker with the fake engine, keeps streams running, and in each round kills or
stops one part. Every client must get its whole response or a proper error within five seconds of the fault, and only
its own text; memory and open files must return to their level. The exit code is 1 otherwise.

The five seconds are a sum: a silent worker is detected after at most two, `timeout_ms` lets clients wait one and a half
for its replacement, and the rest is for the response. Clients of a server with the default 30 seconds get no error so
soon: they would rather wait for a model that takes long to load.

`--only ray-node` drops nodes of a Ray cluster on this machine instead, which needs a network namespace of its own:

    PYTHONPATH=.venv/ray unshare --map-root-user --net sh -c \\
        'ip link set lo up && .venv/bin/python -m bench.faults --only ray-node'
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.workers.ray_nodes import HEAD, ray_nodes

PORTS = (21_081, 21_082)
MAX_WAIT_S = 5.0  # after a fault, until every client has a response or an error
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
FAULTS = ("worker", "worker-stopped", "scheduler", "gateway-0")
MAX_GROWTH = 24 << 20  # bytes per process: the allocator's own; a leak of a round would come twenty times
_SETTLE_S = 20.0  # for files and processes of the last fault to go
_REPLACE_S = 60.0  # for a replacement to be ready


# --- the clients ------------------------------------------------------------------------------------------------------


class Outcomes:
    """What became of the requests: complete, error, refused (nothing listens), cut (the gateway died), and two that
    must not happen: MIXED (text of another request) and SILENT (neither text nor error)."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.faults: list[float] = []
        self.longest_wait_s = 0.0  # after a fault
        self.messages: Counter[str] = Counter()
        self.is_over = asyncio.Event()

    def unexpected(self, allowed: Sequence[str]) -> dict[str, int]:
        expected = ("complete", "error", *allowed)
        return {outcome: count for outcome, count in self.counts.items() if outcome not in expected}

    def add(self, outcome: str, began: float, ended: float, message: str = "") -> None:
        """The wait counts from the first fault during the request."""
        hit = [at for at in self.faults if began <= at <= ended]
        waited = ended - hit[0] if hit else 0.0
        self.longest_wait_s = max(self.longest_wait_s, waited)
        late = ", late" if waited > MAX_WAIT_S else ""
        self.counts[outcome + late] += 1
        if message:
            self.messages[f"{message[:160]}{late}"] += 1


async def run_client(number: int, outcomes: Outcomes) -> None:
    async with httpx.AsyncClient(timeout=httpx.Timeout(30, connect=5)) as http:
        turn = 0
        while not outcomes.is_over.is_set():
            turn += 1
            text = f"client {number} turn {turn}: " + " ".join(str(number * 1000 + i) for i in range(60))
            began = time.monotonic()
            outcome, message = await request(http, PORTS[turn % 2], text)
            outcomes.add(outcome, began, time.monotonic(), message)
            if outcome in ("refused", "error"):
                await asyncio.sleep(0.1)


async def request(http: httpx.AsyncClient, port: int, text: str) -> tuple[str, str]:
    """The outcome and a message. The fake engine echoes the text, so that a mix-up shows."""
    body = {"model": "x", "stream": True, "max_tokens": 2000, "messages": [{"role": "user", "content": text}]}
    received, done, error = "", False, ""
    try:
        async with http.stream("POST", f"http://127.0.0.1:{port}/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                return ("error", response.text) if "error" in response.text else ("SILENT", response.text)
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    event = json.loads(line[6:])
                    error = error or (line if "error" in event else "")
                    received += "".join(choice["delta"].get("content") or "" for choice in event.get("choices", []))
    except (httpx.ConnectError, httpx.ConnectTimeout):
        return "refused", ""
    except httpx.ReadTimeout:
        return "SILENT", received
    except httpx.HTTPError:
        return ("MIXED", received) if not text.startswith(received) else ("cut", "")
    if not text.startswith(received.strip()):
        return "MIXED", received
    if error:
        return "error", error
    return ("complete", "") if done and received.strip() == text else ("SILENT", received)


# --- the server -------------------------------------------------------------------------------------------------------


class SplitServer:
    """`extra` is added to the configuration; `replace_node` makes up for a lost node of the cluster."""

    def __init__(self, folder: Path, extra: str = "", replace_node: Callable[[], None] = lambda: None) -> None:
        self._folder, self.endpoint, self._replace_node = folder, f"ipc://{folder / 'scheduler'}", replace_node
        (folder / "c.toml").write_text(CONFIG + extra)
        self.parts: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        arguments = {
            "scheduler": ["scheduler", "--listen", self.endpoint],
            "gateway-0": ["serve", "--scheduler", self.endpoint, "--port", str(PORTS[0])],
            "gateway-1": ["serve", "--scheduler", self.endpoint, "--port", str(PORTS[1])],
        }[name]
        command = [sys.executable, "-m", "modelyard", *arguments, "--config", str(self._folder / "c.toml")]
        with (self._folder / f"{name}.log").open("ab") as log:
            self.parts[name] = subprocess.Popen(command, stdout=log, stderr=log)

    def worker_pid(self) -> int | None:
        for port in PORTS:
            try:
                model = httpx.get(f"http://127.0.0.1:{port}/v1/admin/models/demo", timeout=5).json()
                return int(model["replicas"]["items"][0]["pid"])
            except (httpx.HTTPError, KeyError, IndexError, TypeError, ValueError):
                continue
        return None

    def inject(self, fault: str, on_fault: Callable[[], None]) -> None:
        """`on_fault` is called at the moment of the fault. Returns when the replacement runs: one that still loads may
        be silent for as long as it likes."""
        if fault in self.parts:
            on_fault()
            self.parts[fault].kill()
            self.parts[fault].wait()
            self.start(fault)
        elif (pid := self.worker_pid()) is not None:
            hit = _node_processes(pid) if fault == "ray-node" else [psutil.Process(pid)]
            on_fault()
            for process in hit:
                process.send_signal(signal.SIGKILL if fault == "worker" else signal.SIGSTOP)
            deadline = time.monotonic() + _REPLACE_S
            while self.worker_pid() in (pid, None) and time.monotonic() < deadline:
                time.sleep(0.05)
            if fault == "ray-node":  # first the machine was silent, now it is gone
                for process in hit:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
                self._replace_node()

    def usage(self) -> dict[str, tuple[int, int]]:
        """Open files and private bytes of each part."""
        found = {}
        for name, part in self.parts.items():
            process = psutil.Process(part.pid)
            memory = process.memory_info()
            found[name] = (process.num_fds(), int(memory.rss - memory.shared))
        return found

    def stop(self) -> None:
        for part in self.parts.values():
            part.terminate()
        for part in self.parts.values():
            part.wait(30)


def _node_processes(pid: int) -> list[psutil.Process]:
    for parent in psutil.Process(pid).parents():
        if "raylet" in parent.name():
            return [parent, *parent.children(recursive=True)]
    raise SystemExit(f"{pid} is not on a node")


async def wait_until_ready() -> None:
    async with asyncio.timeout(_REPLACE_S), httpx.AsyncClient() as http:
        for port in PORTS:
            while True:
                try:
                    health = (await http.get(f"http://127.0.0.1:{port}/health")).json()
                    if health["scheduler_connected"] and health["status"] == "healthy":
                        break
                except httpx.HTTPError:
                    pass
                await asyncio.sleep(0.1)


# --- the run ----------------------------------------------------------------------------------------------------------


async def inject_under_load(server: SplitServer, fault: str, rounds: int, streams: int, rng: random.Random) -> Outcomes:
    outcomes = Outcomes()
    clients = [asyncio.create_task(run_client(number, outcomes)) for number in range(streams)]
    for _ in range(rounds):
        await asyncio.sleep(rng.uniform(0.5, 1.5))
        await asyncio.to_thread(server.inject, fault, lambda: outcomes.faults.append(time.monotonic()))
        await wait_until_ready()
    await asyncio.sleep(1.0)
    outcomes.is_over.set()
    await asyncio.gather(*clients)
    return outcomes


async def leaks(server: SplitServer, before: dict[str, tuple[int, int]]) -> dict[str, str]:
    """What has not returned to its level, of the parts that were not restarted."""
    deadline = time.monotonic() + _SETTLE_S
    while (found := _growth(before, server.usage())) and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.2)
    return found


def _growth(before: dict[str, tuple[int, int]], now: dict[str, tuple[int, int]]) -> dict[str, str]:
    found = {}
    for name in before:
        files, grown = now[name][0] - before[name][0], now[name][1] - before[name][1]
        if files > 0 or grown > MAX_GROWTH:
            found[name] = f"{files:+d} files, {grown / 2**20:+.0f} MB"
    return found


async def _idle_usage(server: SplitServer) -> dict[str, tuple[int, int]]:
    """The usage when no more files are closed."""
    usage = server.usage()
    while True:
        await asyncio.sleep(2.0)
        now = server.usage()
        if all(now[name][0] >= files for name, (files, _) in usage.items()):
            return now
        usage = now


async def run(server: SplitServer, faults: tuple[str, ...], rounds: int, streams: int) -> bool:
    """Whether everything held."""
    await wait_until_ready()
    rng, good = random.Random(1), True
    for fault in faults:
        await inject_under_load(server, fault, 2, streams, rng)  # warm-up: what is allocated once is allocated now
        before = {name: usage for name, usage in (await _idle_usage(server)).items() if name != fault}
        outcomes = await inject_under_load(server, fault, rounds, streams, rng)
        bad = outcomes.unexpected(("cut", "refused") if fault == "gateway-0" else ())
        grown = await leaks(server, before)
        good = good and not bad and not grown
        longest = f"{outcomes.longest_wait_s:.1f} s"
        print(f"{fault:16} {rounds} times: {dict(outcomes.counts)}, the longest wait {longest}", flush=True)
        for message, count in outcomes.messages.most_common(4):
            print(f"{'':16} {count} × {message}", flush=True)
        after = {name: f"{files} files, {size >> 20} MB" for name, (files, size) in server.usage().items()}
        print(f"{'':16} after: {after}" + (f"  BAD {bad or ''} {grown or ''}" if bad or grown else ""), flush=True)
    return good


def run_faults(folder: Path, options: argparse.Namespace, faults: tuple[str, ...], *extra: Any) -> bool:
    server = SplitServer(folder, *extra)
    try:
        for name in ("scheduler", "gateway-0", "gateway-1"):
            server.start(name)
        return asyncio.run(run(server, faults, options.rounds, options.streams))
    finally:
        server.stop()
        for log in folder.glob("*.log"):
            if "Traceback" in (text := log.read_text()):
                print(log.name, text[text.index("Traceback") :][:3000])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--only", choices=[*FAULTS, "ray-node"], help="this fault alone")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="my-faults-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        os.environ["MODELYARD_CACHE"] = name  # do not use measurements of other runs
        if options.only == "ray-node":
            return 0 if run_faults(folder, options, ("ray-node",), RAY, stack.enter_context(ray_nodes()).add) else 1
        return 0 if run_faults(folder, options, (options.only,) if options.only else FAULTS) else 1


if __name__ == "__main__":
    sys.exit(main())
