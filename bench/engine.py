"""The llama.cpp engine beside a native llama-server on the same file, threads and context, both through HTTP.

    python bench/engine.py [--quick] [--caches | --gaps] [--model FILE] [--threads N] [--rounds N] [--json FILE]
                           [--svg FILE]

Tokens per second of 1, 2, 4 and 8 streams and at depths of 512 and 4,096 tokens, the time to first token of prompts of
32, 512 and 4,096 tokens, and our single stream with 32 streams of the fake engine in the same process against the same
stream alone, and 2 + 2 streams in two caches against 4 in one (`--caches`: only that). The p99 of the gaps between two
tokens stands beside each rate. A stream beside a prompt of 3,500 tokens (`--gaps`: only that): its gaps, and how fast
both are served meanwhile, also against ours with whole micro-batches (`max_gap_ms = 0`). Rounds are interleaved; every
prompt starts with new words, so that no cache matches.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import uvloop
from msgspec import Struct
from rich.progress import Progress

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # a script's own folder is on the path, not the root

from bench import report
from bench.prepared_load import RequestTarget, token_times
from bench.prompts import NO_END, RandomPrompts, tokenizer_folder
from bench.raw_http import HttpClient
from bench.report import Comparison
from bench.servers import BACKGROUND, LLAMA_SERVER, OURS, Server, llama_cpp_config, llama_server, modelyard_server
from modelyard.library import default_model
from modelyard_bench.drawing import save
from modelyard_bench.http_client import HttpResponse
from modelyard_bench.load import LoadGenerator, RoundLength, read_chat
from modelyard_bench.statistics import percentile

_SLOTS = 8
_WHOLE = "whole micro-batches"
_LIMIT_S = 900.0


# --- requests ---------------------------------------------------------------------------------------------------------


class Answer(Struct, frozen=True):
    """Times in seconds on one clock. `evaluated` are the prompt tokens that came from no cache."""

    sent: float
    tokens: int
    prompt: int
    evaluated: int
    text: str
    times: tuple[float, ...]  # of each event with text

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent

    def tokens_between(self, begin: float, end: float) -> float:
        """Tokens that arrived after `begin` and up to `end`; every event is assumed to hold the same number."""
        return self.tokens * sum(begin < at <= end for at in self.times) / len(self.times)

    def gaps(self, begin: float, end: float) -> list[float]:
        """The seconds between two events with text, where they touch this time."""
        return [b - a for a, b in itertools.pairwise(self.times) if b > begin and a < end]


def chat_body(model: str, messages: Sequence[dict[str, str]], tokens: int) -> bytes:
    """Streamed, greedy, and of exactly the requested length."""
    body: dict[str, Any] = {"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}, "logit_bias": NO_END}
    return msgspec.json.encode(body)


def chat(server: Server, *bodies: bytes) -> list[Answer]:
    """All of them at once, each on a connection of its own."""
    return uvloop.run(chat_async(server, *bodies))


async def chat_async(server: Server, *bodies: bytes) -> list[Answer]:
    client = HttpClient(server.url)
    requests = [client.request("POST", "/v1/chat/completions", body) for body in bodies]
    responses = await asyncio.gather(*(client.send(request, _LIMIT_S) for request in requests))
    await client.aclose()
    return [read_answer(response) for response in responses]


def read_answer(response: HttpResponse) -> Answer:
    """Ours reports how many prompt tokens were cached, llama-server how many it evaluated."""
    sample, text = read_chat(response)
    if sample.error is not None:
        raise RuntimeError(f"the response is not a complete stream: {sample.error}")
    events = [line[5:] for line in response.body.splitlines() if line.startswith(b"data:") and b"timings" in line]
    evaluated = msgspec.json.decode(events[-1])["timings"]["prompt_n"] if events else sample.evaluated_tokens
    times = tuple(token_times(response))
    return Answer(response.sent, sample.output_tokens, sample.prompt_tokens, evaluated, text, times)


# --- measurements -----------------------------------------------------------------------------------------------------


class Case(Struct, frozen=True):
    """`streams` at once, each with a prompt of `depth` tokens and `tokens` of output."""

    streams: int
    depth: int
    tokens: int

    def __str__(self) -> str:
        depth = f" at depth {self.depth:,}" if self.depth > 32 else ""
        return f"{self.streams} stream{'s' if self.streams > 1 else ''}{depth}"


class Plan(Struct, frozen=True):
    rounds: int = 5
    cases: tuple[Case, ...] = (
        *(Case(streams, 32, 96) for streams in (1, 2, 4, 8)),
        Case(1, 512, 64),
        Case(1, 4096, 48),
    )
    background_streams: int = 32
    beside: Case = Case(1, 3500, 8)  # read beside a stream of `streamed` tokens
    streamed: int = 256

    @property
    def window(self) -> int:
        return -(-max(case.depth + case.tokens for case in (*self.cases, self.beside)) // 256) * 256


QUICK = Plan(1, (Case(1, 32, 16), Case(2, 32, 16), Case(1, 128, 16)), 4, Case(1, 256, 8), 32)


class Measured(Struct, frozen=True):
    """Tokens per second of all streams together, the mean time to first token, the server's CPU time, which other
    programs disturb least, and the gaps between two tokens of a stream."""

    rate: float
    ttft: float
    cpu_s: float
    gap_p99: float = 0.0
    gap_max: float = 0.0


Rounds = dict[tuple[str, Case], list[Measured]]


def summarize(answers: list[Answer], cpu_s: float) -> Measured:
    """The rate counts while all streams run: from the last first token to the first last token. A clock that starts
    with any first token would penalize a server that answers one stream while it still reads the other prompts."""
    begin, end = max(answer.times[0] for answer in answers), min(answer.times[-1] for answer in answers)
    rate = sum(answer.tokens_between(begin, end) for answer in answers) / (end - begin)
    gaps = [gap for answer in answers for gap in answer.gaps(begin, end)]
    return Measured(rate, fmean(answer.ttft for answer in answers), cpu_s, percentile(gaps, 99), max(gaps))


def summarize_beside(stream: Answer, read: Answer, cpu_s: float) -> Measured:
    """The gaps of a stream while a prompt was read beside it. The rate counts the tokens of both, read and written."""
    begin, end = read.sent, read.times[0]
    gaps = stream.gaps(begin, end) or [end - begin]
    rate = (read.prompt + stream.tokens_between(begin, end)) / (end - begin)
    return Measured(rate, read.ttft, cpu_s, percentile(gaps, 99), max(gaps))


class EngineBenchmark:
    def __init__(self, plan: Plan, prompts: RandomPrompts, tick: Callable[[str], None]) -> None:
        self._plan, self._prompts, self._tick = plan, prompts, tick

    def run(self, servers: dict[str, Server]) -> tuple[Rounds, list[Measured], list[Measured]]:
        """All cases of both servers; then our single stream alone and with background streams."""
        found: Rounds = {(name, case): [] for name in servers for case in self._plan.cases}
        for name, server in servers.items():
            self._tick(f"warming up {name}")
            uvloop.run(self._measure(server, Case(_SLOTS, 32, 8)))
        for number in range(self._plan.rounds):
            for case in self._plan.cases:
                for name in servers if number % 2 == 0 else reversed(servers):
                    self._tick(f"{name}: {case.streams} × {case.depth} tokens")
                    found[name, case].append(uvloop.run(self._measure(servers[name], case)))
        alone, busy, case = [], [], self._plan.cases[0]
        for _ in range(self._plan.rounds):
            self._tick("alone")
            alone.append(uvloop.run(self._measure(servers[OURS], case)))
            self._tick(f"with {self._plan.background_streams} background streams")
            busy.append(uvloop.run(self._measure_busy(servers[OURS], case)))
        return found, alone, busy

    def run_caches(self, one: Server, two: Server) -> tuple[list[Measured], list[Measured]]:
        """Four streams in one cache, and in two caches of another server with as many sequences."""
        together, apart, case = list[Measured](), list[Measured](), Case(4, 32, self._plan.cases[0].tokens)
        sides = [("one cache", one, together, ("real",)), ("two caches", two, apart, ("real", "haiku"))]
        for name, server, _, models in sides:
            self._tick(f"warming up {name}")
            uvloop.run(self._measure(server, case, models))
        for number in range(self._plan.rounds):
            for name, server, found, models in sides if number % 2 == 0 else reversed(sides):
                self._tick(f"4 streams in {name}")
                found.append(uvloop.run(self._measure(server, case, models)))
        return together, apart

    def run_gaps(self, servers: dict[str, Server]) -> dict[str, list[Measured]]:
        """A stream beside a long prompt, on each of the servers."""
        found: dict[str, list[Measured]] = {name: [] for name in servers}
        for server in servers.values():
            uvloop.run(self._measure(server, Case(2, 32, 8)))
        for number in range(self._plan.rounds):
            for name in servers if number % 2 == 0 else reversed(servers):
                self._tick(f"{name}: a stream beside a prompt of {self._plan.beside.depth}")
                found[name].append(uvloop.run(self._measure_beside(servers[name])))
        return found

    async def _measure_beside(self, server: Server) -> Measured:
        plan, client = self._plan, HttpClient(server.url)
        body = chat_body("real", self._prompts.messages(32), plan.streamed)
        before = server.cpu_s()
        stream = asyncio.create_task(client.send(client.request("POST", "/v1/chat/completions", body), _LIMIT_S))
        while not stream.done() and not any(len(one.response.parts) > 4 for one in client.connections):
            await asyncio.wait([stream], timeout=0.005)
        read, *_ = await chat_async(server, chat_body("real", self._prompts.messages(plan.beside.depth), 8))
        answer = read_answer(await stream)
        await client.aclose()
        return summarize_beside(answer, read, server.cpu_s() - before)

    async def _measure(self, server: Server, case: Case, models: Sequence[str] = ("real",)) -> Measured:
        """The streams take turns with the models."""
        prompts = [self._prompts.messages(case.depth) for _ in range(case.streams)]
        names = itertools.cycle(models)
        bodies = [chat_body(next(names), messages, case.tokens) for messages in prompts]
        before = server.cpu_s()
        answers = await chat_async(server, *bodies)
        cpu_s = server.cpu_s() - before
        for answer in answers:
            if abs(answer.prompt - case.depth) > 2 or answer.tokens != case.tokens:
                raise RuntimeError(f"{case} gave {answer.prompt} prompt tokens and {answer.tokens} output tokens")
        return summarize(answers, cpu_s)

    async def _measure_busy(self, server: Server, case: Case) -> Measured:
        background = await start_streams(server, BACKGROUND, self._plan.background_streams)
        try:
            return await self._measure(server, case)
        finally:
            background.cancel()
            await asyncio.gather(background, return_exceptions=True)


async def start_streams(server: Server, model: str, streams: int) -> asyncio.Task[None]:
    """Streams that run one after the other until the task is cancelled; returns when all of them run."""
    body = {"model": model, "messages": [{"role": "user", "content": "Go on."}], "max_tokens": 1000, "stream": True}

    async def run(target: RequestTarget) -> None:
        async with target:
            await LoadGenerator(target, None, RoundLength(seconds=float("inf")), streams=streams).run()

    target = RequestTarget(server.url, msgspec.json.encode(body).decode(), limit_s=_LIMIT_S)
    task = asyncio.create_task(run(target))
    while sum(bool(connection.response.parts) for connection in target.client.connections) < streams:
        await asyncio.sleep(0.01)
        if task.done():
            raise RuntimeError("the background streams did not start")
    return task


def comparisons(found: Rounds, alone: list[Measured], busy: list[Measured]) -> Iterator[Comparison]:
    cases = list(dict.fromkeys(case for _, case in found))

    def compare(name: str, unit: str, case: Case, field: str, bound: float | None = None) -> Comparison:
        ours, theirs = (tuple(getattr(one, field) for one in found[side, case]) for side in (OURS, LLAMA_SERVER))
        return Comparison(name, unit, ours, theirs, bound, at_most=field == "ttft")

    for case in cases:
        yield compare(str(case), "tok/s", case, "rate", {1: 0.97, 8: 1.0}.get(case.streams))
        yield compare(f"{case}: p99 gap", "s", case, "gap_p99")
    for case in (case for case in cases if case.streams == 1):
        yield compare(f"first token, prompt of {case.depth:,}", "s", case, "ttft", 1.05)
    for case in cases:
        yield compare(f"{case}: CPU of prompt and output", "s", case, "cpu_s")
    with_background, without = (tuple(one.rate for one in side) for side in (busy, alone))
    yield Comparison("ours with background streams, against alone", "tok/s", with_background, without, 0.9)


def caches_comparison(together: list[Measured], apart: list[Measured]) -> Comparison:
    two, one = (tuple(each.rate for each in side) for side in (apart, together))
    return Comparison("ours, 2 + 2 streams in two caches, against 4 in one", "tok/s", two, one, 0.97)


def gap_comparisons(found: dict[str, list[Measured]], plan: Plan) -> Iterator[Comparison]:
    """Without a bound: on a machine that others use, a gap is theirs, too."""
    fields = {"longest gap": ("gap_max", "s"), "p99 gap": ("gap_p99", "s"), "both": ("rate", "tok/s")}
    fields |= {"its first token": ("ttft", "s"), "CPU": ("cpu_s", "s")}
    for side in (LLAMA_SERVER, _WHOLE):
        for name, (field, unit) in fields.items():
            ours, theirs = (tuple(getattr(one, field) for one in found[each]) for each in (OURS, side))
            against = "" if side == LLAMA_SERVER else ", against whole micro-batches"
            yield Comparison(f"a stream beside {plan.beside.depth:,}: {name}{against}", unit, ours, theirs)


def measure_gaps(plan: Plan, model: Path, threads: int, tick: Callable[[str], None]) -> Iterator[Comparison]:
    paced, whole = (llama_cpp_config(model, threads, {"main": (plan.window, 2)}) for _ in range(2))
    whole["models"]["real"]["max_gap_ms"] = 0
    with ExitStack() as stack:
        servers = {OURS: stack.enter_context(modelyard_server(paced))}
        servers[_WHOLE] = stack.enter_context(modelyard_server(whole))
        servers[LLAMA_SERVER] = stack.enter_context(llama_server(model, threads, plan.window, 2, "--cache-ram", "0"))
        found = EngineBenchmark(plan, RandomPrompts(tokenizer_folder()), tick).run_gaps(servers)
    yield from gap_comparisons(found, plan)


def measure(plan: Plan, model: Path, threads: int, tick: Callable[[str], None]) -> list[Comparison]:
    config = llama_cpp_config(model, threads, {"main": (plan.window, _SLOTS)})
    with ExitStack() as stack:
        ours = stack.enter_context(modelyard_server(config))
        theirs = stack.enter_context(llama_server(model, threads, plan.window, _SLOTS, "--cache-ram", "0"))
        benchmark = EngineBenchmark(plan, RandomPrompts(tokenizer_folder()), tick)
        return list(comparisons(*benchmark.run({OURS: ours, LLAMA_SERVER: theirs})))


def measure_caches(plan: Plan, model: Path, threads: int, tick: Callable[[str], None]) -> Comparison:
    with ExitStack() as stack:
        layouts = {"main": (plan.window, 4)}, {"main": (plan.window, 2), "fast": (plan.window, 2)}
        servers = [modelyard_server(llama_cpp_config(model, threads, caches)) for caches in layouts]
        benchmark = EngineBenchmark(plan, RandomPrompts(tokenizer_folder()), tick)
        return caches_comparison(*benchmark.run_caches(*map(stack.enter_context, servers)))


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers end, too
    parser = argparse.ArgumentParser(description="Measure the llama.cpp engine beside llama-server.")
    parser.add_argument("--quick", action="store_true", help="once each, few tokens: to see that it works")
    parser.add_argument("--caches", action="store_true", help="only 2 + 2 streams in two caches against 4 in one")
    parser.add_argument("--gaps", action="store_true", help="only a stream beside a long prompt")
    parser.add_argument("--model", type=Path, help="another GGUF with SmolLM2's vocabulary; default: the default model")
    parser.add_argument("--threads", type=int, default=1, help="of both servers; on a busy machine 1 is the fairest")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="save every measurement in this file")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the ratios into this file")
    options = parser.parse_args()
    out, plan = report.console(), QUICK if options.quick else Plan(rounds=options.rounds)
    with Progress(console=out, transient=True) as progress:
        rest = 2 + plan.rounds * (2 * len(plan.cases) + 2)
        steps = (not options.gaps) * (2 + 2 * plan.rounds) + (not options.caches) * 3 * plan.rounds
        task = progress.add_task("", total=steps + (0 if options.caches or options.gaps else rest))
        tick = lambda what: progress.update(task, description=what, advance=1)  # noqa: E731
        given = plan, options.model or default_model.fetch(), options.threads, tick
        found = [] if options.caches or options.gaps else measure(*given)
        if not options.caches:
            found += measure_gaps(*given)
        if not options.gaps:
            found.append(measure_caches(*given))
    title = f"The engine beside llama-server, {options.threads} thread(s)"
    notes = [
        f"{plan.rounds} interleaved round(s), means, ratios with 95 % by Student's t; window {plan.window} × {_SLOTS}",
        "both through HTTP, chat completions streamed, no speculation, prompts never seen before, equal lengths",
        f"background: {plan.background_streams} streams of 50 tokens/s from the fake engine in the same process",
    ]
    report.show(title, found, (OURS, LLAMA_SERVER), notes, out)
    if options.json is not None:
        report.save_json(found, notes, options.json)
    if options.svg is not None:
        save(report.draw(title, found), options.svg)


if __name__ == "__main__":
    main()
