"""Replays an agent's session against our server and against llama-server: tokens evaluated, times, peak memory.

    python bench/agents.py [--quick] [--turns N] [--rounds N] [--threads N] [--json FILE] [--svg FILE]

llama-server runs twice: with its best flags (a slot for every conversation and its host prompt cache), and with the KV
memory that we have and no host cache. Every run starts its server anew. `bench/session.py` holds the session.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from time import perf_counter
from typing import Any

from msgspec import Struct, structs
from rich.console import Console
from rich.progress import Progress

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # a script finds what stands beside it; we need the root

from bench import compared, peers
from bench.asking import ask, body
from bench.peers import OURS
from bench.ratios import Comparison
from bench.servers import Server
from bench.session import QUICK, Conversation, Plan, replay
from modelyard.library import default_model

BEST, EQUAL = "llama-server, best", "llama-server, equal KV"
# A main conversation with two sub-agents, and four kinds of background requests: 32,768 cells of KV in all.
_WINDOW, _TALKS = 8192, 3
_SMALL_WINDOW, _SMALL_TALKS = 2048, 4
_EQUAL_SLOTS = (_WINDOW * _TALKS + _SMALL_WINDOW * _SMALL_TALKS) // _WINDOW

Start = Callable[[], AbstractContextManager[Server]]


class Outcome(Struct, frozen=True):
    """Of one session: tokens and seconds summed over its requests."""

    requests: int
    prompt: int
    evaluated: int
    answered: int
    ttft: float
    seconds: float
    cpu_s: float
    peak_mb: float


def run(server: Server, plan: Plan, tick: Callable[[Conversation], None]) -> Outcome:
    answers, cpu_s, began = [], server.cpu_s(), perf_counter()
    for talk in replay(plan):
        tick(talk)
        answer = ask(server.port, body(talk.model, talk.messages, talk.tokens))[0]
        talk.hears(answer.text)
        answers.append(answer)
    seconds = perf_counter() - began
    return Outcome(
        requests=len(answers),
        prompt=sum(answer.prompt for answer in answers),
        evaluated=sum(answer.evaluated for answer in answers),
        answered=sum(answer.tokens for answer in answers),
        ttft=sum(answer.ttft for answer in answers),
        seconds=seconds,
        cpu_s=server.cpu_s() - cpu_s,
        peak_mb=server.peak_mb(),
    )


def subjects(model: Path, threads: int) -> dict[str, Start]:
    caches = {"main": (_WINDOW, _TALKS), "fast": (_SMALL_WINDOW, _SMALL_TALKS)}
    config: dict[str, Any] = peers.configuration(model, threads, caches)
    slots = _TALKS + _SMALL_TALKS
    return {
        OURS: lambda: peers.modelyard(config),
        BEST: lambda: peers.llama_server(model, threads, _WINDOW, slots),
        EQUAL: lambda: peers.llama_server(model, threads, _WINDOW, _EQUAL_SLOTS, "--cache-ram", "0"),
    }


Found = Mapping[str, list[Outcome]]


def measure(plan: Plan, starts: Mapping[str, Start], rounds: int, tick: Callable[[str], None]) -> Found:
    """In turns; the one with equal memory once, since only its count of tokens is compared, and that does not vary."""
    found: dict[str, list[Outcome]] = {name: [] for name in starts}
    for number in range(rounds):
        for name in starts if number % 2 == 0 else reversed(starts):
            if name == EQUAL and found[EQUAL]:
                continue
            with starts[name]() as server:
                found[name].append(run(server, plan, lambda talk, name=name: tick(f"{name}: {talk.name}")))  # type: ignore[misc]
    return found


def comparisons(found: Found) -> Iterator[Comparison]:
    ours, best, equal = (found.get(name, []) for name in (OURS, BEST, EQUAL))
    if equal:
        once = ours[: len(equal)]
        yield _compared("prompt tokens evaluated, equal KV memory", "", "evaluated", once, equal, 0.1)
    yield _compared("prompt tokens evaluated", "", "evaluated", ours, best, 1.0)
    yield _compared("times to the first token, summed", "s", "ttft", ours, best, 0.9)
    yield _compared("the whole session", "s", "seconds", ours, best, 1.0)
    yield _compared("CPU of the whole session", "s", "cpu_s", ours, best, None)
    yield _compared("peak memory", "MB", "peak_mb", ours, best, None)


def _compared(
    what: str, unit: str, field: str, ours: list[Outcome], theirs: list[Outcome], bound: float | None
) -> Comparison:
    sides = (tuple(float(structs.asdict(one)[field]) for one in side) for side in (ours, theirs))
    return Comparison(what, unit, *sides, bound, "at most")


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers end, too
    options, console = _options(), Console()
    if not console.is_terminal:
        console.width = 130
    plan = QUICK if options.quick else structs.replace(Plan(), turns=options.turns)
    rounds = 1 if options.quick else options.rounds
    starts = subjects(options.model or default_model.fetch(), options.threads)
    if options.skip_equal:
        del starts[EQUAL]
    total = (rounds * 2 + (EQUAL in starts)) * sum(1 for _ in replay(plan))
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=total)
        found = measure(plan, starts, rounds, lambda what: progress.update(task, description=what, advance=1))
    title, lines, notes = "An agent's session", list(comparisons(found)), _notes(found, plan, options.threads)
    compared.show(title, lines, (OURS, "llama-server"), notes, console)
    if options.json is not None:
        compared.keep(lines, notes, options.json)
    if options.svg is not None:
        options.svg.write_text(compared.draw(title, lines), encoding="utf-8")


def _notes(found: Found, plan: Plan, threads: int) -> list[str]:
    notes = [
        f"{plan.turns} turns on a system prompt of {plan.system:,} characters, four small requests between turns, "
        f"{len(plan.sub_agents)} sub-agent(s) of five turns; {threads} thread(s), one request at a time",
    ]
    for name, outcomes in found.items():
        one = outcomes[0]
        notes.append(
            f"{name}: {one.requests} requests, {one.evaluated:,} of {one.prompt:,} prompt tokens evaluated "
            f"({one.evaluated / one.prompt:.1%}), {one.answered:,} answered, "
            f"{one.seconds:,.0f} s (first tokens {one.ttft:,.0f}), CPU {one.cpu_s:,.0f} s, peak {one.peak_mb:,.0f} MB"
        )
    return notes


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Replay an agent's session against our server and llama-server.")
    parser.add_argument("--quick", action="store_true", help="once, with a short session: to see that it works")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of each server")
    parser.add_argument("--model", type=Path, help="another GGUF with SmolLM2's vocabulary; unset: the default model")
    parser.add_argument("--skip-equal", action="store_true", help="leave out the run that evaluates nearly everything")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep every measurement in this file")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the ratios into this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
