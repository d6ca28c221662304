"""Conversations of plain texts without Jinja: what a template writes around texts that it never looks at, learned once.

A template that only passes texts on writes the same words around them whatever they say. Whether it does is found out
by rendering a conversation of the same roles with texts that cannot be looked at: whoever asks one for its length, its
truth, a letter or anything else gets `Looked` instead of an answer. What comes out has a mark where each text belongs.

A few things read a string without asking it. Templates that hold one of them are not tried (`is_candid`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from jinja2 import nodes
from msgspec import Struct
from msgspec.structs import replace

from modelyard.core.errors import InvalidRequest
from modelyard.tokenizer.frame import Frame

MAX_MESSAGES = 16
_MAX_SHAPES = 512  # clients choose the roles
_MARK = "\ufdd2"  # a noncharacter, as the shield's own
_MARKED = re.compile(f"{_MARK}([0-9]+){_MARK}")

Roles = tuple[str, ...]


class Looked(Exception):
    """Somebody wanted to know what the text says."""


class Unread(str):
    """A text that can be passed on and put together with others, and nothing else."""

    __slots__ = ()

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> Unread:
        return Unread(str.__add__(self, other))

    def __radd__(self, other: str) -> Unread:
        return Unread(str.__add__(other, self))


def _look(*_: Any, **__: Any) -> NoReturn:
    raise Looked


_MAY = {"__class__", "__new__", "__init__", "__init_subclass__", "__subclasshook__", "__getattribute__", "__doc__"}
for _name in (set(dir(str)) | {"__bool__"}) - _MAY - {"__str__", "__add__", "__radd__"}:
    setattr(Unread, _name, _look)


def text_at(place: int) -> Unread:
    return Unread(f"{_MARK}{place}{_MARK}")


class Shape(Struct, frozen=True):
    """The template's own words, with holes; `holes` are places in `parts` and which text belongs there. The `frame` has
    the same words as ids."""

    parts: list[str]
    holes: tuple[tuple[int, int], ...]
    frame: Frame | None = None

    def around(self, texts: Sequence[str]) -> str:
        parts = self.parts.copy()
        for hole, text in self.holes:
            parts[hole] = texts[text]
        return "".join(parts)


def shape_of(text: str) -> Shape:
    parts = _MARKED.split(text)
    return Shape(parts, tuple((at, int(parts[at])) for at in range(1, len(parts), 2)))


class Shapes:
    """Of one template with one set of variables. `render` makes the prompt of roles with such texts, or raises; `frame`
    tells what is known of a shape's tokens."""

    def __init__(
        self,
        render: Callable[[list[tuple[str, Unread]]], str],
        frame: Callable[[Roles, Shape], Frame | None],
    ) -> None:
        self._render, self._frame = render, frame
        self._known: dict[Roles, Shape | None] = {}

    def find(self, roles: Roles) -> Shape | None:
        """None where the template looks at the texts, or nobody may know."""
        try:
            return self._known[roles]
        except KeyError:
            return self._learn(roles)

    def _learn(self, roles: Roles) -> Shape | None:
        if len(roles) > MAX_MESSAGES or len(self._known) >= _MAX_SHAPES:
            return None
        try:
            text = self._render([(role, text_at(place)) for place, role in enumerate(roles)])
            shape = shape_of(text)
            self._known[roles] = shape = replace(shape, frame=self._frame(roles, shape))
        except (Looked, InvalidRequest):
            self._known[roles] = shape = None
        return shape


# --- templates that could look without being seen -------------------------------------------------------------------

_OPEN = (
    nodes.Template,
    nodes.Output,
    nodes.TemplateData,
    nodes.Const,
    nodes.Name,
    nodes.NSRef,
    nodes.Getattr,
    nodes.Getitem,
    nodes.Slice,
    nodes.Operand,
    nodes.And,
    nodes.Or,
    nodes.Not,
    nodes.Add,
    nodes.Sub,
    nodes.CondExpr,
    nodes.If,
    nodes.For,
    nodes.Assign,
    nodes.Scope,
    nodes.List,
    nodes.Tuple,
    nodes.Keyword,
    nodes.Break,
    nodes.Continue,
)
_TESTS = frozenset({"defined", "undefined", "none", "string", "mapping", "boolean", "true", "false"})
_CALLS = frozenset({"raise_exception", "namespace"})


def is_candid(tree: nodes.Template) -> bool:
    """Nothing in this template reads a text without asking it, nor anything but the conversation: `~`, filters, methods
    that are given a text, `in` a text, formats, macros and the clock all may."""
    return not _has_mark(tree) and all(map(_is_open, tree.find_all(nodes.Node)))


def _is_open(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Call):
        return isinstance(node.node, nodes.Name) and node.node.name in _CALLS
    if isinstance(node, nodes.Test):
        return node.name in _TESTS
    if isinstance(node, nodes.Compare):
        asks = any(operand.op in ("in", "notin") for operand in node.ops)
        return not asks or (isinstance(node.expr, nodes.Const) and len(node.ops) == 1)
    if isinstance(node, nodes.Mod):
        return isinstance(node.right, nodes.Const) and isinstance(node.right.value, int)
    return type(node) in _OPEN


def _has_mark(tree: nodes.Template) -> bool:
    return any(_MARK in node.data for node in tree.find_all(nodes.TemplateData)) or any(
        _MARK in str(node.value) for node in tree.find_all(nodes.Const)
    )
