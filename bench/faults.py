"""Parts of a split server killed at random moments under load: `python bench/faults.py [--rounds 20] [--streams 32]`

Starts a scheduler, two gateways and a worker with the fake engine, keeps streams running, and in each round kills or
stops one part. Every client must get its whole answer or a proper error, in time, and only its own words; nothing may
be left behind. Exit code 1 where that does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil

CONFIG = """
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
PORTS = (21_081, 21_082)
LONGEST_S = 5.0  # after a fault, for everybody to have an answer or an error


class Stage:
    def __init__(self, folder: Path) -> None:
        self._folder, self.endpoint = folder, f"ipc://{folder / 'scheduler'}"
        (folder / "c.toml").write_text(CONFIG)
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

    def break_(self, what: str) -> None:
        """Done when its successor is there: one that still loads may be silent for as long as it likes."""
        if what in self.parts:
            self.parts[what].kill()
            self.parts[what].wait()
            self.start(what)
        elif (pid := self.worker()) is not None:
            os.kill(pid, signal.SIGKILL if what == "worker" else signal.SIGSTOP)
            deadline = time.monotonic() + 60
            while self.worker() in (pid, None) and time.monotonic() < deadline:
                time.sleep(0.05)

    def stop(self) -> None:
        for part in self.parts.values():
            part.terminate()
        for part in self.parts.values():
            part.wait(30)


async def client(number: int, fates: Counter[str], broken: list[tuple[float, str]], over: asyncio.Event) -> None:
    async with httpx.AsyncClient(timeout=httpx.Timeout(30, connect=5)) as http:
        turn = 0
        while not over.is_set():
            turn += 1
            text = f"client {number} turn {turn}: " + " ".join(str(number * 1000 + i) for i in range(60))
            began = time.monotonic()
            fate = await one(http, PORTS[turn % 2], text)
            faults = [at for at, _ in broken if began <= at]
            late = faults and time.monotonic() - max(faults[0], began) > LONGEST_S + 2.0
            fates[f"{fate}, late" if late else fate] += 1
            if fate == "refused":
                await asyncio.sleep(0.1)


async def one(http: httpx.AsyncClient, port: int, text: str) -> str:
    """whole · error (in words) · refused (nobody listens) · cut (the gateway died) · MIXED · SILENT"""
    body = {"model": "x", "stream": True, "max_tokens": 2000, "messages": [{"role": "user", "content": text}]}
    said, done, error = "", False, False
    try:
        async with http.stream("POST", f"http://127.0.0.1:{port}/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                return "error" if "error" in answer.text else "SILENT"
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    frame = json.loads(line[6:])
                    error = error or "error" in frame
                    said += "".join(choice["delta"].get("content") or "" for choice in frame.get("choices", []))
    except (httpx.ConnectError, httpx.ConnectTimeout):
        return "refused"
    except httpx.HTTPError:
        return "MIXED" if not text.startswith(said) else "cut"
    if not text.startswith(said.strip()):
        return "MIXED"
    if error:
        return "error"
    return "whole" if done and said.strip() == text else "SILENT"


async def until_ready() -> None:
    async with asyncio.timeout(60), httpx.AsyncClient() as http:
        for port in PORTS:
            while True:
                try:
                    health = (await http.get(f"http://127.0.0.1:{port}/health")).json()
                    if health["scheduler_connected"] and health["status"] == "healthy":
                        break
                except httpx.HTTPError:
                    pass
                await asyncio.sleep(0.1)


async def run(stage: Stage, rounds: int, streams: int) -> bool:
    await until_ready()
    chance = random.Random(1)
    good = True
    for what in ("worker", "worker-stopped", "scheduler", "gateway-0"):
        fates: Counter[str] = Counter()
        broken: list[tuple[float, str]] = []
        over = asyncio.Event()
        clients = [asyncio.create_task(client(i, fates, broken, over)) for i in range(streams)]
        for _ in range(rounds):
            await asyncio.sleep(chance.uniform(0.5, 1.5))
            broken.append((time.monotonic(), what))
            await asyncio.to_thread(stage.break_, what)
            await until_ready()
        over.set()
        await asyncio.gather(*clients)
        bad = {fate: count for fate, count in fates.items() if fate.isupper() or "late" in fate}
        if what != "gateway-0":
            bad |= {fate: fates[fate] for fate in ("cut", "refused") if fates[fate]}
        good = good and not bad
        print(f"{what:16} {rounds} times: {dict(fates)}{'  BAD' if bad else ''}", flush=True)
    return good


def kin(stage: Stage) -> dict[str, Any]:
    told = {}
    for name, part in stage.parts.items():
        process = psutil.Process(part.pid)
        told[name] = (process.num_fds(), process.memory_info().rss >> 20)
    return told


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--streams", type=int, default=32)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="my-faults-") as folder:
        stage = Stage(Path(folder))
        for name in ("scheduler", "gateway-0", "gateway-1"):
            stage.start(name)
        try:
            good = asyncio.run(run(stage, chosen.rounds, chosen.streams))
            print("files open, MB:", kin(stage))
        finally:
            stage.stop()
        for log in Path(folder).glob("*.log"):
            if "Traceback" in log.read_text():
                print(log.name, log.read_text()[-3000:])
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
