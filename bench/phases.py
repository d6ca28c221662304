"""The benchmark's phases, in the order in which they are run. Each starts the servers it needs and stops them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

from msgspec import Struct, structs

from bench import growth, litellm_proxy
from bench.growth import Growth
from bench.load import Job
from bench.measure import Sample, Samples, interleaved, load, sample
from bench.servers import Server, free_port, running
from bench.smollm import tokenizer_folder
from bench.stats import percentile
from bench.subjects import TOKENS, body, modelyard

OURS, THEIRS = "Modelyard", "LiteLLM"  # which answers from its own mock, with nothing behind it
PASSING_ON = "LiteLLM as a proxy"  # with a server behind it that costs next to nothing
_AT_ONCE = 0.0
_ONE_BY_ONE = 1e-6  # the fake engine says each token by itself, and none has to be waited for
_FEWER = (1000, 300, 100, 30)  # streams at a time that LiteLLM is asked for, until it answers all of them

Tick = Callable[[str], None]


class Plan(Struct, frozen=True):
    """How long and how often. `rate` is tokens a second of each of the many concurrent streams."""

    rounds: int = 3
    seconds: float = 5.0
    connections: int = 32
    streams: int = 1000
    stream_seconds: float = 10.0
    stream_rounds: int = 3
    rate: float = 10.0
    turns: int = 2000

    @property
    def steps(self) -> int:
        """How often the progress bar ticks without LiteLLM, and how often with it."""
        return 2 * (self.rounds + 1) + self.stream_rounds + 3

    @property
    def steps_beside(self) -> int:
        return 4 * (self.rounds + 1) + 3


QUICK = Plan(rounds=1, seconds=3.0, stream_seconds=6.0, stream_rounds=1, turns=500)


class Added(Struct, frozen=True):
    """Time to the first token in milliseconds, measured, and that of a bare socket server that answers at once."""

    measured_p50: float
    measured_p99: float
    bare_p50: float

    @property
    def p50(self) -> float:
        return self.measured_p50 - self.bare_p50

    @property
    def p99(self) -> float:
        """Less the baseline's median, not its 99th percentile: the harder of the two."""
        return self.measured_p99 - self.bare_p50


class Results(Struct):
    plan: Plan
    requests: dict[str, Samples]
    events: dict[str, Samples]
    streams: Samples
    added: Added
    growth: Growth
    litellm_streams: Sample | None = None
    litellm_connections: int = 0


def run(plan: Plan, beside: bool, tick: Tick) -> Results:
    tokenizer = tokenizer_folder()
    folder = litellm_proxy.install() if beside else None
    with ExitStack() as stack:
        rivals = _rivals(folder, tick, stack) if folder is not None else {}
        requests = _throughput(tokenizer, _AT_ONCE, "requests", rivals, plan, tick)
        events = _throughput(tokenizer, _ONE_BY_ONE, "streams", rivals, plan, tick)
    results = Results(
        plan=plan,
        requests=requests,
        events=events,
        streams=_many_streams(tokenizer, plan, tick),
        added=_added_ttft(tokenizer, plan, tick),
        growth=_growth(tokenizer, tick),
    )
    if folder is not None:
        results.litellm_connections, results.litellm_streams = _their_streams(folder, plan, tick)
    return results


# --- (a) requests and (b) events ----------------------------------------------------------------------------------


def _throughput(
    tokenizer: Path,
    delay: float,
    kind: Literal["requests", "streams"],
    rivals: Mapping[str, Server],
    plan: Plan,
    tick: Tick,
) -> dict[str, Samples]:
    with modelyard(tokenizer, delay) as ours:
        servers = {OURS: ours, **rivals}
        job = Job(kind=kind, port=0, body=body("bench", stream=kind == "streams"), connections=plan.connections)
        for name, server in servers.items():
            tick(f"{kind}: warming up {name}")
            load(structs.replace(job, port=server.port, seconds=2.0))
        timed = structs.replace(job, seconds=plan.seconds)
        return interleaved(
            servers, lambda s: structs.replace(timed, port=s.port), plan.rounds, lambda name: tick(f"{kind}: {name}")
        )


def _rivals(folder: Path, tick: Tick, stack: ExitStack) -> dict[str, Server]:
    tick("starting LiteLLM, twice")
    upstream = stack.enter_context(_bare(_AT_ONCE))
    mocking = stack.enter_context(litellm_proxy.litellm(folder, None))
    passing_on = stack.enter_context(litellm_proxy.litellm(folder, upstream))
    return {THEIRS: mocking, PASSING_ON: passing_on}


@contextmanager
def _bare(delay: float) -> Iterator[Server]:
    port = free_port()
    with running([sys.executable, "-m", "bench.bare", str(port), str(delay)], port) as server:
        yield server


# --- (c) many streams at a time -----------------------------------------------------------------------------------


def _streams(plan: Plan, connections: int, port: int) -> Job:
    """The first ones start spread over the length of a stream, so that starts stay spread as connections ask again."""
    return Job(
        kind="streams",
        port=port,
        body=body("bench", stream=True),
        connections=connections,
        seconds=plan.stream_seconds,
        spread_s=TOKENS / plan.rate,
    )


def _many_streams(tokenizer: Path, plan: Plan, tick: Tick) -> Samples:
    with modelyard(tokenizer, 1 / plan.rate) as ours:
        load(Job(kind="streams", port=ours.port, body=body("bench", stream=True), connections=20))
        job = _streams(plan, plan.streams, ours.port)
        return interleaved(
            {OURS: ours}, lambda _: job, plan.stream_rounds, lambda name: tick(f"{plan.streams} streams: {name}")
        )[OURS]


def _their_streams(folder: Path, plan: Plan, tick: Tick) -> tuple[int, Sample]:
    with _bare(1 / plan.rate) as upstream, litellm_proxy.litellm(folder, upstream) as theirs:
        for connections in _FEWER:
            tick(f"{connections} streams: {THEIRS}")
            found = sample(theirs, _streams(plan, connections, theirs.port))
            if not found.outcome.errors:
                break
        return connections, found


# --- (d) one request at a time, and (e) a long conversation --------------------------------------------------------


def _added_ttft(tokenizer: Path, plan: Plan, tick: Tick) -> Added:
    with modelyard(tokenizer, _AT_ONCE) as ours, _bare(_AT_ONCE) as bare:
        job = Job(kind="ttft", port=ours.port, beside=bare.port, body=body("bench", stream=True), count=100)
        tick("time to the first token: warming up")
        load(job)
        tick("time to the first token")
        found = load(structs.replace(job, count=plan.turns))
    times = found.ttft_ms
    return Added(percentile(times, 50), percentile(times, 99), percentile(found.beside_ms, 50))


def _growth(tokenizer: Path, tick: Tick) -> Growth:
    tick("a long conversation grows")
    return growth.measure(tokenizer)
