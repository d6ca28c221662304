"""Breaks parts of a split server at random moments under load and measures what clients see:

    python -m bench.faults [--engine llama_cpp] [--rounds 20] [--streams 32] [--only FAULT …] [--model FILE]

Starts a scheduler, two gateways and a worker, keeps streams of Chat Completions and Responses running, and in each
round breaks one part (`FAULTS`). Every client must get its whole response or a proper error within `max_wait_s` of the
fault, and only its own text; memory and open files must return to their level, and no event loop of a part that was not
broken may work for more than 250 ms at a time. The exit code is 1 otherwise. A table with recovery times is printed at
the end: from the fault, or from the end of a pause, until a new short request gets text from each gateway; two clients
beside the streams send such requests all the time.

A mix-up shows because every answer is known: the fake engine echoes the request, and a real engine must follow a JSON
schema that allows only one text. With the fake engine an answer takes no time, so its five seconds are a sum: a silent
worker is detected after at most two, `timeout_ms` lets clients wait one and a half for its replacement, and the rest is
for the response. Clients of a server with the default 30 seconds get no error so soon: they would rather wait for a
model that takes long to load.

The store, the debug files and the cache folder are on a small disk of their own, a tmpfs in a mount namespace. `--only
engine engine-stopped` breaks the engine's process of one of two gateways without a scheduler (`placement = "process"`).
`--only ray-node` drops nodes of a Ray cluster on this machine instead, which needs a network namespace too:

    PYTHONPATH=.venv/ray unshare --map-root-user --net sh -c \\
        'ip link set lo up && .venv/bin/python -m bench.faults --engine fake --only ray-node'
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
from msgspec import Struct

from modelyard.library import default_model
from modelyard.library.cache_dir import cache_dir
from modelyard.processes.parent_death import die_with_parent
from setup.llama_server import fetch_binary
from tests.loop_watch import longest_stall, watched_command
from tests.workers.ray_nodes import HEAD, ray_nodes

PORTS = (21_081, 21_082)
CONFIG = """
[scheduler]
timeout_ms = 1500
[log]
history_requests = 100
history_texts = false
debug_dir = "{disk}/debug"
debug_max_requests = 50
[store]
backend = "sqlite"
path = "{disk}/store.sqlite"
max_bytes = 4000000
[models.demo]
{model}
[caches.main]
model = "demo"
n_ctx = {window}
parallel = {streams}
[[routes]]
match = "*"
cache = "main"
"""
RAY = f"""
[workers]
cluster = "ray"
ray_address = "{HEAD}"
"""
MAX_GROWTH = 24 << 20  # bytes per process: the allocator's own; a leak of a round would come twenty times
DISK_VARIABLE = "FAULTS_DISK"
_DISK_SIZE = "24m"
_SETTLE_S = 20.0  # for files and processes of the last fault to go
_REPLACE_S = 120.0  # for a replacement to be ready, on busy cores


class EngineUnderTest(Struct, frozen=True):
    """`words` are the length of an answer, `max_wait_s` the time for it on two slow cores."""

    model: str
    words: int
    window: int
    max_wait_s: float
    is_real: bool = True


ENGINES = {
    "fake": EngineUnderTest('backend = "fake"\necho = true\ntoken_delay = 0.004', 60, 4096, 5.0, is_real=False),
    "llama_cpp": EngineUnderTest('backend = "llama_cpp"\npath = "{path}"\nn_threads = 1', 2, 384, 90.0),
    "llama_server": EngineUnderTest(
        'backend = "llama_server"\npath = "{path}"\nllama_server_binary = "{binary}"\nllama_server_n_threads = 1',
        2,
        384,
        90.0,
    ),
}


class Fault(Struct, frozen=True):
    """`part` gets the signal; with `pause_s` it continues after that time, otherwise it is replaced. `fills_disk`: the
    disk is full for `pause_s` seconds. `allowed` are the outcomes of clients whose gateway was hit."""

    part: str
    signal: int = signal.SIGKILL
    pause_s: float = 0.0
    fills_disk: bool = False
    allowed: tuple[str, ...] = ()
    engines: tuple[str, ...] = tuple(ENGINES)


FAULTS = {
    "worker": Fault("worker"),
    "worker-stopped": Fault("worker", signal.SIGSTOP),
    "scheduler": Fault("scheduler"),
    "scheduler-stopped": Fault("scheduler", signal.SIGSTOP, 12.0),
    "gateway-0": Fault("gateway-0", allowed=("cut", "refused")),
    "gateway-stopped": Fault("gateway-0", signal.SIGSTOP, 12.0, allowed=("complete, late", "error, late")),
    "server": Fault("server", engines=("llama_server",)),
    "server-stopped": Fault("server", signal.SIGSTOP, 12.0, engines=("llama_server",)),
    "disk-full": Fault("", pause_s=4.0, fills_disk=True),
    "disk-full-worker": Fault("worker", pause_s=4.0, fills_disk=True),
}
RAY_NODE = {"ray-node": Fault("node", signal.SIGSTOP)}
ENGINE_PROCESS = {"engine": Fault("worker"), "engine-stopped": Fault("worker", signal.SIGSTOP)}


# --- the clients ------------------------------------------------------------------------------------------------------


class Outcomes:
    """What became of the requests: complete, error, refused (nothing listens), cut (the gateway died), and two that
    must not happen: MIXED (text of another request) and SILENT (neither text nor error)."""

    def __init__(self, max_wait_s: float) -> None:
        self.counts: Counter[str] = Counter()
        self.faults: list[float] = []
        self.healed: list[float] = []  # from when on a recovery counts
        self.longest_wait_s = 0.0  # after a fault
        self.messages: Counter[str] = Counter()
        self.is_over = asyncio.Event()
        self._max_wait_s = max_wait_s
        # By port: when a short request was sent, and when its first text came.
        self._first_texts: dict[int, list[tuple[float, float]]] = {port: [] for port in PORTS}

    def unexpected(self, allowed: Sequence[str]) -> dict[str, int]:
        expected = ("complete", "error", *allowed)
        return {outcome: count for outcome, count in self.counts.items() if outcome not in expected}

    def add(self, outcome: str, began: float, ended: float, message: str = "") -> None:
        """The wait counts from the first fault during the request."""
        hit = [at for at in self.faults if began <= at <= ended]
        waited = ended - hit[0] if hit else 0.0
        self.longest_wait_s = max(self.longest_wait_s, waited)
        late = ", late" if waited > self._max_wait_s else ""
        self.counts[outcome + late] += 1
        if message:
            self.messages[f"{outcome}: {message[:160]}{late}"] += 1

    def on_first_text(self, port: int, began: float) -> None:
        self._first_texts[port].append((began, time.monotonic()))

    def recoveries(self) -> list[float]:
        """For each fault: until every gateway has answered a request that was sent after it."""
        return [max(self._recovery(texts, at) for texts in self._first_texts.values()) for at in self.healed]

    @staticmethod
    def _recovery(texts: list[tuple[float, float]], at: float) -> float:
        return min((first for began, first in texts if began >= at), default=float("inf")) - at


class Dialogue(Struct, frozen=True):
    """One request of a client and the only right answer to it."""

    text: str
    is_real: bool
    uses_responses: bool

    def body(self) -> dict[str, Any]:
        form: dict[str, Any]
        schema = {
            "type": "object",
            "properties": {"answer": {"const": self.text}},
            "required": ["answer"],
            "additionalProperties": False,
        }
        common: dict[str, Any] = {"model": "x", "stream": True}
        if self.uses_responses:
            form = {"text": {"format": {"type": "json_schema", "name": "a", "schema": schema}}}
            body: dict[str, Any] = {"input": self.text, "max_output_tokens": 2000}
        else:
            form = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}
            body = {"messages": [{"role": "user", "content": self.text}], "max_tokens": 2000}
        return common | body | (form if self.is_real else {})

    def answer(self) -> str:
        """Without white space, which the schema leaves free."""
        return _squeezed(json.dumps({"answer": self.text}) if self.is_real else self.text)


def _squeezed(text: str) -> str:
    return "".join(text.split())


class StreamReader:
    """The text, end and error of a stream of either protocol."""

    def __init__(self) -> None:
        self.text, self.is_done, self.error = "", False, ""

    def feed(self, line: str) -> None:
        if line == "data: [DONE]":
            self.is_done = True
            return
        if not line.startswith("data: "):
            return
        event = json.loads(line[6:])
        kind = event.get("type", "")
        if "error" in event or kind in ("error", "response.failed"):
            self.error = self.error or line
        elif kind == "response.output_text.delta":
            self.text += event["delta"]
        elif kind in ("response.completed", "response.incomplete"):
            self.is_done = True
        self.text += "".join(choice["delta"].get("content") or "" for choice in event.get("choices", []))

    def outcome(self, answer: str, *, was_cut: bool) -> tuple[str, str]:
        received = _squeezed(self.text)
        if not answer.startswith(received):
            return "MIXED", self.text
        if self.error:
            return "error", self.error
        if was_cut:
            return "cut", ""
        return ("complete", "") if self.is_done and received == answer else ("SILENT", self.text)


async def run_client(number: int, engine: EngineUnderTest, outcomes: Outcomes) -> None:
    async with _http_client(engine) as http:
        turn = 0
        while not outcomes.is_over.is_set():
            turn += 1
            words = " ".join(str(number * 1000 + i) for i in range(engine.words))
            dialogue = Dialogue(f"client {number} turn {turn}: {words}", engine.is_real, bool(number // 2 % 2))
            began = time.monotonic()
            outcome, message = await request(http, PORTS[(number + turn) % 2], dialogue)
            outcomes.add(outcome, began, time.monotonic(), message)
            if outcome in ("refused", "error"):
                await asyncio.sleep(0.2)


async def run_probe(port: int, engine: EngineUnderTest, outcomes: Outcomes) -> None:
    """Short requests, one after another, to one gateway."""
    async with _http_client(engine) as http:
        while not outcomes.is_over.is_set():
            began = time.monotonic()
            dialogue = Dialogue(f"probe {port}", engine.is_real, uses_responses=False)
            outcome, message = await request(http, port, dialogue, partial(outcomes.on_first_text, port, began))
            outcomes.add(outcome, began, time.monotonic(), message)
            await asyncio.sleep(0.1)


def _http_client(engine: EngineUnderTest) -> httpx.AsyncClient:
    """A slow connect is part of the wait, without a timeout of its own: on busy cores this process may itself be late
    by seconds, which must not count as a gateway that does not listen."""
    return httpx.AsyncClient(timeout=30 + engine.max_wait_s)


async def request(
    http: httpx.AsyncClient, port: int, dialogue: Dialogue, on_first_text: Callable[[], None] = lambda: None
) -> tuple[str, str]:
    """The outcome and a message."""
    path = "/v1/responses" if dialogue.uses_responses else "/v1/chat/completions"
    reader, was_cut = StreamReader(), False
    try:
        async with http.stream("POST", f"http://127.0.0.1:{port}{path}", json=dialogue.body()) as response:
            if response.status_code != 200:
                await response.aread()
                return ("error", response.text) if "error" in response.text else ("SILENT", response.text)
            async for line in response.aiter_lines():
                had_text = bool(reader.text)
                reader.feed(line)
                if reader.text and not had_text:
                    on_first_text()
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        return "refused", repr(error)
    except httpx.ReadTimeout:
        return "SILENT", reader.text
    except httpx.HTTPError:
        was_cut = True
    return reader.outcome(dialogue.answer(), was_cut=was_cut)


# --- the server -------------------------------------------------------------------------------------------------------


class SplitServer:
    """`config` is its configuration; sockets and files of the workers are on the small disk. `replace_node` makes up
    for a lost node of the cluster. Without a scheduler, each gateway has its own engine, in a process."""

    def __init__(
        self,
        folder: Path,
        disk: Path,
        config: str,
        replace_node: Callable[[], None] = lambda: None,
        has_scheduler: bool = True,
    ) -> None:
        self.folder, self.endpoint, self._replace_node = folder, f"ipc://{disk / 'scheduler'}", replace_node
        self._connect = ["--scheduler", self.endpoint] if has_scheduler else []
        self.names = ("scheduler", "gateway-0", "gateway-1") if has_scheduler else ("gateway-0", "gateway-1")
        (folder / "c.toml").write_text(config)
        self.parts: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        arguments = {
            "scheduler": ["scheduler", "--listen", self.endpoint],
            "gateway-0": ["serve", *self._connect, "--port", str(PORTS[0])],
            "gateway-1": ["serve", *self._connect, "--port", str(PORTS[1])],
        }[name]
        command = watched_command(self._stalls(name), *arguments, "--config", str(self.folder / "c.toml"))
        with (self.folder / f"{name}.log").open("ab") as log:
            self.parts[name] = subprocess.Popen(die_with_parent(command), stdout=log, stderr=log)

    def _stalls(self, name: str) -> Path:
        return self.folder / f"{name}.stalls"

    def stalls(self, names: Iterable[str], since: float) -> dict[str, str]:
        """Of the parts whose event loop worked for too long at a time, the longest time."""
        longest = {name: longest_stall(self._stalls(name), since) for name in names}
        return {f"{name}'s loop": f"{seconds:.2f} s at a time" for name, seconds in longest.items() if seconds}

    def check_running(self) -> None:
        """A part that has exited by itself will never be ready."""
        for name, part in self.parts.items():
            if part.poll() is not None:
                last = (self.folder / f"{name}.log").read_text().strip().rpartition("\n")[2]
                raise SystemExit(f"{name} ended with exit code {part.returncode}: {last}")

    def worker_pid(self) -> int | None:
        for port in PORTS:
            try:
                model = httpx.get(f"http://127.0.0.1:{port}/v1/admin/models/demo", timeout=5).json()
                return int(model["replicas"]["items"][0]["pid"])
            except (httpx.HTTPError, KeyError, IndexError, TypeError, ValueError):
                continue
        return None

    def _targets(self, part: str) -> list[psutil.Process]:
        if part in self.parts:
            return [psutil.Process(self.parts[part].pid)]
        pid = self.worker_pid()
        if not part or pid is None:
            return []
        worker = psutil.Process(pid)
        if part == "node":
            return _node_processes(worker)
        if part == "server":
            return [each for each in worker.children(recursive=True) if "llama-server" in each.name()]
        return [worker]

    def inject(self, fault: Fault, disk: Path, on_fault: Callable[[], None]) -> None:
        """`on_fault` is called at the moment of the fault. Returns when the replacement runs, or the pause is over."""
        pid, hit = self.worker_pid(), self._targets(fault.part)
        on_fault()
        if fault.fills_disk:
            _fill(disk)
        for process in hit:
            process.send_signal(fault.signal)
        if fault.pause_s:
            time.sleep(fault.pause_s)
            (disk / "filler").unlink(missing_ok=True)
            for process in hit:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGCONT)
        elif fault.part in self.parts:
            self.parts[fault.part].wait()
            self.start(fault.part)
        else:  # one that still loads may be silent for as long as it likes
            self._wait_replaced(pid if fault.part != "server" else None)
        if fault.part == "node":  # first the machine was silent, now it is gone
            for process in hit:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self._replace_node()

    def _wait_replaced(self, pid: int | None) -> None:
        deadline = time.monotonic() + _REPLACE_S
        while self.worker_pid() in (pid, None) and time.monotonic() < deadline:
            time.sleep(0.05)

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
            part.send_signal(signal.SIGCONT)
            part.terminate()
        for part in self.parts.values():
            part.wait(60)


def _fill(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))


def _node_processes(worker: psutil.Process) -> list[psutil.Process]:
    for parent in worker.parents():
        if "raylet" in parent.name():
            return [parent, *parent.children(recursive=True)]
    raise SystemExit(f"{worker.pid} is not on a node")


async def wait_until_ready(server: SplitServer) -> None:
    async with asyncio.timeout(2 * _REPLACE_S), httpx.AsyncClient() as http:
        for port in PORTS:
            while True:
                server.check_running()
                try:
                    health = (await http.get(f"http://127.0.0.1:{port}/health")).json()
                    if health.get("scheduler_connected", True) and health["status"] == "healthy":
                        break
                except httpx.HTTPError:
                    pass
                await asyncio.sleep(0.1)


# --- the run ----------------------------------------------------------------------------------------------------------


class Row(Struct, frozen=True):
    """One fault in the table."""

    fault: str
    rounds: int
    counts: dict[str, int]
    recoveries: list[float]
    longest_wait_s: float
    bad: dict[str, Any]

    def line(self) -> str:
        recovery = f"{statistics.median(self.recoveries):.1f} s, at most {max(self.recoveries):.1f} s"
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.counts.items()))
        verdict = "held" if not self.bad else f"BROKEN: {self.bad}"
        return f"| {self.fault} | {self.rounds} | {counts} | {recovery} | {self.longest_wait_s:.1f} s | {verdict} |"


HEADER = "| fault | times | answers | recovery: median, longest | the longest wait | |\n|---|---|---|---|---|---|"


class FaultRun(Struct):
    """All that a run needs besides the fault itself."""

    server: SplitServer
    engine: EngineUnderTest
    disk: Path
    streams: int
    rng: random.Random

    async def inject_under_load(self, fault: Fault, rounds: int) -> Outcomes:
        outcomes = Outcomes(self.engine.max_wait_s)
        clients = [asyncio.create_task(run_client(number, self.engine, outcomes)) for number in range(self.streams)]
        clients += [asyncio.create_task(run_probe(port, self.engine, outcomes)) for port in PORTS]
        for _ in range(rounds):
            await asyncio.sleep(self.rng.uniform(0.5, 1.5))
            on_fault = lambda: outcomes.faults.append(time.monotonic())  # noqa: E731
            await asyncio.to_thread(self.server.inject, fault, self.disk, on_fault)
            outcomes.healed.append(time.monotonic() if fault.pause_s else outcomes.faults[-1])
            await wait_until_ready(self.server)
            await self._wait_recovered(outcomes)
        outcomes.is_over.set()
        await asyncio.gather(*clients)
        return outcomes

    async def _wait_recovered(self, outcomes: Outcomes) -> None:
        deadline = time.monotonic() + _REPLACE_S + self.engine.max_wait_s
        while outcomes.recoveries()[-1] == float("inf") and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.1)

    async def leaks(self, before: dict[str, tuple[int, int]]) -> dict[str, str]:
        """What has not returned to its level, of the parts that were not restarted."""
        deadline = time.monotonic() + _SETTLE_S
        while (found := _growth(before, self.server.usage())) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        return found

    async def run(self, name: str, fault: Fault, rounds: int) -> Row:
        await self.inject_under_load(fault, 1)  # warm-up: what is allocated once is allocated now
        before = {part: usage for part, usage in (await _idle_usage(self.server)).items() if part != fault.part}
        began = time.time()
        outcomes = await self.inject_under_load(fault, rounds)
        stalls = self.server.stalls(before, began)
        bad = {**outcomes.unexpected(fault.allowed), **await self.leaks(before), **stalls}
        recoveries = outcomes.recoveries()
        if float("inf") in recoveries:
            bad["never recovered"] = recoveries.count(float("inf"))
        row = Row(name, rounds, dict(outcomes.counts), recoveries, outcomes.longest_wait_s, bad)
        print(row.line(), flush=True)
        for number, (message, count) in enumerate(outcomes.messages.most_common()):
            if number < 4 or not message.startswith(("error", *fault.allowed)):
                print(f"    {count} × {message}", flush=True)
        after = {part: f"{files} files, {size >> 20} MiB" for part, (files, size) in self.server.usage().items()}
        print(f"    after: {after}", flush=True)
        return row


def _growth(before: dict[str, tuple[int, int]], now: dict[str, tuple[int, int]]) -> dict[str, str]:
    found = {}
    for name in before:
        files, grown = now[name][0] - before[name][0], now[name][1] - before[name][1]
        if files > 0 or grown > MAX_GROWTH:
            found[name] = f"{files:+d} files, {grown / 2**20:+.0f} MiB"
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


async def run_all(run: FaultRun, faults: dict[str, Fault], rounds: int) -> list[Row]:
    await wait_until_ready(run.server)
    return [await run.run(name, fault, rounds) for name, fault in faults.items()]


def run_faults(run: FaultRun, faults: dict[str, Fault], rounds: int) -> bool:
    """Whether everything held."""
    server = run.server
    try:
        for name in server.names:
            server.start(name)
        rows = asyncio.run(run_all(run, faults, rounds))
        print("\n".join(["", HEADER, *(row.line() for row in rows)]), flush=True)
        return not any(row.bad for row in rows)
    finally:
        server.stop()
        for log in server.folder.glob("*.log"):
            if "Traceback" in (text := log.read_text()):
                print(log.name, text[text.index("Traceback") :][:3000])


def run_on_own_disk() -> int:
    """Run this command again with a small disk that it may fill."""
    with tempfile.TemporaryDirectory(prefix="mf-") as folder:
        mounted = f'mount -t tmpfs -o size={_DISK_SIZE},mode=700 tmpfs "$0" && exec "$@"'
        command = [sys.executable, "-m", "bench.faults", *sys.argv[1:]]
        argv = ["unshare", "--map-root-user", "--mount", "sh", "-c", mounted, folder, *command]
        return subprocess.call(argv, env=os.environ | {DISK_VARIABLE: folder})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=list(ENGINES), default="llama_cpp")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--only", choices=[*FAULTS, *ENGINE_PROCESS, *RAY_NODE], nargs="+", help="these faults")
    parser.add_argument(
        "--model", type=Path, help="a GGUF file; with a tiny one the faults take the time, not the answers"
    )
    options = parser.parse_args()
    if DISK_VARIABLE not in os.environ:
        return run_on_own_disk()
    engine, disk = ENGINES[options.engine], Path(os.environ[DISK_VARIABLE])
    path = options.model or default_model.fetch() if engine.is_real else ""
    binary = fetch_binary() if options.engine == "llama_server" else ""  # before the cache folder is the small disk
    model = engine.model.format(path=path, binary=binary)
    config = CONFIG.format(model=model, window=engine.window, streams=options.streams + len(PORTS), disk=disk)
    (disk / "llama_cpp").symlink_to(cache_dir() / "llama_cpp")  # the library is larger than the disk
    os.environ["MODELYARD_CACHE"] = str(disk)  # measurements of other runs are not used
    chosen = options.only or [name for name, fault in FAULTS.items() if options.engine in fault.engines]
    with tempfile.TemporaryDirectory(prefix="my-faults-") as name, contextlib.ExitStack() as stack:
        if "ray-node" in chosen:
            server = SplitServer(Path(name), disk, config + RAY, stack.enter_context(ray_nodes()).add)
            faults = RAY_NODE
        elif set(chosen) <= set(ENGINE_PROCESS):
            own = config.replace("[models.demo]", '[models.demo]\nplacement = "process"')
            server = SplitServer(Path(name), disk, own, has_scheduler=False)
            faults = {each: ENGINE_PROCESS[each] for each in chosen}
        else:
            server = SplitServer(Path(name), disk, config)
            faults = {each: FAULTS[each] for each in chosen}
        run = FaultRun(server, engine, disk, options.streams, random.Random(1))
        return 0 if run_faults(run, faults, options.rounds) else 1


if __name__ == "__main__":
    sys.exit(main())
