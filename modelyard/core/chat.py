"""A chat of the workbench as data: a tree of turns, because a turn can be edited or answered again. Pure.

A turn knows the turn before it. Two turns after the same one are alternatives; the chat shows the path to its `head`.
Answers of several models to one prompt are alternatives of one `round`, which are shown side by side.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Literal

from msgspec import Struct, field
from msgspec.structs import replace

from modelyard.core.request import Message, Part, Text, Thinking, ToolCall

TurnEnd = Literal["", "finished", "stopped", "failed"]  # "": it is being streamed, or it is not an answer
MAX_TITLE = 80  # characters


def new_id() -> str:
    return secrets.token_hex(8)


class Turn(Struct, frozen=True, kw_only=True):
    """`parent` is the turn before it. The fields from `model` on belong to an answer."""

    id: str = field(default_factory=new_id)
    parent: str | None = None
    role: Literal["user", "assistant", "tool"]
    parts: tuple[Part, ...] = ()
    at: float = 0.0  # unix time
    model: str = ""
    round: str = ""
    end: TurnEnd = ""
    summary: str = ""  # speed and tokens
    error: str = ""
    request: str = ""  # its id in the server's history

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Text))

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        return tuple(part for part in self.parts if isinstance(part, ToolCall))


class ChatSettings(Struct):
    """The form beside a chat. Each of `models` answers."""

    models: list[str] = []
    protocol: str = "openai_chat"
    system: str = ""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = 1024
    seed: int | None = None
    stop: str = ""  # one stop string per line
    thinking: str = "default"
    tools: str = ""  # JSON
    mcp: list[str] = []  # servers whose tools the gateway runs


class ChatSummary(Struct, frozen=True):
    """A chat in a list."""

    id: str
    title: str
    updated: float
    turns: int


class Chat(Struct, kw_only=True):
    """`revision` counts the versions that were stored: one that is based on an older version is refused."""

    id: str = field(default_factory=new_id)
    title: str = ""  # empty: the beginning of the first message
    created: float = 0.0
    updated: float = 0.0
    revision: int = 0
    settings: ChatSettings = field(default_factory=ChatSettings)
    turns: list[Turn] = field(default_factory=list)
    head: str | None = None

    # --- reading ------------------------------------------------------------------------------------------------------

    def path(self, end: str | None = None) -> list[Turn]:
        """The turns from the first to `end`, by default to the head."""
        by_id = {turn.id: turn for turn in self.turns}
        found: list[Turn] = []
        at = end or self.head
        while at is not None and at in by_id and len(found) <= len(by_id):  # a cycle in a damaged file must end
            found.append(by_id[at])
            at = by_id[at].parent
        return found[::-1]

    def alternatives(self, turn: Turn) -> list[Turn]:
        """The turns in its place, itself included, oldest first. Answers of one round are one place: the chosen one or
        else the first stands for it."""
        found: dict[str, Turn] = {}
        for other in self.turns:
            if other.parent == turn.parent and other.role == turn.role:
                found.setdefault(other.round or other.id, other)
        if turn.round:
            found[turn.round] = turn
        return list(found.values())

    def round(self, turn: Turn) -> list[Turn]:
        """The answers that are shown beside this one, itself included."""
        if not turn.round:
            return [turn]
        return [other for other in self.turns if other.round == turn.round and other.parent == turn.parent]

    def messages(self, end: str | None = None) -> tuple[Message, ...]:
        """The path as a request sends it: without reasoning, which is not sent back, and without empty answers."""
        found = []
        for turn in self.path(end):
            parts = tuple(part for part in turn.parts if not isinstance(part, Thinking))
            if parts or turn.role != "assistant":
                found.append(Message(turn.role, parts))
        return tuple(found)

    @property
    def display_title(self) -> str:
        first = next((turn.text for turn in self.path() if turn.role == "user"), "")
        title = self.title or " ".join(first.split()) or "New chat"
        return title if len(title) <= MAX_TITLE else f"{title[: MAX_TITLE - 1]}…"

    def search_text(self) -> str:
        return "\n".join([self.title, *(turn.text for turn in self.turns)])

    # --- changing -----------------------------------------------------------------------------------------------------

    def add(self, turn: Turn) -> Turn:
        self.turns.append(turn)
        self.head = turn.id
        return turn

    def put(self, turn: Turn) -> None:
        """Replace the turn with this id."""
        self.turns = [turn if other.id == turn.id else other for other in self.turns]

    def select(self, turn: Turn) -> None:
        """Show this alternative and what followed it: of several continuations the newest."""
        at = turn.id
        while following := [other.id for other in self.turns if other.parent == at]:
            at = following[-1]
        self.head = at

    def rewrite(self, turn: Turn, text: str, now: float) -> Turn:
        """A new alternative of a turn with another text, and with its images and files."""
        kept = tuple(part for part in turn.parts if not isinstance(part, Text))
        return self.add(Turn(parent=turn.parent, role=turn.role, parts=(*kept, Text(text)), at=now))

    def remove(self, turn: Turn) -> None:
        """Remove a turn and all that follows it."""
        gone = {turn.id}
        for other in self.turns:  # a turn is always behind the one it follows
            if other.parent in gone:
                gone.add(other.id)
        self.turns = [other for other in self.turns if other.id not in gone]
        if self.head in gone:
            self.head = turn.parent

    def copy(self, now: float) -> Chat:
        """A chat of its own with the path that is shown."""
        turns = [replace(turn, round="") for turn in self.path()]
        return Chat(title=self.title, created=now, updated=now, settings=self.settings, turns=turns, head=self.head)


# --- export -----------------------------------------------------------------------------------------------------------


def to_markdown(chat: Chat) -> str:
    """The path that is shown, for reading elsewhere."""
    return "\n\n".join([f"# {chat.display_title}", *_markdown_lines(chat)]) + "\n"


def _markdown_lines(chat: Chat) -> Iterator[str]:
    names = {"user": "You", "tool": "Tool result"}
    for turn in chat.path():
        yield f"## {names.get(turn.role) or turn.model or 'Assistant'}"
        for part in turn.parts:
            match part.__struct_config__.tag:
                case "text":
                    yield getattr(part, "text", "")
                case "tool_call":
                    yield f"Calls `{getattr(part, 'name', '')}`:\n\n```json\n{getattr(part, 'arguments', '')}\n```"
                case "tool_result":
                    content = getattr(part, "content", ())
                    yield "".join(item.text for item in content if isinstance(item, Text))
                case "image":
                    yield "*(an image)*"
                case "audio":
                    yield "*(a sound)*"
                case "document":
                    yield f"*(the document {getattr(part, 'name', '') or 'without a name'})*"
        if turn.error:
            yield f"*{turn.error}*"
