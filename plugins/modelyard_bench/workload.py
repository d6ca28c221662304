"""Workloads by name, and their conversations: equal for an equal seed, otherwise never two alike. Pure."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct

from modelyard.core.errors import InvalidRequest

_WORD = re.compile(r"\S+")


class Workload(Struct, frozen=True, kw_only=True):
    """Lengths in tokens. A conversation has `turns` requests. Each request after the first adds `turn_tokens` to the
    conversation, whose earlier part a prefix cache still holds. `streams` is the default concurrency.
    """

    name: str
    about: str = ""
    prompt_tokens: int
    output_tokens: int
    turns: int = 1
    turn_tokens: int = 0
    streams: int = 1

    @property
    def context_tokens(self) -> int:
        """The context window that a whole conversation needs."""
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
    "batch": Workload(name="batch", about="many streams at once", prompt_tokens=128, output_tokens=128, streams=8),
}


def get_workload(name: str, **changes: Any) -> Workload:
    """One of `WORKLOADS` with `changes` applied; a change of None is ignored."""
    if name not in WORKLOADS:
        raise InvalidRequest(f"there is no workload {name!r}; choose one of {', '.join(WORKLOADS)}")
    kept = {field: value for field, value in changes.items() if value is not None}
    return msgspec.structs.replace(WORKLOADS[name], **kept)


class UserTurn(Struct, frozen=True):
    """One user message. `text` has at least `tokens` tokens; the target that knows the tokenizer cuts it to length."""

    text: str
    tokens: int
    output_tokens: int

    def first_words(self, count: float) -> str:
        """About the first `count` words, with their line breaks."""
        ends = [word.end() for word in _WORD.finditer(self.text)]
        return self.text[: ends[min(len(ends), max(1, round(count))) - 1]]


def conversation(workload: Workload, seed: int, key: str) -> tuple[UserTurn, ...]:
    """The conversation with this key. Each message starts with a random number, so that no prefix cache matches it."""
    rng = random.Random(f"{seed} {key}")  # noqa: S311  prompts, not secrets
    lines = (_tool_output_lines if workload.name == "agent" else _story_sentences)(rng)
    sizes = (workload.prompt_tokens, *(workload.turn_tokens for _ in range(workload.turns - 1)))
    return tuple(_user_turn(lines, rng, size, workload.output_tokens) for size in sizes)


def _user_turn(source: Iterator[str], rng: random.Random, tokens: int, output_tokens: int) -> UserTurn:
    """A word is at least one token in every vocabulary: `tokens` words are always enough."""
    lines = [f"{rng.randrange(10**6)} {rng.choice(_INSTRUCTIONS)}\n"]
    count = len(lines[0].split())
    while count < tokens:
        lines.append(next(source))
        count += len(lines[-1].split())
    return UserTurn("\n".join(lines), tokens, output_tokens)


class PromptSizer:
    """Chooses how many words make the wanted number of tokens where the tokenizer is unknown.

    It starts with an estimate and learns from the prompt tokens that the server reports for first prompts. Those also
    contain the template and a system prompt. For one prompt length there is one error to correct; whether the words or
    the text around them cause it does not matter.
    """

    _TOKENS_PER_WORD = 1.5  # of texts like ours
    _STEADY = 4  # after this many samples, a new one corrects a quarter of the remaining error

    def __init__(self) -> None:
        self._overhead = 0.0  # tokens beyond those estimated for the words
        self._samples = self._words = self._tokens = 0

    def first_message(self, turn: UserTurn) -> str:
        """The first message: template, system prompt and words together have the wanted length."""
        return turn.first_words((turn.tokens - self._overhead) / self._TOKENS_PER_WORD)

    def later_message(self, turn: UserTurn) -> str:
        """A later message: the words alone have the wanted length."""
        if not self._tokens:
            return turn.first_words(turn.tokens / self._TOKENS_PER_WORD)
        return turn.first_words(turn.tokens * self._words / self._tokens)

    def learn(self, text: str, prompt_tokens: int) -> None:
        """Of a first message; `prompt_tokens` is 0 if the server reports no usage."""
        if not prompt_tokens:
            return
        words = len(text.split())
        self._samples += 1
        self._words += words
        self._tokens += prompt_tokens
        error = prompt_tokens - self._TOKENS_PER_WORD * words - self._overhead
        self._overhead += error / min(self._samples, self._STEADY)


# --- texts ------------------------------------------------------------------------------------------------------------

_INSTRUCTIONS = (
    "Go on with this account where it stops, in as many sentences as you can.",
    "Retell all of this from the beginning, in other words and at length.",
    "List everything that is said here, one thing after the other, and explain each.",
)
_PEOPLE = ("Marta", "Ilse", "Tomas", "Henrik", "Noor", "Pavel", "Greta", "Samir", "Lotte", "Oskar", "Vera", "Juno")
_PLACES = ("the mill", "the ferry", "the east pier", "the old school", "the customs house", "the rope yard", "the dam")
_THINGS = ("a ledger", "two lanterns", "the spare key", "a crate of lemons", "the tide table", "a torn map", "the bell")
_TIMES = ("before dawn", "after the market", "in the second winter", "on a Thursday", "at low water", "all summer long")

_SENTENCES = (
    "{who} came to {where} {when} and found {what} where nobody had left it.",
    "Nothing in the town was said twice, so {who} wrote it down and hid the paper near {where}.",
    "The keeper of {where} counted the boats {when}, and the number was never the one in the book.",
    "If the wind turned, {who} said, {what} would have to be carried to {where} by hand.",
    "{who} and {who2} had quarrelled over {what} for so long that neither remembered who had owned it first.",
    "It rained {when}; the gutters of {where} ran over, and the cellar smelled of tar and apples.",
    "A letter for {who2} had waited at {where} since spring, with three stamps and no sender.",
    "What {who} wanted was simple: a dry room, {what}, and somebody who would not ask.",
    "The children made a game of it: one had to reach {where} with {what} and not be seen by {who}.",
    "On the map {where} stood on the wrong bank of the river, which {who} took as a warning.",
    "There were four ways to mend a net, and {who2} knew five, the last of them only {when}.",
    "They paid {who} in salt and stories, and {when} in nothing at all.",
    "A stranger asked the price of {what}; {who} named a sum so odd that it had to be true.",
    "From the roof of {where} one saw the lighthouse, the quarry, and how far away everything else was.",
    "{who2} kept two clocks, one for trains and one for {who}, and both of them were slow.",
    "Because the bridge was closed {when}, everybody learned how long a short way can be.",
    "The doctor advised rest, {who2} advised soup, and {who} went back to {where} with {what} under one arm.",
    "Somebody had painted the door of {where} green, and from then on it was the green door, whatever its colour.",
    "When the lamps failed {when}, {who} told the way by the sound of the water under {where}.",
    "The council met, agreed that {what} was lost, and adjourned to look for it.",
)
_FILES = (
    *("harbour/tides.py", "harbour/ledger.py", "yard/cranes.py"),
    *("yard/berths.py", "post/letters.py", "tests/bells.py"),
)
_NAMES = ("depth", "berth", "cargo", "signal", "tide", "moor", "weigh", "ledger", "crane", "pilot", "buoy", "hatch")
_TOOL_LINES = (
    "{file}:{n}: def {name}_of({name2}: int, limit: int = {m}) -> int:",
    "{file}:{n}:     return max(0, {name2} - limit) * {m}",
    "{file}:{n}:     if {name} is None: raise ValueError('no {name} for {name2} {m}')",
    "FAILED {file}::test_{name}_keeps_{name2} - assert {n} == {m}",
    "{n} passed, {m} failed in the {name} suite; the first failure was in {file}",
    "$ grep -rn '{name}' {file} | wc -l\n{n}",
    '{{"{name}": {n}, "{name2}": [{m}, {n}, null], "file": "{file}"}}',
    "-    {name} = {name2} + {n}\n+    {name} = {name2} + {m}",
    "I changed {name} in {file} at line {n}; {name2} still expects {m}, so its test must follow.",
    "TODO({name}): {file} reads {name2} twice, once at line {n} and again at line {m}.",
)


def _story_sentences(rng: random.Random) -> Iterator[str]:
    while True:
        who, who2 = rng.sample(_PEOPLE, 2)
        slots = {"where": rng.choice(_PLACES), "what": rng.choice(_THINGS), "when": rng.choice(_TIMES)}
        yield rng.choice(_SENTENCES).format(who=who, who2=who2, **slots)


def _tool_output_lines(rng: random.Random) -> Iterator[str]:
    while True:
        name, name2 = rng.sample(_NAMES, 2)
        slots = {"file": rng.choice(_FILES), "n": rng.randrange(1, 900), "m": rng.randrange(1, 900)}
        yield rng.choice(_TOOL_LINES).format(name=name, name2=name2, **slots)
