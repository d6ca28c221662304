"""Moderate load for an hour, and what the server holds meanwhile: `python -m bench.soak [--minutes 60] [--svg FILE]`

Clients of all protocols talk to a real model (llama.cpp) and to the fake engine, streamed and not, with conversations
that grow. A third of them changes its mind: it disconnects in the middle, or the administrator cancels the request.
Memory, open files, threads, queue and slots are sampled meanwhile and must not grow; when the load ends, nothing waits
and every slot is free. The exit code is 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from rich.console import Console
from rich.table import Table

from bench.report import console, machine, mark, show_notes
from bench.resources import Usage, draw_series, slope, usage
from bench.servers import Server, modelyard_server
from modelyard.accounts.owner import OWNER_HEADER
from modelyard.library import default_model
from modelyard.server.running_servers import find_server
from modelyard_bench.drawing import check_file, save

_WARMUP = 0.2  # the first part of the run, in which caches fill; slopes are of the rest
_MAX_SLOPE_MB = 12.0  # per hour
_MAX_FILES = 8  # more than after the warm-up, once the load is over
_SAMPLE_S = 5.0
_TIMEOUT_S = 180.0  # of a request: on cores that others keep busy, the real model takes its time
_TURNS = 6  # of a conversation
_PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions", "/v1/embeddings")
# Different conversations, which come again and again: the token cache keeps what clients sent and the model answered,
# up to 32 MiB per model, and new texts would fill it for hours. So after the warm-up, what still grows is a leak.
_TALKS = 60
_WORDS = ("river", "stone", "seven", "lamp", "green", "quick", "harbour", "letter", "north", "paper")


def configuration(gguf: Path) -> dict[str, Any]:
    return {
        "models": {
            # Evicted conversations are kept in RAM up to parked_mb, by default more than an hour fills. Each has up to
            # 6 MiB here: with room for a few, the memory would go up and down by that much.
            "real": {"backend": "llama_cpp", "path": str(gguf), "n_threads": 1, "parked_mb": 1},
            "fake": {"backend": "fake", "token_delay": 0.02, "echo": True},
        },
        "caches": {
            "real": {"model": "real", "n_ctx": 1024, "parallel": 2},
            "fake": {"model": "fake", "n_ctx": 4096, "parallel": 16},
        },
        "routes": [{"match": "real", "cache": "real"}, {"match": "*", "cache": "fake"}],
        "log": {"history_requests": 200},
        "store": {"max_entries": 100},
    }


# --- the clients ------------------------------------------------------------------------------------------------------


class Talk:
    """One conversation of one client, in one protocol. Its number decides all that is said in it."""

    def __init__(self, number: int, model: str) -> None:
        self._rng, self._model = random.Random(number), model
        self.path = self._rng.choice(_PATHS)
        self._turns: list[dict[str, str]] = []

    def body(self, stream: bool) -> dict[str, Any]:
        text = " ".join(self._rng.choices(_WORDS, k=self._rng.randint(3, 40)))
        limit = self._rng.randint(1, 24)
        body: dict[str, Any] = {"model": self._model, "stream": stream, "temperature": 0}
        if self.path == "/v1/embeddings":
            return {"model": "fake", "input": [text] * self._rng.randint(1, 4)}
        if self.path == "/v1/completions":
            return body | {"prompt": text, "max_tokens": limit}
        self._turns.append({"role": "user", "content": text})
        if self.path == "/v1/responses":
            return body | {"input": list(self._turns), "max_output_tokens": limit}
        return body | {"messages": list(self._turns), "max_tokens": limit}

    def answered(self) -> None:
        if self._turns:
            self._turns.append({"role": "assistant", "content": "Yes."})


async def run_client(server: Server, number: int, pause_s: float, until: float, outcomes: Counter[str]) -> None:
    rng, own = random.Random(number), find_server(server.url)
    headers = {OWNER_HEADER: own.token} if own is not None else {}
    async with httpx.AsyncClient(base_url=server.url, timeout=_TIMEOUT_S, headers=headers) as http:
        while time.monotonic() < until:
            talk = Talk(rng.randrange(_TALKS), "real" if number % 4 == 0 else "fake")
            for _ in range(rng.randint(1, _TURNS)):
                kind = rng.choice(("whole", "stream", "disconnect", "cancel", "stream", "whole"))
                outcomes[await _send(http, talk, kind, rng)] += 1
                if time.monotonic() >= until:
                    break
                await asyncio.sleep(rng.expovariate(1 / pause_s))


async def _send(http: httpx.AsyncClient, talk: Talk, kind: str, rng: random.Random) -> str:
    """One request. Its outcome: a status, "disconnected", "cancelled", or the name of a failure."""
    body = talk.body(stream=kind == "stream" or (kind != "whole" and rng.random() < 0.5))
    request, began = asyncio.ensure_future(http.post(talk.path, json=body)), time.monotonic()
    try:
        if kind in ("disconnect", "cancel"):
            done, _ = await asyncio.wait({request}, timeout=rng.uniform(0, 0.6))
            if not done and kind == "disconnect":
                request.cancel()
                await asyncio.gather(request, return_exceptions=True)
                return "disconnected"
            if not done:
                await _cancel_one(http, rng)
        reply = await request
        talk.answered()
        return "cancelled" if kind == "cancel" and reply.status_code != 200 else str(reply.status_code)
    except httpx.HTTPError as error:
        live = (await http.get("/v1/admin/requests", params={"limit": 0})).json()["live"]
        print(
            f"{error!r} after {time.monotonic() - began:.0f} s: {talk.path} {kind} {body}; live: {live}",
            file=sys.stderr,
        )
        return type(error).__name__


async def _cancel_one(http: httpx.AsyncClient, rng: random.Random) -> None:
    """As an administrator: any running request, perhaps another client's."""
    live = (await http.get("/v1/admin/requests", params={"limit": 0})).json()["live"]
    if live:
        await http.post(f"/v1/admin/requests/{rng.choice(live)['id']}/cancel")


# --- the samples ------------------------------------------------------------------------------------------------------


class Sample(NamedTuple):
    at_s: float
    held: Usage
    waiting: int
    running: int


async def sample(server: Server, http: httpx.AsyncClient, began: float) -> Sample:
    models = (await http.get("/v1/admin/models")).json()["data"]
    queues = [model["queue"] for model in models]
    held = await asyncio.to_thread(usage, server.process)
    return Sample(time.monotonic() - began, held, sum(q["waiting"] for q in queues), sum(q["running"] for q in queues))


async def soak(server: Server, minutes: float, clients: int, pause_s: float) -> tuple[list[Sample], Counter[str]]:
    """Samples during the load, and one after it when everything has ended."""
    began, outcomes = time.monotonic(), Counter[str]()
    until, samples = began + 60 * minutes, []
    running = [asyncio.create_task(run_client(server, n, pause_s, until, outcomes)) for n in range(clients)]
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        while time.monotonic() < until:
            samples.append(await sample(server, http, began))
            await asyncio.sleep(min(_SAMPLE_S, max(0.0, until - time.monotonic())))
        await asyncio.gather(*running)
        for _ in range(100):  # the last disconnects are noticed soon
            last = await sample(server, http, began)
            if not last.waiting and not last.running:
                break
            await asyncio.sleep(0.1)
    return [*samples, last], outcomes


# --- the report -------------------------------------------------------------------------------------------------------


class Verdict(NamedTuple):
    slope_mb_per_hour: float
    is_good: bool
    reasons: list[str]


def judge(samples: list[Sample], outcomes: Counter[str]) -> Verdict:
    settled = samples[int(len(samples) * _WARMUP) :]
    grown = 3600 * slope([one.at_s for one in settled], [one.held.rss_mb for one in settled])
    first, last = settled[0], samples[-1]
    rise = last.held.rss_mb - first.held.rss_mb  # a short run has too few samples for a slope
    bad = [name for name in outcomes if name not in ("200", "disconnected", "cancelled", "409", "499")]
    reasons = [f"{outcomes[name]} × {name}" for name in bad]
    if grown > _MAX_SLOPE_MB and rise > _MAX_SLOPE_MB:
        reasons.append(f"memory grows by {grown:.0f} MiB/h")
    if last.held.files - first.held.files > _MAX_FILES or last.held.threads - first.held.threads > _MAX_FILES:
        reasons.append(f"files or threads grow: {first.held} → {last.held}")
    if last.waiting or last.running:
        reasons.append(f"{last.waiting} requests wait and {last.running} run after the load has ended")
    return Verdict(grown, not reasons, reasons)


def show(samples: list[Sample], outcomes: Counter[str], out: Console) -> None:
    table = Table(title="Soak", title_justify="left", expand=False)
    for name in ("minute", "RSS", "files", "threads", "waiting", "running"):
        table.add_column(name, justify="right")
    steps = [round(number * (len(samples) - 1) / 12) for number in range(13)]
    for index in sorted(set(steps)):
        at, held, waiting, running = samples[index]
        row = (f"{at / 60:.1f}", f"{held.rss_mb:.1f} MiB", held.files, held.threads, waiting, running)
        table.add_row(*map(str, row))
    out.print(table)
    verdict = judge(samples, outcomes)
    minutes = samples[-1].at_s / 60
    counted = ", ".join(f"{name} {count:,}" for name, count in outcomes.most_common())
    notes = (
        machine(),
        f"{outcomes.total():,} requests in {minutes:.1f} minutes: {counted}",
        f"RSS slope after the first {_WARMUP:.0%}: {verdict.slope_mb_per_hour:+.1f} MiB/hour",
        *verdict.reasons,
    )
    show_notes(notes, out)
    out.print(f"nothing grows, nothing is left{mark(verdict.is_good)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--pause", type=float, default=0.5, help="mean seconds between two requests of a client")
    parser.add_argument("--svg", type=Path, help="also draw the samples over time")
    options = parser.parse_args()
    if options.svg:
        check_file(options.svg)
    with modelyard_server(configuration(default_model.fetch())) as server:
        samples, outcomes = asyncio.run(soak(server, options.minutes, options.clients, options.pause))
    show(samples, outcomes, console())
    if options.svg:
        series: dict[str, Sequence[float]] = {
            "RSS (MiB)": [one.held.rss_mb for one in samples],
            "open files": [one.held.files for one in samples],
            "threads": [one.held.threads for one in samples],
            "waiting": [one.waiting for one in samples],
            "running": [one.running for one in samples],
        }
        save(draw_series("A server under moderate load", "s", [one.at_s for one in samples], series), options.svg)
    return 0 if judge(samples, outcomes).is_good else 1


if __name__ == "__main__":
    sys.exit(main())
