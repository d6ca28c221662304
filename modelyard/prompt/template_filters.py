"""Filters, methods and operators of chat templates whose result may be much larger than their arguments, with checks.

Those that take the context are not run on constants while Jinja compiles. `DIRECT_METHODS` are methods that templates
call all the time: Jinja's sandbox takes two microseconds for each call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial, wraps
from typing import Any

from jinja2 import filters as jinja_filters
from jinja2 import pass_context
from jinja2.runtime import Context

from modelyard.prompt.template_budget import (
    BUILDING_METHODS,
    MAX_BUILT,
    MAX_ITEMS,
    MAX_TEXT,
    PAYMENTS,
    BudgetContext,
    BudgetExceeded,
    Frozen,
    frozen,
    items_of,
    text,
    text_size,
    too_long,
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
