"""Values as nested elements: an object's members by their names, a list's as `item`, everything else as text.

What an element holds is told by the schema, and where that is silent by what stands inside. Every tag has the family's
namespace token in front of it, so text never ends by accident. A closing tag that was forgotten is implied by that of
an outer element.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from modelyard.scanner.lexer import SURROGATES, Steps, Tape, Unreadable
from modelyard.scanner.typed import convert, quoted, resolve, types

_NAME_LIMIT = 128
_DEPTH = 64
_GAP = 16
_TAG_END = re.compile(rf"[><\]{SURROGATES}]")
_EMPTY = {"object": "{}", "array": "[]"}
_TEXT = ((), ("string",))


def child(schema: Any, root: Mapping[str, Any], name: str | None, depth: int = 0) -> Any:
    """The schema of a member of that name, or of an item (None)."""
    if not isinstance(schema, Mapping) or depth > _DEPTH:
        return None
    if isinstance(ref := schema.get("$ref"), str):
        return child(resolve(ref, root), root, name, depth + 1)
    if name is None and "items" in schema:
        return schema["items"]
    properties, more = schema.get("properties"), schema.get("additionalProperties")
    if name is not None and isinstance(properties, Mapping) and name in properties:
        return properties[name]
    options = [o for word in ("anyOf", "oneOf", "allOf") for o in schema.get(word) or ()]
    found = (child(o, root, name, depth + 1) for o in options)
    return next((f for f in found if f is not None), more if name is not None else None)


class Elements:
    """Reads elements into JSON. `namespace` is the token as the tape spells it, `block` the tag around all calls."""

    def __init__(
        self, tape: Tape, namespace: str, block: str, put: Callable[[str], None], root: Mapping[str, Any]
    ) -> None:
        self._tape, self._namespace, self._put, self._root = tape, namespace, put, root
        self._special = re.compile(f"[{re.escape(namespace[0])}{SURROGATES}]")
        self._open = [block]
        self._closed: str | None = None  # a closing tag that was read, but that of an outer element

    def read(self, name: str) -> Steps[None]:
        """All arguments, up to the closing tag of that name."""
        self._open.append(name)
        yield from self._object(self._root)
        yield from self._shut(name)

    def _object(self, schema: Any) -> Steps[None]:
        before = "{"
        while (yield from self._is_opening()):
            name = yield from self._tag()
            self._put(f'{before}"{quoted(name)}": ')
            yield from self._element(name, child(schema, self._root, name))
            before = ", "
        self._put("{}" if before == "{" else "}")

    def _array(self, schema: Any) -> Steps[None]:
        before = "["
        while (yield from self._is_opening()):
            self._put(before)
            yield from self._element((yield from self._tag()), child(schema, self._root, None))
            before = ", "
        self._put("]")

    def _element(self, name: str, schema: Any) -> Steps[None]:
        """After an opening tag."""
        if len(self._open) > _DEPTH:
            raise Unreadable("too deep")
        self._open.append(name)
        allowed = types(schema, self._root)
        space = yield from self._tape.space()
        if not (yield from self._tape.stands((self._namespace,))) or not (yield from self._is_opening()):
            yield from self._leaf(space, allowed)
        elif (yield from self._is_item(allowed)):
            yield from self._array(schema)
        else:
            yield from self._object(schema)
        yield from self._shut(name)

    def _is_item(self, allowed: tuple[str, ...]) -> Steps[bool]:
        """An `item` stands here, and it is no member of that name."""
        here = yield from self._ahead(len("<item>"))
        return here == "<item>" and ("array" in allowed or "object" not in allowed)

    def _leaf(self, text: str, allowed: tuple[str, ...]) -> Steps[None]:
        """Text up to the next closing tag; what is certainly a string is streamed."""
        parts, streams = [text], allowed in _TEXT
        if streams:
            self._put(f'"{quoted(text)}')
        while (chunk := (yield from self._text())) is not None:
            parts.append(chunk)
            if streams:
                self._put(quoted(chunk))
        self._put('"' if streams else _leaf("".join(parts), allowed))

    def _text(self) -> Steps[str | None]:
        """The next bit of text; None where a closing tag stands or the output is over."""
        tape = self._tape
        char = yield from tape.peek()
        if char == "":
            self._end()
            return None
        if self._special.match(char):
            here = yield from tape.stands((self._namespace,))
            if here and (yield from self._is_closing()):
                return None
            char = tape.skip(len(here or char))
            return "" if char in tape.special else char
        found = self._special.search(tape.text, tape.at)
        return tape.take(found.start() if found else len(tape.text))

    # --- tags -------------------------------------------------------------------------------------------------------

    def _gap(self) -> Steps[int]:
        """How far the tag is, given that its namespace stands here: some put a space between the two."""
        size = len(self._namespace)
        while size < len(self._namespace) + _GAP and (yield from self._tape.ahead(size + 1))[size:].isspace():
            size += 1
        return size

    def _ahead(self, count: int) -> Steps[str]:
        """What follows the namespace, which stands here."""
        size = yield from self._gap()
        return (yield from self._tape.ahead(size + count))[size:]

    def _is_closing(self) -> Steps[bool]:
        """After a namespace that stands here."""
        after = yield from self._ahead(2)
        return after == "</" or after[:1] in self._tape.special

    def _is_opening(self) -> Steps[bool]:
        """An opening tag comes next. Nothing but tags may stand here."""
        if self._closed is not None:
            return False
        yield from self._tape.space()
        if not (yield from self._tape.stands((self._namespace,))):
            self._end()
            return False
        after = yield from self._ahead(2)
        return after[:1] == "<" and after != "</"

    def _end(self) -> None:
        """No tag stands here. That is well only where the model ended its output."""
        if not (self._tape.ended and self._tape.is_empty) or self._tape.cut:
            raise Unreadable("neither an element nor the end of one")
        self._closed = self._open[0]

    def _tag(self) -> Steps[str]:
        """Take a tag, with its namespace; its name."""
        self._tape.skip((yield from self._gap()) + 1)
        name = yield from self._tape.until(_TAG_END, _NAME_LIMIT)
        if (yield from self._tape.peek()) != ">":
            raise Unreadable("a tag without an end")
        self._tape.skip(1)
        return name.strip()

    def _closing(self) -> Steps[str]:
        """The name of a closing tag. That of the block may be a token: it stays for whoever reads blocks."""
        after = yield from self._ahead(2)
        if after[:1] in self._tape.special:
            return self._open[0]
        if after != "</":
            raise Unreadable("neither an element nor the end of one")
        return (yield from self._tag()).removeprefix("/").strip()

    def _shut(self, name: str) -> Steps[None]:
        """The element is over: by its own closing tag, by one that is nobody's, or by that of an outer one."""
        if self._closed is None:
            self._closed = yield from self._closing()
            self._put("")  # so far all is read: if the call breaks, this tag is no part of the rest
        self._open.pop()
        if self._closed == name or self._closed not in self._open:
            self._closed = None


def _leaf(raw: str, allowed: tuple[str, ...]) -> str:
    empty = next((_EMPTY[t] for t in allowed if t in _EMPTY), None)
    return empty if empty and not raw.strip() and "string" not in allowed else convert(raw, allowed)
