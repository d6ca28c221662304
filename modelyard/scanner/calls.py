"""Tool calls on their way from a reader to the client: held back until certain, then streamed.

A call is **sent** once its name and the first byte of its arguments are known. If it breaks before that, it is shown
as text. If it breaks later, it ends as an incomplete call. A call of a tool that is not offered becomes text, with a
warning.

A call inside reasoning is a **draft**: models try calls out there. It is sent only if the model ends its turn with it,
because then it forgot to close its reasoning. Otherwise it is reasoning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from modelyard.core.request import Tool
from modelyard.scanner.lexer import ParseError, TextBuffer, UnknownTool
from modelyard.scanner.output import BlockWriter, VisibleKind, VisibleOutput

_EVIDENCE_LIMIT = 64  # the arguments of a call begin within this many characters


class CallBuilder:
    """Builds one call after another: `start`, then `append` for each part of the arguments, then `finish`."""

    _name: str | None = None
    _is_sent = False
    _unknown: UnknownTool | None = None
    _after_unknown = ""
    tool: Tool | None = None
    is_repeated = False  # an argument of the open call is given twice
    count = 0
    parallel = True
    kind: VisibleKind = "text"  # how a call that cannot be read is shown
    is_drafting = False
    is_broken = False  # a call could not be read, and its end has not come yet

    def __init__(
        self,
        buffer: TextBuffer,
        blocks: BlockWriter,
        visible: VisibleOutput,
        remove_tags: Callable[[str], str],
        *,
        tools: Sequence[Tool] | None,
        new_id: Callable[[], str],
        stream: bool,
    ) -> None:
        self._buffer, self._blocks, self._visible = buffer, blocks, visible
        self._tools = tools_by_name(tools) if tools else None if tools is None else {}
        self._remove_tags, self._new_id, self._stream = remove_tags, new_id, stream
        self._held: list[str] = []
        self.warnings: list[str] = []
        self.drafts: list[tuple[str, Tool | None, str]] = []  # name, tool and arguments of calls inside reasoning
        self.quoted: dict[str, int] = {}  # how many tags are open that are shown because they belong to no call

    @property
    def is_open(self) -> bool:
        return self._name is not None

    @property
    def is_done(self) -> bool:
        """No further call is wanted, although the reader may be in the middle of several."""
        return (self.count > 0 and not self.parallel) or self._visible.stop_string is not None

    @property
    def is_custom(self) -> bool:
        return self.tool is not None and self.tool.kind == "custom"

    @property
    def is_offered(self) -> bool:
        """The open call is one of an offered tool. Without a list of tools every name is."""
        return self._tools is None or self.tool is not None

    @property
    def is_first(self) -> bool:
        """Only white space comes before this in its block of text or reasoning."""
        return self._visible.is_blank

    def start(self, name: str) -> None:
        if not name or (self._tools is None and self._remove_tags(name) != name):
            raise ParseError("a call without a name")
        self._name, self._is_sent = name, False
        self._held.clear()
        if self._tools is not None:
            self.tool = self._tools.get(name) or self._tools.get(_plain_name(name))
        if self.tool is not None:
            self._name = self.tool.name

    def knows(self, name: str) -> bool:
        """Whether an offered tool or one of its parameters has this name. Without a list of tools every name counts."""
        if self._tools is None or not name:
            return self._tools is None
        return any(name in (tool.name, *(tool.parameters.get("properties") or ())) for tool in self._tools.values())

    def find_tool(self, arguments: str) -> str | None:
        """The name of the only offered tool, or of the only one that accepts these arguments."""
        tools = list({id(tool): tool for tool in (self._tools or {}).values()}.values())
        given: Any = msgspec.json.decode(arguments)
        fitting = tools if len(tools) == 1 else [tool for tool in tools if accepts(tool, given)]
        return fitting[0].name if len(fitting) == 1 and isinstance(given, dict) else None

    def append(self, text: str) -> None:
        if self._is_sent:
            self._blocks.parts.append(text)
            self._buffer.uncommitted = []
            return
        self._held.append(text)
        if text and self._stream and self.is_offered and not (self.is_drafting or self.is_custom or self.is_done):
            self._send()

    def _send(self) -> None:
        """Unless the text before the call contains a stop string."""
        self._visible.end_block()
        if self.is_done:
            return
        namespace = self.tool.namespace if self.tool else None
        self._blocks.start_call(self._new_id(), self._name or "", namespace, self.is_custom)
        self._blocks.parts.extend(self._held)
        self._held.clear()
        self._is_sent = True
        self._buffer.commit()

    def finish(self, arguments: str = "") -> None:
        """The arguments are complete and valid."""
        if arguments:
            self.append(arguments)
        if self.is_drafting:
            self.drafts.append((self._name or "", self.tool, "".join(self._held)))
        elif not self.is_offered:
            self._show_as_text()
        elif not self.is_done:
            if self.is_custom:
                self._held = [custom_input("".join(self._held))]
            if not self._is_sent:
                if self.is_repeated:
                    self._held = [_without_repetition("".join(self._held))]
                self._send()
            if self._is_sent:
                self._blocks.close()
                self.count += 1
        self._reset()

    def send_drafts(self) -> None:
        """The model ended its turn with these calls."""
        drafts, self.drafts, self.is_drafting = self.drafts, [], False
        for name, tool, arguments in drafts:
            self._name, self.tool = name, tool
            self.finish(arguments)

    def _show_as_text(self) -> None:
        """The tool is not offered. Show the client what the model wanted."""
        self._warn(self._name)
        name, arguments = msgspec.json.encode(self._name).decode(), "".join(self._held)
        self._visible.mark_gap()
        self._visible.show(self.kind, self._remove_tags(f'{{"name": {name}, "arguments": {arguments}}}'))

    def _warn(self, name: str | None) -> None:
        self.warnings.append(f"the model called {name!r}, which was not offered: passed on as text")

    def expect_evidence(self, unknown: UnknownTool, rest: str) -> None:
        """A call without markers was shown as text at once. What follows decides whether it needs a warning."""
        self._unknown, self._after_unknown = unknown, ""
        self.feed_evidence(rest)

    @property
    def expects_evidence(self) -> bool:
        return self._unknown is not None

    def feed_evidence(self, text: str) -> None:
        """More of the text that follows the name of a tool that is not offered."""
        self._after_unknown += text
        if self._unknown and self._unknown.evidence.match(self._after_unknown):
            self._warn(self._unknown.name)
            self._unknown = None
        elif len(self._after_unknown) > _EVIDENCE_LIMIT:
            self._unknown = None

    def show_text(self, text: str) -> None:
        """Show a block of visible text, such as a message to an unknown recipient."""
        self._visible.end_block()
        self._visible.show("text", self._remove_tags(text))

    def abort(self) -> bool:
        """The open call cannot be completed. True: part of it was sent and has ended as an incomplete call."""
        cut_off = self._buffer.ended and self._buffer.truncated and self.is_open and self.is_offered
        if cut_off and not (self.is_done or self._is_sent or self.is_drafting):
            if self.is_custom:
                self._held = [cut_input("".join(self._held))]
            self._send()
        was_sent = self._is_sent
        if was_sent:
            self._blocks.close(complete=False)
        self._reset()
        return was_sent

    def _reset(self) -> None:
        self._name, self.tool, self._is_sent, self.is_repeated = None, None, False, False
        self._held = []
        self._buffer.commit()


def _plain_name(name: str) -> str:
    """The name without the namespace that some models invent: `functions.name`, `name.name`."""
    plain = name.rpartition("functions.")[2]
    namespace, _, member = plain.rpartition(".")
    return member if namespace == member else plain


def _without_repetition(arguments: str) -> str:
    """If a key comes twice, its last value counts. Arguments that are already sent keep both, and parsers agree."""
    return json.dumps(json.loads(arguments), ensure_ascii=False)


def tools_by_name(tools: Sequence[Tool]) -> dict[str, Tool]:
    """Tools by every name a model may use for them. Server tools run in another cloud and cannot be called here."""
    found: dict[str, Tool] = {}
    for tool in tools:
        if tool.kind != "server":
            found.setdefault(tool.name, tool)
            if tool.namespace:
                found[f"{tool.namespace}.{tool.name}"] = found[f"{tool.namespace}__{tool.name}"] = tool
    return found


def accepts(tool: Tool, arguments: object) -> bool:
    """The tool knows every argument, and no required one is missing."""
    known, required = tool.parameters.get("properties"), tool.parameters.get("required")
    return isinstance(arguments, dict) and set(required or ()) <= set(arguments) <= set(known or ())


# A string, alone or as the first value of an object, up to where it was cut; the end of an escape may be missing.
_CUT_STRING = re.compile(
    r'\s*(?:\{\s*"(?:[^"\\]|\\.)*"\s*:\s*)?("(?:[^"\\]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*)', re.DOTALL
)
_LAST_ESCAPE = re.compile(r"\\u[0-9a-fA-F]{4}\Z")


def cut_input(arguments: str) -> str:
    """The beginning of a custom tool's input, from the beginning of the JSON around it."""
    found = _CUT_STRING.match(arguments)
    if found is None:
        return "" if arguments.lstrip()[:1] in ("{", "") else arguments
    for text in (found[1], _LAST_ESCAPE.sub("", found[1])):  # half of a pair of surrogates is no character
        try:
            return str(msgspec.json.decode(text + '"'))
        except msgspec.DecodeError:
            continue
    return ""


def custom_input(arguments: str) -> str:
    """The input of a custom tool: the only string inside the JSON in which the model had to wrap it."""
    try:
        value: Any = msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return arguments
    if isinstance(value, dict) and len(value) == 1:
        value = next(iter(value.values()))
    return value if isinstance(value, str) else arguments
