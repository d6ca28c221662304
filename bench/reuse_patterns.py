"""How many prompt tokens of typical mixes of conversations are evaluated, against the least that any memory allows.

    python -m bench.reuse --patterns [--only NAME] [--skip-llama-server] [--json FILE]

Each pattern is a list of rounds of prompts, as token ids. It runs with a session per conversation and without, each
request after the other and all requests of a round at once, on our server and on a llama-server with as many slots.
The minimum is what a server evaluates that forgets nothing: of each prompt what no earlier one began with. The model
has one layer: what is evaluated depends on placement, not on weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import httpx
from msgspec import Struct
from rich.table import Table

from bench.servers import llama_server
from tests.live_server import live_server

WINDOW, SLOTS, TURN, TURNS = 16384, 4, 200, 4
GOAL = 1.05
Ids = list[int]


class Sent(Struct, frozen=True):
    """A prompt of one conversation. `session` is what a client that names sessions would send."""

    ids: Ids
    session: str


Rounds = list[list[Sent]]


def some_tokens(count: int, *seed: object) -> Ids:
    random = Random(repr(seed))
    return [random.randrange(1000, 40000) for _ in range(count)]


def _agents(count: int, shared: int, own: int) -> Rounds:
    """Each agent's own conversation behind a system prompt of all, one turn per round."""
    system = some_tokens(shared, "system", count)
    talks = [system + some_tokens(own, count, agent) for agent in range(count)]
    return [
        [Sent(talk + some_tokens(TURN * turn, "turns", agent), str(agent)) for agent, talk in enumerate(talks)]
        for turn in range(TURNS)
    ]


def _sub_agents() -> Rounds:
    """Under the session of their parent, with system prompts of their own."""
    main, rounds = some_tokens(6000, "main"), Rounds()
    for turn in range(TURNS):
        rounds.append([Sent(main + some_tokens(TURN * turn, "main turns"), "main")])
        for agent in range(2):
            talk = some_tokens(2500, "sub-agent", agent)
            rounds.append([Sent(talk + some_tokens(TURN * turn, "sub turns", agent), "main")])
    return rounds


def _edits() -> Rounds:
    """A message in the middle is edited, and then the original goes on."""
    original, edited = some_tokens(8000, "original"), some_tokens(3000, "edited")
    rounds = Rounds()
    for turn in range(TURNS):
        rounds.append([Sent(original + some_tokens(TURN * turn, "original turns"), "a")])
        rounds.append([Sent(original[:4000] + edited + some_tokens(TURN * turn, "edited turns"), "a")])
    return rounds


def _one_key() -> Rounds:
    """Two chats whose client sends one `prompt_cache_key`."""
    talks = [some_tokens(1000, "chat", chat) for chat in range(2)]
    return [
        [Sent(talk + some_tokens(TURN * turn, "chat turns", chat), "user") for chat, talk in enumerate(talks)]
        for turn in range(TURNS)
    ]


PATTERNS: dict[str, Callable[[], Rounds]] = {
    "3 agents, 8k shared": lambda: _agents(3, 8000, 400),
    "3 agents, 3k shared + 2k own": lambda: _agents(3, 3000, 2000),
    "8 agents, 3k shared, 4 sequences": lambda: _agents(8, 3000, 400),
    "sub-agents in the main session": _sub_agents,
    "an edit in the middle, and back": _edits,
    "two chats, one prompt_cache_key": _one_key,
}


def minimum(rounds: Rounds) -> int:
    """Tokens that a server with endless memory evaluates; of a prompt that it knows, the last."""
    known: list[Ids] = []
    total = 0
    for sent in (one for each in rounds for one in each):
        total += len(sent.ids) - max((_common(sent.ids, other) for other in known), default=0)
        known.append(sent.ids)
    return total


def _common(ids: Ids, other: Ids) -> int:
    same = next((at for at, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b), min(len(ids), len(other)))
    return min(same, len(ids) - 1)


class PatternResult(Struct, frozen=True):
    """Tokens evaluated / minimum."""

    name: str
    sessions: bool
    concurrent: bool
    minimum: int
    ours: float
    theirs: float | None = None


def run_patterns(model: Path, only: str | None, *, with_llama_server: bool) -> Iterator[PatternResult]:
    for name, make in PATTERNS.items():
        if only is not None and only.lower() not in name.lower():
            continue
        rounds = make()
        least = minimum(rounds)
        for concurrent in (False, True) if max(map(len, rounds)) > 1 else (False,):
            theirs = None
            if with_llama_server:
                with llama_server(model, 1, WINDOW, SLOTS) as server:
                    theirs = _evaluated(f"http://127.0.0.1:{server.port}", rounds, False, concurrent) / least
            for sessions in (True, False):
                with _our_server(model) as url:
                    ours = _evaluated(url, rounds, sessions, concurrent) / least
                yield PatternResult(name, sessions, concurrent, least, ours, theirs)


@contextmanager
def _our_server(model: Path) -> Iterator[str]:
    real = {"backend": "llama_cpp", "path": str(model), "n_threads": 1, "speculation": "off", "kv_store": False}
    caches = {"main": {"model": "real", "n_ctx": WINDOW, "parallel": SLOTS}}
    routes = [{"match": "*", "cache": "main"}]
    with live_server({"models": {"real": real}, "caches": caches, "routes": routes}) as served:
        yield served.url


def _evaluated(url: str, rounds: Rounds, sessions: bool, concurrent: bool) -> int:
    with (
        httpx.Client(base_url=url, timeout=600, trust_env=False) as client,
        ThreadPoolExecutor(max(map(len, rounds))) as pool,
    ):

        def send(sent: Sent) -> int:
            return _send(client, sent, sessions)

        return sum(sum(pool.map(send, each) if concurrent else map(send, each)) for each in rounds)


def _send(client: httpx.Client, sent: Sent, sessions: bool) -> int:
    body: dict[str, Any] = {"model": "real", "prompt": sent.ids, "max_tokens": 1, "temperature": 0}
    if sessions:
        body["prompt_cache_key"] = sent.session
    reply = client.post("/v1/completions", json=body).raise_for_status().json()
    if timings := reply.get("timings"):  # llama-server's usage leaves out what it reused
        return int(timings["prompt_n"])
    usage = reply["usage"]
    return int(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])


def table(found: Sequence[PatternResult]) -> Table:
    shown = Table("pattern", "session", "at once", "minimum", "ours", "llama-server", box=None)
    for one in found:
        ours = f"{one.ours:.2f}" if one.ours <= GOAL else f"[bold]{one.ours:.2f}[/]"
        theirs = f"{one.theirs:.2f}" if one.theirs is not None else ""
        words = ("yes" if one.sessions else "no", "yes" if one.concurrent else "no")
        shown.add_row(one.name, *words, f"{one.minimum:,}", ours, theirs)
    return shown
