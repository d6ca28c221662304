"""One tool call after another, from a reader's hand to the client: held until certain, then streamed.

A call is **sent** once its name is known and its first argument byte is. Before that a broken call is given back as
text; after that it ends as an incomplete call. A call of a tool that nobody offered becomes text, with a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from modelyard.core.request import Tool
from modelyard.scanner.blocks import Blocks
from modelyard.scanner.lexer import Tape, Unoffered, Unreadable
from modelyard.scanner.visible import Shown, Visible

_EVIDENCE = 64  # characters within which the arguments of a call begin


class Calls:
    """What a reader talks to: `name`, then `put` as the arguments come, then `close`."""

    def __init__(
        self,
        tape: Tape,
        blocks: Blocks,
        visible: Visible,
        clean: Callable[[str], str],
        *,
        tools: Sequence[Tool] | None,
        new_id: Callable[[], str],
        stream: bool,
    ) -> None:
        self._tape, self._blocks, self._visible = tape, blocks, visible
        self._tools = None if tools is None else offered(tools)
        self._clean, self._new_id, self._stream = clean, new_id, stream
        self._name: str | None = None
        self._held: list[str] = []
        self._sent = False
        self._suspect: Unoffered | None = None
        self._rest = ""  # what followed the suspect
        self.tool: Tool | None = None
        self.count = 0
        self.parallel = True
        self.warnings: list[str] = []
        self.kind: Shown = "text"  # where an unreadable call is shown

    @property
    def is_open(self) -> bool:
        return self._name is not None

    @property
    def is_enough(self) -> bool:
        """No further call is wanted, though the reader may be in the middle of several."""
        return (self.count > 0 and not self.parallel) or self._visible.stopped is not None

    @property
    def is_custom(self) -> bool:
        return self.tool is not None and self.tool.kind == "custom"

    @property
    def is_known(self) -> bool:
        return self._tools is None or self.tool is not None

    @property
    def is_first(self) -> bool:
        """Nothing but white space stands before this in its block of text or reasoning."""
        return self._visible.is_blank

    def name(self, name: str) -> None:
        if not name or (self._tools is None and self._clean(name) != name):
            raise Unreadable("a call without a name")
        self._name, self._sent = name, False
        self._held.clear()
        if self._tools is not None:
            self.tool = self._tools.get(name) or self._tools.get(name.rpartition("functions.")[2])
        if self.tool is not None:
            self._name = self.tool.name

    def taking(self, arguments: str) -> str | None:
        """The name of the only tool on offer, or of the only one that takes these arguments."""
        tools = list({id(tool): tool for tool in (self._tools or {}).values()}.values())
        given: Any = msgspec.json.decode(arguments)
        fitting = tools if len(tools) == 1 else [tool for tool in tools if takes(tool, given)]
        return fitting[0].name if len(fitting) == 1 and isinstance(given, dict) else None

    def put(self, text: str) -> None:
        if self._sent:
            self._blocks.parts.append(text)
            self._tape.kept = []
            return
        self._held.append(text)
        if text and self._stream and self.is_known and not self.is_custom and not self.is_enough:
            self._send()

    def _send(self) -> None:
        """Unless a stop string stood in the text that had to be shown first."""
        self._visible.turn()
        if self.is_enough:
            return
        namespace = self.tool.namespace if self.tool else None
        self._blocks.start_call(self._new_id(), self._name or "", namespace, self.is_custom)
        self._blocks.parts.extend(self._held)
        self._held.clear()
        self._sent = True
        self._tape.kept = []

    def close(self) -> None:
        """The arguments are complete and valid."""
        if not self.is_known:
            self._say()
        elif not self.is_enough:
            self._finish()
        self._reset()

    def _finish(self) -> None:
        if self.is_custom:
            self._held = [free_text("".join(self._held))]
        if not self._sent:
            self._send()
        if self._sent:
            self._blocks.close()
            self.count += 1

    def _say(self) -> None:
        """Nobody offered this tool: the client gets to read what the model wanted."""
        self._warn(self._name)
        name, arguments = msgspec.json.encode(self._name).decode(), "".join(self._held)
        self._visible.seam()
        self._visible.show(self.kind, self._clean(f'{{"name": {name}, "arguments": {arguments}}}'))

    def _warn(self, name: str | None) -> None:
        self.warnings.append(f"the model called {name!r}, which was not offered: passed on as text")

    def suspect(self, found: Unoffered, rest: str) -> None:
        """A call without any marker was given back as text at once; whether it is one is told by the rest of it."""
        self._suspect, self._rest = found, ""
        self.hear(rest)

    @property
    def is_suspicious(self) -> bool:
        return self._suspect is not None

    def hear(self, rest: str) -> None:
        """More of what follows a name that nobody offered."""
        self._rest += rest
        if self._suspect and self._suspect.evidence.match(self._rest):
            self._warn(self._suspect.name)
            self._suspect = None
        elif len(self._rest) > _EVIDENCE:
            self._suspect = None

    def say(self, text: str) -> None:
        """This was meant for nobody we know: a block of visible text."""
        self._visible.turn()
        self._visible.show("text", self._clean(text))

    def fail(self) -> bool:
        """The open call cannot be completed. True: what was sent of it has ended as an incomplete call."""
        cut_short = self._tape.ended and self._tape.cut and self.is_open and self.is_known and not self.is_enough
        if cut_short and not self._sent:
            self._send()
        sent = self._sent
        if sent:
            self._blocks.close(complete=False)
        self._reset()
        return sent

    def _reset(self) -> None:
        self._name, self.tool, self._sent = None, None, False
        self._held = []
        self._tape.kept = []


def offered(tools: Sequence[Tool]) -> dict[str, Tool]:
    """Tools by every name a model may use for them; those that somebody else's cloud runs are not ours to call."""
    found: dict[str, Tool] = {}
    for tool in tools:
        if tool.kind != "server":
            found.setdefault(tool.name, tool)
            if tool.namespace:
                found[f"{tool.namespace}.{tool.name}"] = found[f"{tool.namespace}__{tool.name}"] = tool
    return found


def takes(tool: Tool, arguments: object) -> bool:
    """All of these have names that the tool knows, and none is missing that it wants."""
    known, wanted = tool.parameters.get("properties"), tool.parameters.get("required")
    return isinstance(arguments, dict) and set(wanted or ()) <= set(arguments) <= set(known or ())


def free_text(arguments: str) -> str:
    """What a custom tool gets: the one string inside the JSON that the model had to wrap it in."""
    try:
        value: Any = msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return arguments
    if isinstance(value, dict) and len(value) == 1:
        value = next(iter(value.values()))
    return value if isinstance(value, str) else arguments
