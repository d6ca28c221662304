"""An agent's session replayed against our server and llama-server: tokens evaluated, times, peak memory.

    python bench/agents.py [--quick] [--turns N] [--rounds N] [--threads N] [--json FILE] [--svg FILE]

llama-server runs in two configurations: its best (a slot for every conversation, and its host prompt cache), and with
as much KV memory as ours and no host cache. Every run starts a new server.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from time import perf_counter
from typing import Literal

from msgspec import Struct, structs
from rich.progress import Progress

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # a script's own folder is on the path, not the root

from bench import report
from bench.engine import chat, chat_body
from bench.report import Comparison
from bench.servers import LLAMA_SERVER, OURS, Server, llama_cpp_config, llama_server, modelyard_server
from modelyard.library import default_model
from modelyard_bench.drawing import save

BEST, EQUAL = f"{LLAMA_SERVER}, best", f"{LLAMA_SERVER}, equal KV"
# A main conversation with two sub-agents, and four kinds of background requests: 32,768 cells of KV cache in all.
_WINDOW, _CONVERSATIONS = 8192, 3
_SMALL_WINDOW, _SMALL_CONVERSATIONS = 2048, 4
_EQUAL_SLOTS = (_WINDOW * _CONVERSATIONS + _SMALL_WINDOW * _SMALL_CONVERSATIONS) // _WINDOW

StartServer = Callable[[], AbstractContextManager[Server]]


# --- the session ------------------------------------------------------------------------------------------------------

_SUB_AGENT_TURNS = 5
_SUBJECTS = ("the parser", "this file", "a failing test", "the build", "an argument", "the user's question", "the diff")
_VERBS = ("reads", "checks", "writes", "explains", "compares", "removes", "repeats", "keeps", "asks for")
_OBJECTS = (
    "the smallest change",
    "every caller",
    "a short answer",
    "the log",
    "two examples",
    "the path",
    "one reason",
)
_TOOLS = ("read_file", "write_file", "run_command", "search", "list_folder", "fetch_page", "edit_text", "ask_user")
_SMALL_TASKS = (
    "Give the conversation a title of at most six words.",
    "Say whether the message begins a new subject: yes or no.",
    "Sum up the last step in one line.",
    "Name the files that the command may change.",
)


class Conversation:
    def __init__(
        self, name: str, kind: Literal["main", "background", "sub-agent"], model: str, system: str, tokens: int
    ) -> None:
        self.name, self.kind, self.model, self.tokens = name, kind, model, tokens
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}]

    def add(self, role: Literal["user", "assistant"], text: str) -> None:
        self.messages.append({"role": role, "content": text})


class Plan(Struct, frozen=True):
    """`system`, `sub_system` and `small_system` are the characters of system prompts."""

    turns: int = 20
    tokens: int = 32
    small_tokens: int = 12
    sub_agents: tuple[int, ...] = (6, 13)  # after these turns
    system: int = 20_000
    sub_system: int = 6_000
    small_system: int = 1_200


QUICK = Plan(turns=3, tokens=6, small_tokens=4, sub_agents=(1,), system=800, sub_system=500, small_system=300)


def session(plan: Plan) -> Iterator[Conversation]:
    """The conversation of the next request, again and again: a long one with tools, small requests of other kinds
    between its turns, and sub-agents. The caller adds the response to it, as an agent does. The texts are equal in
    every run, and every response has a fixed length, so that two servers have the same work."""
    writer = TextWriter()
    main = Conversation("main", "main", "claude-sonnet", writer.system("You are an agent.", plan.system), plan.tokens)
    small = [writer.system(task, plan.small_system) for task in _SMALL_TASKS]
    for turn in range(plan.turns):
        main.add("user", writer.tool_result(turn))
        yield main
        if turn in plan.sub_agents:
            number = plan.sub_agents.index(turn)
            system = writer.system(f"You are sub-agent {number}: look around and report.", plan.sub_system)
            agent = Conversation(f"sub-agent {number}", "sub-agent", "claude-sonnet", system, plan.tokens)
            for step in range(_SUB_AGENT_TURNS):
                agent.add("user", writer.tool_result(step))
                yield agent
        if turn < plan.turns - 1:
            for number, system in enumerate(small):
                request = Conversation(f"background {number}", "background", "claude-haiku", system, plan.small_tokens)
                request.add("user", f"Step {turn}: {writer.sentence()}")
                yield request


class TextWriter:
    def __init__(self) -> None:
        self._rng = random.Random(7)

    def sentence(self) -> str:
        subject, verb, thing = (self._rng.choice(words) for words in (_SUBJECTS, _VERBS, _OBJECTS))
        return f"{subject.capitalize()} {verb} {thing} {self._rng.randrange(1000)} times."

    def system(self, opening: str, characters: int) -> str:
        """Rules and tools; the tools are plain text, because this model's template has none."""
        tools = [f'Tool {name}: {{"path": "string", "why": "{self.sentence()}"}}' for name in _TOOLS]
        lines = [opening, *tools]
        while sum(map(len, lines)) + len(lines) < characters:
            lines.append(self.sentence())
        return "\n".join(lines)[:characters]

    def tool_result(self, turn: int) -> str:
        sentences = " ".join(self.sentence() for _ in range(3))
        return f"Result {turn} of {self._rng.choice(_TOOLS)}: {sentences} Go on."


# --- measurements -----------------------------------------------------------------------------------------------------


class SessionCost(Struct, frozen=True):
    """Tokens and seconds, summed over the requests of a session."""

    requests: int
    prompt: int
    evaluated: int
    output: int
    ttft: float
    seconds: float
    cpu_s: float
    peak_mb: float


def run(server: Server, plan: Plan, tick: Callable[[Conversation], None]) -> SessionCost:
    answers, cpu_s, began = [], server.cpu_s(), perf_counter()
    for conversation in session(plan):
        tick(conversation)
        answer = chat(server, chat_body(conversation.model, conversation.messages, conversation.tokens))[0]
        conversation.add("assistant", answer.text)
        answers.append(answer)
    return SessionCost(
        requests=len(answers),
        prompt=sum(answer.prompt for answer in answers),
        evaluated=sum(answer.evaluated for answer in answers),
        output=sum(answer.tokens for answer in answers),
        ttft=sum(answer.ttft for answer in answers),
        seconds=perf_counter() - began,
        cpu_s=server.cpu_s() - cpu_s,
        peak_mb=server.peak_mb(),
    )


def servers(model: Path, threads: int) -> dict[str, StartServer]:
    caches = {"main": (_WINDOW, _CONVERSATIONS), "fast": (_SMALL_WINDOW, _SMALL_CONVERSATIONS)}
    config = llama_cpp_config(model, threads, caches)
    slots = _CONVERSATIONS + _SMALL_CONVERSATIONS
    return {
        OURS: lambda: modelyard_server(config),
        BEST: lambda: llama_server(model, threads, _WINDOW, slots),
        EQUAL: lambda: llama_server(model, threads, _WINDOW, _EQUAL_SLOTS, "--cache-ram", "0"),
    }


def measure(
    plan: Plan, starts: Mapping[str, StartServer], rounds: int, tick: Callable[[str], None]
) -> dict[str, list[SessionCost]]:
    """Interleaved; the server with equal KV memory once, because only its token count is compared, which is fixed."""
    found: dict[str, list[SessionCost]] = {name: [] for name in starts}
    for number in range(rounds):
        for name in list(starts) if number % 2 == 0 else list(starts)[::-1]:
            if name == EQUAL and found[EQUAL]:
                continue
            with starts[name]() as server:
                found[name].append(run(server, plan, lambda one, name=name: tick(f"{name}: {one.name}")))  # type: ignore[misc]
    return found


def comparisons(found: Mapping[str, list[SessionCost]]) -> Iterator[Comparison]:
    ours, best, equal = (found.get(name, []) for name in (OURS, BEST, EQUAL))

    def compare(name: str, unit: str, field: str, theirs: list[SessionCost], bound: float | None) -> Comparison:
        first, second = (tuple(float(getattr(one, field)) for one in side) for side in (ours[: len(theirs)], theirs))
        return Comparison(name, unit, first, second, bound, at_most=True)

    if equal:
        yield compare("prompt tokens evaluated, equal KV memory", "", "evaluated", equal, 0.1)
    yield compare("prompt tokens evaluated", "", "evaluated", best, 1.0)
    yield compare("times to first token, summed", "s", "ttft", best, 0.9)
    yield compare("the whole session", "s", "seconds", best, 1.0)
    yield compare("CPU of the whole session", "s", "cpu_s", best, None)
    yield compare("peak memory", "MiB", "peak_mb", best, None)


def _notes(found: Mapping[str, list[SessionCost]], plan: Plan, threads: int) -> list[str]:
    notes = [
        f"{plan.turns} turns on a system prompt of {plan.system:,} characters, four small requests between turns, "
        f"{len(plan.sub_agents)} sub-agent(s) of five turns; {threads} thread(s), one request at a time",
    ]
    for name, costs in found.items():
        one = costs[0]
        notes.append(
            f"{name}: {one.requests} requests, {one.evaluated:,} of {one.prompt:,} prompt tokens evaluated "
            f"({one.evaluated / one.prompt:.1%}), {one.output:,} output tokens, "
            f"{one.seconds:,.0f} s ({one.ttft:,.0f} to first tokens), CPU {one.cpu_s:,.0f} s, {one.peak_mb:,.0f} MiB"
        )
    return notes


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers end, too
    parser = argparse.ArgumentParser(description="Replay an agent's session against our server and llama-server.")
    parser.add_argument("--quick", action="store_true", help="once, with a short session: to see that it works")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of each server")
    parser.add_argument("--model", type=Path, help="another GGUF with SmolLM2's vocabulary; default: the default model")
    parser.add_argument("--skip-equal", action="store_true", help="leave out the run that evaluates nearly everything")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save every measurement in this file")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the ratios into this file")
    options = parser.parse_args()
    out, plan = report.console(), QUICK if options.quick else structs.replace(Plan(), turns=options.turns)
    rounds = 1 if options.quick else options.rounds
    starts = servers(options.model or default_model.fetch(), options.threads)
    if options.skip_equal:
        del starts[EQUAL]
    total = (rounds * 2 + (EQUAL in starts)) * sum(1 for _ in session(plan))
    with Progress(console=out, transient=True) as progress:
        task = progress.add_task("", total=total)
        found = measure(plan, starts, rounds, lambda what: progress.update(task, description=what, advance=1))
    title, lines, notes = "An agent's session", list(comparisons(found)), _notes(found, plan, options.threads)
    report.show(title, lines, (OURS, LLAMA_SERVER), notes, out)
    if options.json is not None:
        report.save_json(lines, notes, options.json)
    if options.svg is not None:
        save(report.draw(title, lines), options.svg)


if __name__ == "__main__":
    main()
