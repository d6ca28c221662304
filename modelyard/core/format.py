"""The seam to a model family's raw output: its markers as data, and how to read the inside of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from modelyard.core.events import BlockKind
from modelyard.core.request import Constraint, Tool, ToolChoice


class Marker(Struct, frozen=True):
    """A block of the raw stream: everything from `open` to `close`. `hold` keeps it back until it is complete."""

    open: str
    close: str
    kind: BlockKind
    hold: bool = False


class Call(Struct, frozen=True):
    """A call as the format's reader found it; `arguments` is JSON text."""

    name: str
    arguments: str


class Format(Protocol):
    """The shape of a module in `scanner/formats/`."""

    NAME: str
    MARKERS: tuple[Marker, ...]
    STOPS: tuple[str, ...]  # texts of the tokens that end a turn in this family

    def read_calls(self, body: str, tools: Sequence[Tool]) -> list[Call] | None:
        """The calls inside one held block, or None where no certain reading exists."""
        ...

    def grammar(self, tools: Sequence[Tool], choice: ToolChoice) -> Constraint | None: ...
