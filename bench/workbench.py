"""What an open page of the workbench costs the gateway, and how it feels, with 1,000 requests in its table.

    python -m bench.workbench [--windows N] [--pairs N]

Two gateways run that are alike; a real headless browser has the page with the table open on one of them, and later on
the other (`bench/crossover.py`). Both get 50 requests a second, each a change in the table. The cost is CPU time of the
gateway's process, as a share of one core, the one it works on: the share of its throughput. The browser's own CPU time
is not the gateway's and not counted. With the page open, the browser itself says how long its frames and its longest
pieces of work took. Then each gateway in turn gets all the requests that it can answer; what counts is the CPU time
that an answer takes, since the browser and the clients want the machine's other cores.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import uvloop
from msgspec import Struct
from rich.console import Console

from bench.crossover import Pair, added, all_crossed, judged, lost, share
from bench.load import NUMBER
from bench.pressed import cpu_s, pressed
from bench.ratios import Interval
from bench.servers import Server, free_port, running
from tests.workbench.screen import chrome

TARGET = 0.02
RATE, ROWS = 50, 1000
BLOCKS = 4  # at full load: the page changes places three times
_WINDOW_S, _PRESS_S, _FEEL_S = 4.0, 2.0, 10.0
_SETTLE_S = 3.0
_GONE_S = 16.0  # a page that was left is kept for ten seconds, should it come back, and looks on meanwhile
_BODY = {"model": "demo", "messages": [{"role": "user", "content": f"How are you, number {NUMBER}?"}]}
_CONFIG = """
[http]
port = {port}
[log]
level = "warning"
history_requests = 2000
[models.demo]
backend = "fake"
token_delay = 0
script = [{{ steps = [{{ text = "Hello there, my friend." }}] }}]
[caches.main]
model = "demo"
n_ctx = 4096
parallel = 16
"""
_WATCH = """
window.frames_ = []; window.tasks_ = [];
let before = performance.now();
const frame = now => { window.frames_.push(now - before); before = now; requestAnimationFrame(frame) };
requestAnimationFrame(frame);
new PerformanceObserver(list => list.getEntries().forEach(one => window.tasks_.push(one.duration)))
  .observe({entryTypes: ['longtask']});
"""


class Feel(Struct, frozen=True):
    """Milliseconds in the browser."""

    frame_p95: float
    longest_task: float
    rows: int


class Found(Struct, frozen=True):
    """`paced`: shares of one core at 50 requests a second. `rushed`: CPU seconds an answer at full load."""

    paced: tuple[tuple[Pair, ...], ...]
    feel: Feel
    rushed: tuple[tuple[Pair, ...], ...]


class Traffic:
    """Requests at a steady pace, from a thread of its own."""

    def __init__(self, url: str) -> None:
        self._url, self._over, self.sent = url, threading.Event(), 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        began = time.perf_counter()
        with httpx.Client(base_url=self._url) as client:
            while not self._over.is_set():
                ask(client, self.sent)
                self.sent += 1
                self._over.wait(max(0.0, began + self.sent / RATE - time.perf_counter()))

    @contextmanager
    def flowing(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._over.set()
            self._thread.join()


def ask(client: httpx.Client, number: int) -> None:
    content = f"How are you, number {number}?"
    body = {"model": "demo", "messages": [{"role": "user", "content": content}], "prompt_cache_key": f"s{number % 40}"}
    client.post("/v1/chat/completions", json=body).raise_for_status()


class Side:
    """One of the two gateways."""

    def __init__(self, server: Server) -> None:
        self.port, self.pid = server.port, server.process.pid
        self.url = f"http://127.0.0.1:{server.port}"

    def fill(self) -> None:
        with httpx.Client(base_url=self.url, timeout=60) as client:
            for number in range(ROWS):
                ask(client, number)

    def pressed(self) -> float:
        return uvloop.run(pressed(self.port, self.pid, json.dumps(_BODY), _PRESS_S))


@contextmanager
def gateway(folder: Path) -> Iterator[Side]:
    """With the same hashes in both, and so the same order in every set: one thing less in which they differ."""
    port = free_port()
    config = folder / f"{port}.toml"
    config.write_text(_CONFIG.format(port=port))
    command = [sys.executable, "-m", "modelyard", "serve", "--config", str(config)]
    with running(command, port, "/health/ready", {"PYTHONHASHSEED": "0"}) as server:
        yield Side(server)


class Bench:
    def __init__(self, sides: tuple[Side, Side], browser: Any) -> None:
        self._sides, self._browser = sides, browser
        for side in sides:
            side.fill()
            self._open(side)  # what the first visit imports is paid once
        self._seen, self._unseen = sides

    def _open(self, side: Side) -> None:
        self._browser.get(f"{side.url}/workbench/requests")
        time.sleep(_SETTLE_S)

    def _change_places(self) -> None:
        self._seen, self._unseen = self._unseen, self._seen
        self._open(self._seen)
        time.sleep(_GONE_S - _SETTLE_S)

    def measure(self, windows: int, pairs: int) -> Found:
        first, second = (Traffic(side.url).flowing() for side in self._sides)
        with first, second:
            paced = []
            for _ in range(2):
                self._change_places()
                paced.append(tuple(self._window() for _ in range(windows)))
            feel = self._felt()
        self._calm_browser()
        rushed = []
        for _ in range(BLOCKS):
            self._change_places()
            rushed.append(tuple(self._rush(turn) for turn in range(pairs)))
        return Found(tuple(paced), feel, tuple(rushed))

    def _window(self) -> Pair:
        """Both at the same time: what disturbs the one disturbs the other."""
        began, before = time.perf_counter(), (cpu_s(self._seen.pid), cpu_s(self._unseen.pid))
        time.sleep(_WINDOW_S)
        after, took = (cpu_s(self._seen.pid), cpu_s(self._unseen.pid)), time.perf_counter() - began
        return Pair((after[0] - before[0]) / took, (after[1] - before[1]) / took)

    def _rush(self, turn: int) -> Pair:
        if turn % 2:
            return Pair(lacking=self._unseen.pressed(), having=self._seen.pressed())
        return Pair(self._seen.pressed(), self._unseen.pressed())

    def _felt(self) -> Feel:
        browser = self._browser
        browser.execute_script(_WATCH)
        time.sleep(_FEEL_S)
        frames = sorted(browser.execute_script("return window.frames_"))
        tasks = browser.execute_script("return window.tasks_")
        count = "return Number(document.querySelector('.ag-root').getAttribute('aria-rowcount')) - 1"
        return Feel(frames[int(len(frames) * 0.95)], max(tasks, default=0.0), int(browser.execute_script(count)))

    def _calm_browser(self) -> None:
        """It has to leave the other core to the client: a gateway that waits for requests takes more for each."""
        for process in psutil.Process(self._browser.service.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it opens and ends some as it likes
                process.nice(19)


def measure(windows: int, pairs: int) -> Found:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[:1])  # the gateways take after us, and the browser does below
        one, other = (stack.enter_context(gateway(folder)) for _ in range(2))
        os.sched_setaffinity(0, cores[1:] or cores)
        return Bench((one, other), stack.enter_context(chrome())).measure(windows, pairs)


def show(found: Found, console: Console) -> bool:
    """Whether the target is kept in both, by the whole interval."""
    paced = all_crossed(found.paced, added)
    logs = all_crossed(found.rushed, lost)
    rushed = Interval(share(logs.middle), share(logs.low), share(logs.high))
    feel = found.feel
    _tell(console, f"at {RATE} requests a second", paced, sum(map(len, found.paced)))
    _tell(console, "at full load", rushed, sum(map(len, found.rushed)))
    console.print(
        f"in the browser: {feel.rows} rows; frames {feel.frame_p95:.0f} ms (p95), "
        f"longest piece of work {feel.longest_task:.0f} ms"
    )
    return all(judged(cost, TARGET) == "kept" for cost in (paced, rushed))


def _tell(console: Console, when: str, cost: Interval, pairs: int) -> None:
    middle, low, high = (f"{value * 100:.2f}" for value in (cost.middle, cost.low, cost.high))
    console.print(
        f"an open page costs {middle} % of the gateway's throughput {when} "
        f"(95 %: {low} to {high}; {pairs} pairs); target < {TARGET * 100:.0f} %: {judged(cost, TARGET)}"
    )


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--windows", type=int, default=10, help="of four seconds at 50 requests a second, twice")
    options.add_argument("--pairs", type=int, default=11, help=f"of five seconds at full load, {BLOCKS} times")
    given = options.parse_args()
    return 0 if show(measure(given.windows, given.pairs), Console()) else 1


if __name__ == "__main__":
    sys.exit(main())
