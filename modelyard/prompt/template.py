"""Chat templates: sandboxed Jinja with Hugging Face's semantics, and limits on what a template may consume.

A template comes with a model, so it is untrusted code. Jinja's sandbox protects Python's internals; a budget limits the
work and the text of each render (`template_budget.py`), and the output has a maximum length.

Filters, methods and operators whose result may be much larger than their arguments check its size. Those that take the
context are not run on constants while Jinja compiles. `DIRECT_METHODS` are methods that templates call all the time:
Jinja's sandbox takes two microseconds for each call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import lru_cache, partial, wraps
from types import GeneratorType, TracebackType
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes, pass_context
from jinja2 import filters as jinja_filters
from jinja2.exceptions import TemplateRuntimeError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from modelyard.core.errors import InvalidRequest
from modelyard.prompt.template_budget import (
    BUILDING_METHODS,
    CHECKED_GLOBALS,
    DICT_ATTRIBUTES,
    LOOP_ATTRIBUTES,
    MAX_BUILT,
    MAX_ITEMS,
    MAX_SOURCE,
    MAX_TEXT,
    PAYMENTS,
    BudgetContext,
    BudgetExceeded,
    FastCodeGenerator,
    Frozen,
    frozen,
    items_of,
    text,
    text_size,
    too_long,
    with_budget,
)

_MAX_BITS = 4096  # of an integer
_MAX_DIGITS = 30
_MAX_INDENT = 100
_SORTING = 20  # operations for an item

# --- operators --------------------------------------------------------------------------------------------------------


def check_power(base: Any, exponent: Any) -> None:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > _MAX_BITS:
        raise BudgetExceeded("the exponent is too large")


def check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > _MAX_BITS:
            raise BudgetExceeded("it computes a number that is too large")
        return
    value, times = (right, left) if isinstance(left, int) else (left, right)
    is_repetition = isinstance(value, str | list | tuple) and isinstance(times, int)
    if is_repetition and text_size(value) * times > MAX_ITEMS:
        raise BudgetExceeded("it repeats a text too often")


# Widths of five digits, or given by an argument.
_WIDE = re.compile(r"%[^a-zA-Z%]*(?:\d{5}|\*)|\{[^{}]*:[^{}]*(?:\d{5}|\{)")
_WIDTH = re.compile(r"\d{2,4}")


def check_format(form: str, arguments: Any, marker: str) -> None:
    """Each place may contain the longest argument, and be as wide as its width says."""
    if _WIDE.search(form):
        raise BudgetExceeded("it formats with a width that is too large or unknown")
    widest = max(map(int, _WIDTH.findall(form)), default=0)
    if form.count(marker) * max(text_size(arguments), widest) > MAX_TEXT:
        raise too_long()


# --- methods ----------------------------------------------------------------------------------------------------------

# Of texts: padding, other encodings, tables of replacements.
FORBIDDEN_METHODS = frozenset(
    {"center", "encode", "expandtabs", "format_map", "ljust", "maketrans", "rjust", "translate", "zfill"}
)


def _check_replace(value: str, old: str, new: str) -> None:
    if len(new) > len(old) and len(value) + (value.count(old) if old else len(value) + 1) * len(new) > MAX_TEXT:
        raise too_long()


def _replace_method(value: str, _: Context, old: str, new: str, count: int = -1) -> str:
    _check_replace(value, old, new)
    return value.replace(old, new, count)


def _join_method(value: str, context: BudgetContext, items: Iterable[str]) -> str:
    parts = items_of(context, items)
    if len(parts) * len(value) + text_size(parts) > MAX_TEXT:
        raise too_long()
    return value.join(parts)


def _build(method: Callable[..., Any], context: BudgetContext, *arguments: Any, **named: Any) -> Any:
    """A method that changes a list or a dictionary. A loop over a list that it extends would never end."""
    if len(getattr(method, "__self__", ())) > MAX_BUILT:
        raise BudgetExceeded(f"it builds a collection of more than {MAX_BUILT:,} items")
    context.pay(1)
    context.pay_text(text_size([*arguments, *named.values()]))
    return method(*map(frozen, arguments), **{name: frozen(value) for name, value in named.items()})


_METHODS: dict[str, Callable[..., Any]] = {"replace": _replace_method, "join": _join_method}


def guarded_method(value: Any, *, builds: bool) -> Callable[..., Any] | None:
    """What is called in place of this method of a text, list or dictionary."""
    name = getattr(value, "__name__", "")
    if name in _METHODS and isinstance(owner := getattr(value, "__self__", None), str):
        return pass_context(partial(_METHODS[name], owner))
    if builds and name in BUILDING_METHODS and type(getattr(value, "__self__", None)) in (list, dict):
        return pass_context(partial(_build, value))
    return None


def _direct(name: str, *kinds: type) -> Callable[..., Any]:
    method = getattr(kinds[0], name)

    @pass_context
    def run(context: BudgetContext, value: Any, *arguments: Any) -> Any:
        if type(value) in kinds:
            return method(value, *arguments)
        environment: Any = context.environment
        return environment.call(context, environment.getattr(value, name), *arguments)

    return run


_TEXT_METHODS = ("endswith", "lower", "lstrip", "rstrip", "split", "startswith", "strip", "title", "upper")
DIRECT_METHODS: Mapping[str, Callable[..., Any]] = {
    **{name: _direct(name, str) for name in _TEXT_METHODS},
    **{name: _direct(name, dict, Frozen) for name in ("get", "items", "keys", "values")},
}

# --- filters ----------------------------------------------------------------------------------------------------------


@pass_context
def _replace(context: Context, value: Any, old: Any, new: Any, count: int | None = None) -> Any:
    whole = text(value)
    _check_replace(whole, str(old), str(new))
    return jinja_filters.do_replace(context.eval_ctx, whole, str(old), str(new), count)


@pass_context
def _join(context: BudgetContext, items: Any, d: str = "", attribute: str | int | None = None) -> Any:
    if attribute is not None:
        items = map(jinja_filters.make_attrgetter(context.environment, attribute), items)
    parts = items_of(context, items)
    if len(parts) * len(str(d)) + text_size(parts) > MAX_TEXT:
        raise too_long()
    return jinja_filters.sync_do_join(context.eval_ctx, parts, str(d))


@pass_context
def _list(context: BudgetContext, items: Any) -> list[Any]:
    return items_of(context, items)


@pass_context
def _batch(_: Context, items: Any, linecount: int, fill_with: Any = None) -> Any:
    if linecount > MAX_BUILT:
        raise BudgetExceeded("it fills a list with too many items")
    return jinja_filters.do_batch(items, linecount, fill_with)


@pass_context
def _round(_: Context, value: float, precision: int = 0, method: Any = "common") -> float:
    if abs(precision) > _MAX_DIGITS:
        raise BudgetExceeded("it rounds to too many digits")
    return jinja_filters.do_round(value, precision, method)


@pass_context
def _sum(context: Context, items: Any, attribute: str | int | None = None, start: Any = 0) -> Any:
    if not isinstance(start, int | float):
        raise BudgetExceeded("it adds up lists")
    return jinja_filters.sync_do_sum(context.environment, items, attribute, start)


@pass_context
def _center(_: Context, value: Any, width: int = 80) -> str:
    check_product(" ", width)
    return text(value).center(width)


@pass_context
def _indent(_: Context, value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    pad = width if isinstance(width, str) else " " * min(width, _MAX_INDENT)
    head, *rest = text(value).split("\n")
    if len(pad) * (len(rest) + 1) > MAX_TEXT:
        raise too_long()
    lines = [(pad if first else "") + head] + [pad + line if line or blank else line for line in rest]
    return "\n".join(lines)


@pass_context
def _format(_: Context, value: Any, *arguments: Any, **named: Any) -> str:
    check_format(text(value), [*arguments, *named.values()], "%")
    return str(value) % (named or arguments)


def _trim(value: Any, chars: str | None = None) -> str:
    return text(value).strip(chars)


def _lower(value: Any) -> str:
    return text(value).lower()


def _upper(value: Any) -> str:
    return text(value).upper()


def _checked(name: str) -> Callable[..., Any]:
    """Jinja's filter, for a collection only if its text is not too long."""
    function: Callable[..., Any] = jinja_filters.FILTERS[name]

    @wraps(function)  # it may take Jinja's evaluation context first
    def run(*arguments: Any, **named: Any) -> Any:
        for value in arguments:
            if isinstance(value, list | tuple | dict):
                text_size(value)
        return function(*arguments, **named)

    return run


def _sorting(name: str) -> Callable[..., Any]:
    """Jinja's filter, which reads all items before it returns the first."""
    function: Callable[..., Any] = jinja_filters.FILTERS[name]

    @pass_context
    def run(context: BudgetContext, items: Any, *arguments: Any, **named: Any) -> Any:
        made = items_of(context, items)
        context.pay(_SORTING * len(made))
        return function(context.environment, made, *arguments, **named)

    return run


def paid(function: Callable[..., str]) -> Callable[..., str]:
    """A filter whose result may be a multiple of its value, as a filter that pays for the result."""

    @pass_context
    def run(context: BudgetContext, value: Any, *arguments: Any, **named: Any) -> str:
        made = function(value, *arguments, **named)
        context.pay_text(len(made))
        return made

    return run


_TEXT_FILTERS = ("capitalize", "e", "escape", "forceescape", "string", "title", "truncate", "urlencode", "wordcount")
# Not needed by templates, and with results or times that are hard to bound.
REMOVED_FILTERS = ("pprint", "slice", "striptags", "urlize", "wordwrap", "xmlattr")
FILTERS: Mapping[str, Callable[..., Any]] = {
    **PAYMENTS,
    **{f"budget call {name}": function for name, function in DIRECT_METHODS.items()},
    **{name: _checked(name) for name in _TEXT_FILTERS},
    **{name: _sorting(name) for name in ("groupby", "max", "min", "sort", "unique")},
    "batch": _batch,
    "center": _center,
    "format": _format,
    "indent": _indent,
    "join": _join,
    "list": _list,
    "lower": _lower,
    "replace": _replace,
    "round": _round,
    "sum": _sum,
    "trim": _trim,
    "upper": _upper,
}


TemplateMessage = dict[str, Any]  # a message as templates read it: role, content, tool_calls, …

_WIDE_DATE = re.compile(r"%[^a-zA-Z%]*\d{3}")
_MAX_DATE = 200  # characters of a format


class TemplateRaised(TemplateRuntimeError):
    """The template's own `raise_exception`."""


def raise_exception(message: object) -> None:
    raise TemplateRaised(str(message))


def _range(*arguments: int) -> range:
    asked = range(*arguments)
    if len(asked) > MAX_ITEMS:
        raise BudgetExceeded(f"it loops more than {MAX_ITEMS:,} times")
    return asked


class GenerationBlocks(Extension):
    """`{% generation %}…{% endgeneration %}` marks generated text for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it as a plain set

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class PromptEnvironment(ImmutableSandboxedEnvironment):
    """`builds`: its templates may change lists and dictionaries. Some keep a queue of call ids in a list."""

    intercepted_binops = frozenset({"*", "**", "%"})
    code_generator_class = FastCodeGenerator
    context_class = BudgetContext
    builds = False

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Shortcut for `message.role` and `loop.first`, which most templates consist of."""
        if type(obj) is dict and attribute not in DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if type(obj) is LoopContext and attribute in LOOP_ATTRIBUTES:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 as in Jinja
        """Shortcut for macros, which are safe."""
        if type(__obj) is not Macro:
            return super().call(__context, __obj, *args, **kwargs)
        kwargs.pop("_loop_vars", None)
        kwargs.pop("_block_vars", None)
        return __obj(__context.eval_ctx, *args, **kwargs)

    def call_filter(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Filters such as `map` take the name of another."""
        if name.startswith("budget "):
            raise TemplateRuntimeError(f"No filter named {name!r}.")
        return super().call_filter(name, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            check_product(left, right)
        elif operator == "**":
            check_power(left, right)
        elif isinstance(left, str):
            check_format(left, right, "%")
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr in FORBIDDEN_METHODS:
            return False
        if isinstance(obj, int) and attr == "to_bytes":
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., Any] | None:
        """Jinja asks here for each attribute that it returns."""
        if (guarded := guarded_method(value, builds=self.builds)) is not None:
            return guarded
        made = super().wrap_str_format(value)
        return made if made is None else _checked_format(value.__self__, made)


def _checked_format(form: str, function: Callable[..., str]) -> Callable[..., str]:
    def run(*arguments: Any, **named: Any) -> str:
        check_format(form, [*arguments, *named.values()], "{")
        return function(*arguments, **named)

    return run


_plain_json = json.JSONEncoder(ensure_ascii=False).encode


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
    """As in Hugging Face: no HTML escapes, no ASCII escapes. What `map` and `select` return is a list."""
    if isinstance(value, GeneratorType):
        value = list(value)
    if ensure_ascii or indent is not None or separators is not None or sort_keys:
        _check_layout(value, indent, separators)
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


def _checked_tojson(value: Any, **options: Any) -> str:
    if isinstance(value, GeneratorType):
        value = list(value)
    if type(value) is not Frozen:
        text_size(value)
    return tojson(value, **options)


def _check_layout(value: Any, indent: int | str | None, separators: tuple[str, str] | None) -> None:
    """Each item may be on a line of its own, indented by its depth."""
    widest = max(indent if isinstance(indent, int) else len(indent or ""), *map(len, separators or ("",)))
    if widest > 100:
        raise BudgetExceeded("it indents too far")
    text_size(value)


def environment(*, builds: bool = False) -> PromptEnvironment:
    made = PromptEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationBlocks], autoescape=False
    )
    made.builds = builds
    to_json = _checked_tojson if builds else tojson
    made.filters |= {**FILTERS, "tojson": paid(to_json)}
    for name in REMOVED_FILTERS:
        del made.filters[name]
    del made.globals["lipsum"]  # unbounded output
    made.globals |= {"raise_exception": raise_exception, "range": _range}
    return made


MAX_OUTPUT = 64 << 20  # characters: many times the longest window

_environment = environment()
_building_environment = environment(builds=True)


class TemplateFailed(InvalidRequest):
    """The template could not render this conversation."""

    default_code = "template_failed"


class TemplateRefused(TemplateFailed):
    """The template called `raise_exception`."""

    default_code = "template_refused"


class TemplateTooCostly(InvalidRequest):
    """The template exceeded its budget. No other form of the conversation is tried."""

    default_code = "template_too_costly"


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
        self.is_costly = False  # a render exceeded its budget: the next one had better not be on the event loop
        # Jinja would copy its globals for each render; this copies them once.
        self._fixed: dict[str, Any] = {
            **_environment.globals,
            "strftime_now": lambda form: _format_date(now(), form),
            "bos_token": bos_token,
            "eos_token": eos_token,
            **(extra_tokens or {}),
        }
        try:
            self._words, self._environment, self._template = _compile(source)
            self._takes_functions = "functions" in self._words and "tools" not in self._words
        except TemplateSyntaxError as error:
            raise InvalidRequest(
                f"the chat template is broken in line {error.lineno}: {error.message}", code="template_broken"
            ) from error
        except (RecursionError, SyntaxError, MemoryError):  # the last two are Python's, for the compiled code
            raise InvalidRequest("the chat template is nested too deeply", code="template_broken") from None
        except (ValueError, OverflowError) as error:  # a number that Python does not read
            raise InvalidRequest(f"the chat template is broken: {error}", code="template_broken") from error

    def mentions(self, name: str) -> bool:
        """Whether the template's code uses this variable, attribute, key or string (a role, say)."""
        return name in self._words or (name == "tools" and self._takes_functions)

    def render(self, variables: Mapping[str, Any]) -> str:
        variables = self._with_functions(variables) if self._takes_functions else dict(variables)
        context = BudgetContext(self._environment, self._fixed, variables=variables)
        try:
            return _join_limited(self._template.root_render_func(context))
        except TemplateRaised as error:
            raise TemplateRefused(f"the chat template refuses this conversation: {error.message}") from error
        except BudgetExceeded as error:
            self.is_costly = True
            where = self._line(error.__traceback__)
            raise TemplateTooCostly(f"the chat template costs too much{where}: {error.message}") from error
        except RecursionError:
            raise TemplateFailed("the chat template calls itself without end") from None
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            where = self._line(error.__traceback__)
            raise TemplateFailed(f"the chat template failed{where}: {error}") from error

    def _with_functions(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """FireFunction's template takes the tools as text, and the date as a variable."""
        functions = [tool.get("function", tool) for tool in variables.get("tools") or ()]
        text = tojson(functions, indent=4) if functions else ""
        return {"functions": text, "datetime": self._fixed["strftime_now"]("%Y-%m-%d"), **variables}

    def _line(self, trace: TracebackType | None) -> str:
        found = ""
        while trace is not None:
            if trace.tb_frame.f_globals.get("environment") is self._environment:
                found = f" in line {self._template.get_corresponding_lineno(trace.tb_lineno)}"
            trace = trace.tb_next
        return found


@lru_cache(maxsize=16)  # it takes 40 ms, models share templates, and a reload needs those of all models again
def _compile(source: str) -> tuple[frozenset[str], PromptEnvironment, Template]:
    """The words of the template, and itself. It holds no state of a render."""
    if len(source) > MAX_SOURCE:
        raise ValueError(f"it has more than {MAX_SOURCE:,} characters")
    tree = _environment.parse(source)
    words = frozenset(_words(tree))
    builds = not words.isdisjoint(BUILDING_METHODS)
    chosen = _building_environment if builds else _environment
    template = chosen.from_string(with_budget(tree, DIRECT_METHODS, builds=builds))
    if builds:
        template.root_render_func.__globals__.update(CHECKED_GLOBALS)
    return words, chosen, template


def _join_limited(chunks: Iterator[str]) -> str:
    parts: list[str] = []
    room = MAX_OUTPUT
    for chunk in chunks:
        parts.append(chunk)
        room -= len(chunk)
        if room < 0:
            raise TemplateError(f"the rendered prompt is longer than {MAX_OUTPUT} characters")
    return "".join(parts)


def _format_date(moment: datetime, form: str) -> str:
    if len(form) > _MAX_DATE or _WIDE_DATE.search(form):
        raise BudgetExceeded("it formats a date with a width that is too large")
    return moment.strftime(form)


def _words(tree: nodes.Template) -> Iterator[str]:
    for node in tree.find_all((nodes.Name, nodes.Getattr, nodes.Const)):
        word = {nodes.Name: "name", nodes.Getattr: "attr", nodes.Const: "value"}[type(node)]
        if isinstance(value := getattr(node, word), str):
            yield value
