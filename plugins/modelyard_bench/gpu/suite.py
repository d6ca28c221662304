"""What is measured, always through HTTP with prompts of random token ids that no cache has seen.

    greedy, sampled    tokens per second of 1 to 64 streams together, while all of them run; the widest first, so that a
                       few streams follow a burst that has used every slot
    prefill            prompt tokens per second of 1 and of 8 long prompts at once
    agents             so many requests as there are slots at once, which share most of their prompt; beside the time
                       that the same server takes for the distinct tokens
    after them         as many short requests, while every slot is full of long conversations

In each round the servers come one after the other for each case, in alternating order.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing
from statistics import fmean, median
from typing import Any

import msgspec
from msgspec import Struct

from modelyard.core.errors import Unavailable
from modelyard_bench.gpu.servers import Server
from modelyard_bench.http_client import HttpClient, HttpResponse
from modelyard_bench.statistics import ratio_interval

_GREEDY: dict[str, Any] = {"temperature": 0}
_SAMPLED: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9}
_KINDS = {"greedy": _GREEDY, "sampled": _SAMPLED}
_IDS = range(300, 4_000)  # ordinary tokens of any vocabulary
_SHORT = 64  # tokens of a prompt, where the prompt is not measured
_SHARED, _OWN = 3_000, 500
_FEW = 8
_LIMIT_S = 600.0
_EVENT = re.compile(rb'"text": ?"[^"]')  # with text: the last event of a stream has none
_DATA = b"\n\n"

Say = Callable[[str], None]


class Settings(Struct, frozen=True):
    widths: tuple[int, ...]
    rounds: int
    output_tokens: int
    prompt_tokens: int
    seed: int | None = None

    @property
    def slots(self) -> int:
        return max(self.widths)

    @property
    def window(self) -> int:
        """Tokens of one conversation, in whole blocks."""
        return -(-(max(self.prompt_tokens, _SHARED + _OWN) + self.output_tokens) // 256) * 256


class Case(Struct, frozen=True):
    name: str
    unit: str = "tok/s"
    more_is_better: bool = True


class Results:
    """The values of each case and server, one for each round."""

    def __init__(self) -> None:
        self.rates: dict[tuple[Case, str], list[float]] = {}
        self._servers: dict[str, Server] = {}

    def add(self, case: Case, server: Server, value: float) -> None:
        self._servers[server.name] = server
        self.rates.setdefault((case, server.name), []).append(value)

    def cases(self) -> list[Case]:
        return list(dict.fromkeys(case for case, _ in self.rates))

    def peers(self) -> list[Server]:
        return [server for server in self._servers.values() if server.peer is None]

    def ours_beside(self, peer: Server) -> Server:
        return next(server for server in self._servers.values() if server.peer == peer.name and not server.few)

    def notes(self) -> list[str]:
        """What one server's cases say about each other."""
        return [*self._sampling(), *self._few_of_many(), *self._agents()]

    def _sampling(self) -> Iterator[str]:
        for (case, server), found in self.rates.items():
            greedy = self.rates.get((_decode_case("greedy", _width(case)), server)) if _is_sampled(case) else None
            if greedy is not None and len(greedy) == len(found):
                yield f"{server}, {case.name}: {ratio_interval(found, greedy)} of greedy"

    def _few_of_many(self) -> Iterator[str]:
        for few in (server for server in self._servers.values() if server.few):
            ours = next(each for each in self._servers.values() if each.peer == few.peer and not each.few)
            for kind in _KINDS:
                case = _decode_case(kind, _FEW)
                some, all_ = (self.rates.get((case, each.name), []) for each in (ours, few))
                if some and len(some) == len(all_):
                    ratio = ratio_interval(some, all_)
                    yield f"{case.name}: all slots of {few.name} {fmean(all_):,.0f}; few of many {ratio}"

    def _agents(self) -> Iterator[str]:
        last = {server: found for (case, server), found in self.rates.items() if case.name.endswith("last first token")}
        read = {server: found for (case, server), found in self.rates.items() if case.name.startswith("reading")}
        for server, found in last.items():
            ratio = fmean(found) / fmean(read[server])
            yield f"{server}: agents' last first token {ratio:.2f} of reading the tokens once"


def _decode_case(kind: str, width: int) -> Case:
    return Case(f"{kind}, {width} stream{'s' * (width > 1)}")


def _is_sampled(case: Case) -> bool:
    return case.name.startswith("sampled")


def _width(case: Case) -> int:
    return int(case.name.split()[1])


# --- requests ---------------------------------------------------------------------------------------------------------


class Answer(Struct, frozen=True):
    """Times in seconds on one clock: when it was sent, and of each event with text."""

    sent: float
    tokens: int
    times: tuple[float, ...]

    def tokens_between(self, begin: float, end: float) -> float:
        """Every event is assumed to hold the same number."""
        return self.tokens * sum(begin < at <= end for at in self.times) / len(self.times)


def read_answer(response: HttpResponse) -> Answer:
    if response.error is not None or response.status != 200:
        raise Unavailable(response.error or f"{response.status}: {response.body[:500].decode(errors='replace')}")
    times: list[float] = []
    rest = b""
    for at, data in response.parts:
        head, _, rest = (rest + data).rpartition(_DATA)
        times += [at] * len(_EVENT.findall(head))
    usage: dict[str, Any] = {}
    for line in response.body.splitlines():
        if line.startswith(b"data: {") and b'"usage"' in line:
            usage = msgspec.json.decode(line[6:]).get("usage") or usage
    if not times or not usage:
        raise Unavailable(f"the response is not a complete stream: {response.body[-500:].decode(errors='replace')}")
    return Answer(response.sent, usage["completion_tokens"], tuple(times))


class Client(Struct, frozen=True):
    http: HttpClient
    server: Server

    async def ask(self, prompts: Sequence[Sequence[int]], tokens: int, sampling: dict[str, Any]) -> list[Answer]:
        """All at once, each on a connection of its own."""
        common = {"model": self.server.model, "max_tokens": tokens, "ignore_eos": True, "stream": True, **sampling}
        common["stream_options"] = {"include_usage": True}
        bodies = [msgspec.json.encode({**common, "prompt": prompt}) for prompt in prompts]
        sending = (self.http.send("POST", "/v1/completions", body, _LIMIT_S) for body in bodies)
        return [read_answer(response) for response in await asyncio.gather(*sending)]


class Prompts:
    def __init__(self, seed: int | None) -> None:
        self._random = random.Random(seed)  # noqa: S311

    def ids(self, count: int) -> list[int]:
        return self._random.choices(_IDS, k=count)

    def many(self, count: int, tokens: int) -> list[list[int]]:
        return [self.ids(tokens) for _ in range(count)]


# --- the cases --------------------------------------------------------------------------------------------------------


def rate(answers: Sequence[Answer]) -> float:
    """Tokens per second while all of them run."""
    begin, end = max(answer.times[0] for answer in answers), min(answer.times[-1] for answer in answers)
    return sum(answer.tokens_between(begin, end) for answer in answers) / (end - begin)


def first_tokens(answers: Sequence[Answer]) -> list[float]:
    began = min(answer.sent for answer in answers)
    return sorted(answer.times[0] - began for answer in answers)


async def measure(groups: Sequence[Sequence[Server]], settings: Settings, results: Results, say: Say) -> None:
    prompts = Prompts(settings.seed)
    async with AsyncExitStack() as stack:
        clients = [
            [Client(await stack.enter_async_context(aclosing(HttpClient(each.url))), each) for each in group]
            for group in groups
        ]
        whole = [client for group in clients for client in group if not client.server.few]
        for client in whole:
            await client.ask(prompts.many(settings.slots, _SHORT), 8, _GREEDY)
            await client.ask(prompts.many(settings.slots, _SHORT), 8, _SAMPLED)
        for number in range(settings.rounds):
            ordered = whole if number % 2 == 0 else whole[::-1]
            few = [client for group in clients for client in group if client.server.few]
            for width in sorted(settings.widths, reverse=True):
                for kind, sampling in _KINDS.items():
                    case = _decode_case(kind, width)
                    for client in [*ordered, *(few if width == _FEW else ())]:
                        answers = await client.ask(prompts.many(width, _SHORT), settings.output_tokens, sampling)
                        results.add(case, client.server, rate(answers))
                    say(f"round {number + 1}: {case.name}: {_shown(results, case)}")
            for client in ordered[::-1]:
                for step in (_prefill, _agents):
                    for case, value in (await step(client, prompts, settings)).items():
                        results.add(case, client.server, value)
                        say(f"round {number + 1}: {case.name}: {client.server.name} {value:,.4g} {case.unit}")


def _shown(results: Results, case: Case) -> str:
    return ", ".join(f"{server} {found[-1]:,.0f}" for (each, server), found in results.rates.items() if each == case)


async def _prefill(client: Client, prompts: Prompts, settings: Settings) -> dict[Case, float]:
    found = {}
    for count in (1, _FEW):
        if count <= settings.slots:
            answers = await client.ask(prompts.many(count, settings.prompt_tokens), 1, _GREEDY)
            case = Case(f"prefill, {count} prompt{'s' * (count > 1)} of {settings.prompt_tokens:,} tokens")
            found[case] = count * settings.prompt_tokens / first_tokens(answers)[-1]
    return found


async def _agents(client: Client, prompts: Prompts, settings: Settings) -> dict[Case, float]:
    slots, shared = settings.slots, prompts.ids(_SHARED)
    distinct = _SHARED + slots * _OWN
    parts = max(1, -(-distinct // settings.prompt_tokens))
    once = await client.ask(prompts.many(parts, distinct // parts), 1, _GREEDY)
    answers = await client.ask([[*shared, *prompts.ids(_OWN)] for _ in range(slots)], 8, _GREEDY)
    short = await client.ask(prompts.many(slots, _SHORT), 8, _GREEDY)
    agents, name = first_tokens(answers), f"{slots} agents, {_SHARED:,} shared + {_OWN} own"
    return {
        Case(case, "s", more_is_better=False): value
        for case, value in {
            f"{name}: first token p50": median(agents),
            f"{name}: last first token": agents[-1],
            f"reading their {distinct:,} distinct tokens": first_tokens(once)[-1],
            f"{slots} short requests after them: first token p50": median(first_tokens(short)),
        }.items()
    }
