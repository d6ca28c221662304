"""Workloads by name, and the conversations they are made of: the same for the same seed, and never two alike. Pure."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct

from modelyard.benchmark import texts
from modelyard.core.errors import InvalidRequest

_WORD = re.compile(r"\S+")


class Workload(Struct, frozen=True, kw_only=True):
    """Lengths in tokens. A conversation has `turns` requests; each after the first adds `turn_tokens` to what was said,
    which a good cache still holds. `streams` is how many conversations run at a time, unless somebody asks for others.
    """

    name: str
    about: str = ""
    prompt_tokens: int
    output_tokens: int
    turns: int = 1
    turn_tokens: int = 0
    streams: int = 1

    @property
    def longest(self) -> int:
        """Tokens of the window that a whole conversation takes."""
        return self.prompt_tokens + (self.turns - 1) * self.turn_tokens + self.turns * self.output_tokens


WORKLOADS = {
    "chat": Workload(name="chat", about="one stream, short prompts", prompt_tokens=64, output_tokens=128),
    "agent": Workload(
        name="agent",
        about="long prompts, several turns that build on each other",
        prompt_tokens=2048,
        output_tokens=48,
        turns=4,
        turn_tokens=160,
    ),
    "batch": Workload(
        name="batch", about="many streams at once", prompt_tokens=128, output_tokens=128, streams=8
    ),
}  # fmt: skip
_PROSE: dict[str, texts.Prose] = {"agent": texts.tool_output}


def named(name: str, **changes: Any) -> Workload:
    """One of `WORKLOADS`; a change of None changes nothing."""
    if name not in WORKLOADS:
        raise InvalidRequest(f"there is no workload {name!r}; there are {', '.join(WORKLOADS)}")
    kept = {field: value for field, value in changes.items() if value is not None}
    return msgspec.structs.replace(WORKLOADS[name], **kept)


class Ask(Struct, frozen=True):
    """What is said in one turn: `words` has at least `tokens` tokens, to be cut by whoever knows how to count them."""

    words: str
    tokens: int
    output_tokens: int

    def cut(self, count: float) -> str:
        """About its first `count` words, line breaks kept."""
        ends = [word.end() for word in _WORD.finditer(self.words)]
        return self.words[: ends[min(len(ends), max(1, round(count))) - 1]]


class Talk(Struct, frozen=True):
    asks: tuple[Ask, ...]


_ORDERS = (
    "Go on with this account where it stops, in as many sentences as you can.",
    "Retell all of this from the beginning, in other words and at length.",
    "List everything that is said here, one thing after the other, and explain each.",
)


def talk(workload: Workload, seed: int, key: str) -> Talk:
    """The conversation of this name. It begins with a number of its own: no cache has seen even its first words."""
    dice = random.Random(f"{seed} {key}")  # noqa: S311  texts, not secrets
    prose = _PROSE.get(workload.name, texts.account)(dice)
    sizes = (workload.prompt_tokens, *(workload.turn_tokens for _ in range(workload.turns - 1)))
    return Talk(tuple(_ask(prose, dice, size, workload.output_tokens) for size in sizes))


def _ask(prose: Iterator[str], dice: random.Random, tokens: int, output_tokens: int) -> Ask:
    """A word is at least one token in every vocabulary, so that as many words are enough."""
    lines = [f"{dice.randrange(10**6)} {dice.choice(_ORDERS)}\n"]
    count = len(lines[0].split())
    while count < tokens:
        lines.append(next(prose))
        count += len(lines[-1].split())
    return Ask("\n".join(lines), tokens, output_tokens)
