"""What an open page of the workbench costs the gateway, and how it feels, with 1,000 requests in its table.

    python -m bench.workbench [--rounds N] [--seconds S]

Requests come at 50 a second all the time; each is a change in the table. In turns a real headless browser has the page
with the table open, or a blank one. The cost is CPU time of the server's process, as a share of one core: the gateway
works on one, so that is the share of its throughput. The browser's own CPU time is not the gateway's and not counted.
Then, with the page open, the browser itself says how long its frames and its longest pieces of work took. At last the
gateway is given all the requests that it can answer, again with the page open or closed in turns; what counts is how
many it answers in a second of its own CPU time, since the browser and the clients want the machine's other cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from msgspec import Struct
from rich.console import Console

from bench.load import NUMBER, Job
from bench.measure import sample
from bench.servers import Server, free_port, running
from tests.workbench.screen import chrome

TARGET = 0.02
RATE, ROWS = 50, 1000
_SETTLE_S = 3.0
_GONE_S = 16.0  # a page that was left is kept for ten seconds, should it come back, and looks on meanwhile
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


class Round(Struct, frozen=True):
    """Shares of one core."""

    closed: float
    opened: float

    @property
    def cost(self) -> float:
        return self.opened - self.closed


class Rush(Struct, frozen=True):
    """Requests a CPU second of the gateway, which has as many as it can answer."""

    closed: float
    opened: float

    @property
    def cost(self) -> float:
        return 1 - self.opened / self.closed


class Feel(Struct, frozen=True):
    """Milliseconds in the browser."""

    frame_p95: float
    longest_task: float
    rows: int


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


def measure(rounds: int, seconds: float) -> tuple[list[Round], Feel, list[Rush]]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "modelyard.toml"
        config.write_text(_CONFIG.format(port=port))
        command = [sys.executable, "-m", "modelyard", "serve", "--config", str(config)]
        with running(command, port, "/health/ready") as server, httpx.Client(base_url=url) as client:
            for number in range(ROWS):
                ask(client, number)
            with chrome() as browser:
                browser.get(f"{url}/workbench/requests")  # what the first visit imports is paid once
                with Traffic(url).flowing():
                    found = [_round(server, browser, url, seconds) for _ in range(rounds)]
                    feel = _felt(browser, url, seconds)
                return found, feel, [_rush(server, browser, url, seconds) for _ in range(rounds)]


def _round(server: Server, browser: Any, url: str, seconds: float) -> Round:
    browser.get("about:blank")
    closed = _share(server, seconds, _GONE_S)
    browser.get(f"{url}/workbench/requests")
    return Round(closed, _share(server, seconds))


def _rush(server: Server, browser: Any, url: str, seconds: float) -> Rush:
    body = {"model": "demo", "messages": [{"role": "user", "content": f"How are you, number {NUMBER}?"}]}
    job = Job(kind="requests", port=server.port, body=json.dumps(body), connections=16, seconds=seconds)

    def opened() -> float:
        browser.get(f"{url}/workbench/requests")
        time.sleep(_SETTLE_S)
        return sample(server, job).answers_per_cpu_s

    before = opened()
    browser.get("about:blank")
    time.sleep(_GONE_S)
    closed = sample(server, job).answers_per_cpu_s
    return Rush(closed, (before + opened()) / 2)  # before and after: whatever drifts meanwhile drifts for both


def _share(server: Server, seconds: float, settle_s: float = _SETTLE_S) -> float:
    time.sleep(settle_s)
    cpu, began = server.cpu_s(), time.perf_counter()
    time.sleep(seconds)
    return (server.cpu_s() - cpu) / (time.perf_counter() - began)


def _felt(browser: Any, url: str, seconds: float) -> Feel:
    browser.get(f"{url}/workbench/requests")
    time.sleep(_SETTLE_S)
    browser.execute_script(_WATCH)
    time.sleep(seconds)
    frames = sorted(browser.execute_script("return window.frames_"))
    tasks = browser.execute_script("return window.tasks_")
    rows = browser.execute_script("return Number(document.querySelector('.ag-root').getAttribute('aria-rowcount')) - 1")
    return Feel(frames[int(len(frames) * 0.95)], max(tasks, default=0.0), int(rows))


def show(rounds: list[Round], feel: Feel, rushes: list[Rush], console: Console) -> bool:
    cost = statistics.median(one.cost for one in rounds)
    spread = ", ".join(f"{one.cost * 100:.2f}" for one in rounds)
    console.print(f"gateway without a page  {statistics.median(one.closed for one in rounds) * 100:.1f} % of a core")
    console.print(f"gateway with one open   {statistics.median(one.opened for one in rounds) * 100:.1f} % of a core")
    good = cost < TARGET
    console.print(f"an open page costs      {cost * 100:.2f} % (rounds: {spread}); target < {TARGET * 100:.0f} %")
    console.print(
        f"in the browser          {feel.rows} rows; frames {feel.frame_p95:.0f} ms (p95), "
        f"longest piece of work {feel.longest_task:.0f} ms"
    )
    rushed = statistics.median(one.cost for one in rushes)
    told = ", ".join(f"{one.cost * 100:.2f}" for one in rushes)
    most = statistics.median(one.closed for one in rushes)
    console.print(f"at full load            {rushed * 100:.2f} % (rounds: {told}) of {most:,.0f} requests a CPU second")
    return good and rushed < TARGET


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--seconds", type=float, default=15.0)
    given = options.parse_args()
    return 0 if show(*measure(given.rounds, given.seconds), Console()) else 1


if __name__ == "__main__":
    sys.exit(main())
