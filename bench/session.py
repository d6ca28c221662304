"""An agent's session to be replayed: a long conversation with tools, small requests of other kinds between its turns,
and two sub-agents.

The words are the same in every run. What the model answers goes back into the conversation, as an agent does it, and
every answer has a fixed length, so that two servers have the same work.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Literal

from msgspec import Struct

Kind = Literal["main", "background", "sub-agent"]
Message = dict[str, str]

_SUB_TURNS = 5
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
_SMALL = (
    "Give the conversation a title of at most six words.",
    "Say whether the message begins a new subject: yes or no.",
    "Sum up the last step in one line.",
    "Name the files that the command may change.",
)


class Conversation:
    def __init__(self, name: str, kind: Kind, model: str, system: str, tokens: int) -> None:
        self.name, self.kind, self.model, self.tokens = name, kind, model, tokens
        self.messages: list[Message] = [{"role": "system", "content": system}]

    def says(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def hears(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})


class Plan(Struct, frozen=True):
    """`system`, `sub_system` and `small_system` are characters of system prompts."""

    turns: int = 20
    tokens: int = 32
    small_tokens: int = 12
    sub_agents: tuple[int, ...] = (6, 13)  # after these turns
    system: int = 20_000
    sub_system: int = 6_000
    small_system: int = 1_200


QUICK = Plan(turns=3, tokens=6, small_tokens=4, sub_agents=(1,), system=800, sub_system=500, small_system=300)


def replay(plan: Plan) -> Iterator[Conversation]:
    """The conversation whose next answer is wanted, again and again. Who iterates lets it hear the answer."""
    writer = Writer()
    main = Conversation("main", "main", "claude-sonnet", writer.system("You are an agent.", plan.system), plan.tokens)
    small = [writer.system(task, plan.small_system) for task in _SMALL]
    for turn in range(plan.turns):
        main.says(writer.result(turn))
        yield main
        if turn in plan.sub_agents:
            yield from _sub_agent(plan, writer, plan.sub_agents.index(turn))
        if turn < plan.turns - 1:
            yield from _background(plan, writer, small, turn)


def _sub_agent(plan: Plan, writer: Writer, number: int) -> Iterator[Conversation]:
    task = f"You are sub-agent {number}: look around and report."
    system = writer.system(task, plan.sub_system)
    talk = Conversation(f"sub-agent {number}", "sub-agent", "claude-sonnet", system, plan.tokens)
    for turn in range(_SUB_TURNS):
        talk.says(writer.result(turn))
        yield talk


def _background(plan: Plan, writer: Writer, systems: list[str], turn: int) -> Iterator[Conversation]:
    """Each kind has its own system prompt, and every request another text."""
    for number, system in enumerate(systems):
        talk = Conversation(f"background {number}", "background", "claude-haiku", system, plan.small_tokens)
        talk.says(f"Step {turn}: {writer.sentence()}")
        yield talk


class Writer:
    def __init__(self) -> None:
        self._dice = random.Random(7)

    def sentence(self) -> str:
        subject, verb, thing = (self._dice.choice(words) for words in (_SUBJECTS, _VERBS, _OBJECTS))
        return f"{subject.capitalize()} {verb} {thing} {self._dice.randrange(1000)} times."

    def system(self, opening: str, characters: int) -> str:
        """Rules and tools; the tools stand in the text, because this model's template knows none."""
        tools = [f'Tool {name}: {{"path": "string", "why": "{self.sentence()}"}}' for name in _TOOLS]
        lines = [opening, *tools]
        while sum(map(len, lines)) + len(lines) < characters:
            lines.append(self.sentence())
        return "\n".join(lines)[:characters]

    def result(self, turn: int) -> str:
        """What a tool gave back, and what to do next."""
        lines = " ".join(self.sentence() for _ in range(3))
        return f"Result {turn} of {self._dice.choice(_TOOLS)}: {lines} Go on."
