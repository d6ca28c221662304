"""Chat templates: sandboxed Jinja with Hugging Face's semantics, and limits on what a template may consume.

A template comes with a model, so it is untrusted code. Jinja's sandbox protects Python's internals; the limits here
stop mistakes and crude bombs: loops over `range` share one budget per render, repetition and padding are limited,
and the output has a maximum length.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from types import TracebackType
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError, TemplateRuntimeError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from modelyard.core.errors import InvalidRequest

TemplateMessage = dict[str, Any]  # a message as templates read it: role, content, tool_calls, …

MAX_STEPS = 1_000_000
MAX_REPEAT = 1_000_000
MAX_BUILT = 100_000
_BUILDING = frozenset({"append", "extend", "insert", "pop", "remove", "setdefault", "update"})
_PADDING = frozenset({"center", "expandtabs", "ljust", "rjust", "zfill", "format_map"})
_WIDE = re.compile(
    r"%[^a-zA-Z%]*(?:\d{5}|\*)|\{[^{}]*:[^{}]*(?:\d{5}|\{)"
)  # widths of five digits, or given by an argument


class TemplateRaised(TemplateRuntimeError):
    """The template's own `raise_exception`."""


def raise_exception(message: object) -> None:
    raise TemplateRaised(str(message))


class LoopBudget:
    """The budget of one render for `range`, shared by nested loops."""

    def __init__(self) -> None:
        self._remaining = MAX_STEPS

    def range(self, *arguments: int) -> range:
        asked = range(*arguments)
        self._remaining -= len(asked)
        if self._remaining < 0:
            raise SecurityError(f"the template loops more than {MAX_STEPS} times")
        return asked


class GenerationBlocks(Extension):
    """`{% generation %}…{% endgeneration %}` marks generated text for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it as a plain set

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


_DICT_ATTRIBUTES = frozenset(dir(dict))
_LOOP_ATTRIBUTES = frozenset({"first", "last", "index", "index0", "length", "previtem", "nextitem"})


class PromptEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "%"})

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Shortcut for `message.role` and `loop.first`, which most templates consist of."""
        if type(obj) is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if type(obj) is LoopContext and attribute in _LOOP_ATTRIBUTES:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            _check_repeat(left, right)
            _check_repeat(right, left)
        elif operator == "**" and abs(right) > 64:
            raise SecurityError("the exponent is too large")
        elif operator == "%" and isinstance(left, str):
            _check_width(left)
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if attr in _PADDING and isinstance(obj, str):
            return False
        if attr in _BUILDING and type(obj) in (list, dict):
            return True  # some templates keep a queue of call ids in a list; their variables are copies
        return super().is_safe_attribute(obj, attr, value)

    def is_safe_callable(self, obj: Any) -> bool:
        """A loop over a list that it extends would never end."""
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, list | dict) and len(owner) > MAX_BUILT:
            raise SecurityError(f"the template builds a collection of more than {MAX_BUILT} items")
        return super().is_safe_callable(obj)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        owner = getattr(value, "__self__", None)
        if isinstance(owner, str) and getattr(value, "__name__", "") == "format":
            _check_width(owner)
        return super().wrap_str_format(value)


def _check_repeat(value: Any, times: Any) -> None:
    if isinstance(value, str | list | tuple) and isinstance(times, int) and len(value) * times > MAX_REPEAT:
        raise SecurityError("the template repeats a text too often")


def _check_width(text: str) -> None:
    if _WIDE.search(text):
        raise SecurityError("the template formats with a width that is too large or unknown")


_plain_json = json.JSONEncoder(ensure_ascii=False).encode


class Frozen(dict[str, Any]):
    """An immutable dictionary with a cached JSON text: a tool's definition, or arguments exactly as a model wrote
    them."""

    __slots__ = ("_json",)
    _json: str


def with_json(value: dict[str, Any], text: str) -> Frozen:
    """`text` is the value's JSON text."""
    made = Frozen(value)
    made._json = text
    return made


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As in Hugging Face: no HTML escapes, no ASCII escapes."""
    if ensure_ascii or indent is not None or separators is not None or sort_keys:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if type(value) is not Frozen:
        return _json_with_frozen(value) if _holds_frozen(value) else _plain_json(value)
    try:
        return value._json
    except AttributeError:
        value._json = _plain_json(value)
        return value._json


def _holds_frozen(value: Any) -> bool:
    return type(value) is dict and any(type(item) is Frozen for item in value.values())


def _json_with_frozen(value: dict[str, Any]) -> str:
    """JSON with the cached texts inside: templates put arguments beside a call's name."""
    return "{" + ", ".join(f"{_plain_json(str(key))}: {tojson(item)}" for key, item in value.items()) + "}"


def _center(value: str, width: int = 80) -> str:
    _check_repeat(" ", width)
    return str(value).center(width)


def _indent(value: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    pad = width if isinstance(width, str) else " " * min(width, 100)
    head, *rest = str(value).split("\n")
    lines = [(pad if first else "") + head] + [pad + line if line or blank else line for line in rest]
    return "\n".join(lines)


def _format(value: str, *arguments: Any, **named: Any) -> str:
    _check_width(str(value))
    return str(value) % (named or arguments)


def environment() -> PromptEnvironment:
    made = PromptEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationBlocks], autoescape=False
    )
    made.filters |= {"tojson": tojson, "center": _center, "indent": _indent, "format": _format}
    del made.filters["slice"], made.globals["lipsum"]  # both produce unbounded output
    made.globals["raise_exception"] = raise_exception
    return made


MAX_OUTPUT = 64 << 20  # characters: many times the longest window

_environment = environment()


class TemplateFailed(InvalidRequest):
    """The template could not render this conversation."""

    default_code = "template_failed"


class TemplateRefused(TemplateFailed):
    """The template called `raise_exception`."""

    default_code = "template_refused"


def local_now() -> datetime:
    return datetime.now().astimezone()


class ChatTemplate:
    """`extra_tokens` are further named tokens that templates use, such as `pad_token` or `image_token`."""

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        extra_tokens: Mapping[str, str] | None = None,
        now: Callable[[], datetime] = local_now,
    ) -> None:
        self.source = source
        # Jinja would copy its globals for each render; this copies them once.
        self._fixed: dict[str, Any] = {
            **_environment.globals,
            "strftime_now": lambda form: now().strftime(form),
            "bos_token": bos_token,
            "eos_token": eos_token,
            **(extra_tokens or {}),
        }
        try:
            tree = _environment.parse(source)
            self._words = frozenset(_words(tree))
            self._template = _environment.from_string(tree)
        except TemplateSyntaxError as error:
            raise InvalidRequest(
                f"the chat template is broken in line {error.lineno}: {error.message}", code="template_broken"
            ) from error
        except RecursionError:
            raise InvalidRequest("the chat template is nested too deeply", code="template_broken") from None

    def mentions(self, name: str) -> bool:
        """Whether the template's code uses this variable, attribute, key or string (a role, say)."""
        return name in self._words

    def render(self, variables: Mapping[str, Any]) -> str:
        variables = {**self._fixed, **variables, "range": LoopBudget().range}
        context = Context(_environment, variables, self._template.name, self._template.blocks)
        try:
            return _join_limited(self._template.root_render_func(context))
        except TemplateRaised as error:
            raise TemplateRefused(f"the chat template refuses this conversation: {error.message}") from error
        except RecursionError:
            raise TemplateFailed("the chat template calls itself without end") from None
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            where = self._line(error.__traceback__)
            raise TemplateFailed(f"the chat template failed{where}: {error}") from error

    def _line(self, trace: TracebackType | None) -> str:
        found = ""
        while trace is not None:
            if trace.tb_frame.f_globals.get("environment") is _environment:
                found = f" in line {self._template.get_corresponding_lineno(trace.tb_lineno)}"
            trace = trace.tb_next
        return found


def _join_limited(chunks: Iterator[str]) -> str:
    parts: list[str] = []
    room = MAX_OUTPUT
    for chunk in chunks:
        parts.append(chunk)
        room -= len(chunk)
        if room < 0:
            raise TemplateError(f"the rendered prompt is longer than {MAX_OUTPUT} characters")
    return "".join(parts)


def _words(tree: nodes.Template) -> Iterator[str]:
    for node in tree.find_all((nodes.Name, nodes.Getattr, nodes.Const)):
        word = {nodes.Name: "name", nodes.Getattr: "attr", nodes.Const: "value"}[type(node)]
        if isinstance(value := getattr(node, word), str):
            yield value
