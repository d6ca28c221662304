"""The budget of a render: how much work and how much text a chat template may cost.

A template comes with a model, so it is untrusted code, and it is tried on the server's event loop first. Each place
where work or text can multiply pays:

- a loop for all its iterations when it starts, by the size of its body, and it looks at the clock now and then;
- a macro, a call block, an iteration of a recursive loop and each run of many statements;
- an operator, a filter, a call and a written list or dictionary by the size of the text or collection that it makes,
  and a macro by its output. A collection pays by the size of its text, because one list may be contained in another any
  number of times.

What may make a result much larger than its arguments is checked before it runs. Operators and calls come here through
`PromptEnvironment`; `with_budget` adds the rest to the template's syntax tree, as filters that no template can name.

Most templates change no collection. In one that names a method such as `append`, what is put into a collection is
frozen, so that a size that was paid for stays true, and a collection is measured before it becomes text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import partial
from itertools import chain, islice
from time import monotonic, thread_time
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_WORK = 100_000_000  # operations; agents with thousands of messages meet templates that search them all for each
MAX_SECONDS = 2.0
INLINE_SECONDS = 0.05  # on the event loop; a template that takes longer is rendered in a thread
MAX_TEXT = 8_000_000  # characters of one value: more than fit in any window
MAX_ITEMS = 1_000_000  # of a range
MAX_BUILT = 100_000  # items that a template adds to a collection one by one
MAX_SOURCE = 1 << 17  # characters of a template; the longest known has 40,000
_MAX_WAIT = 0.05  # seconds until the next look at the thread's time
_CHARACTERS = 2  # for the price of one operation
_ITEM = 32  # characters that an item of a collection counts as, beside its text
_STRETCH = 200  # operations without a look at the clock
_MAX_EXPRESSION = 500
_MAX_BITS = 4096  # of an integer
_MAX_DIGITS = 30
_MAX_INDENT = 100
_SORTING = 20  # operations for an item
BUILDING_METHODS = frozenset({"append", "extend", "insert", "pop", "remove", "setdefault", "update"})

max_seconds: ContextVar[float] = ContextVar("max_seconds", default=MAX_SECONDS)  # of the next render


class BudgetExceeded(SecurityError):
    """The template costs too much."""


def too_long() -> BudgetExceeded:
    return BudgetExceeded(f"it builds a text or a list of more than {MAX_TEXT:,} characters")


class BudgetContext(Context):
    """The variables of one render, and what is left of its budget."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.left = MAX_WORK
        self.seconds = max_seconds.get()
        self.end = monotonic() + self.seconds
        self.cpu_end = 0.0

    def pay(self, work: int) -> None:
        self.left -= work
        if self.left < 0:
            raise BudgetExceeded(f"it takes more than {MAX_WORK:,} operations")
        if monotonic() > self.end:
            self.check_time()

    def pay_for(self, value: Any) -> Any:
        """The value, which is new if it is a text or a collection."""
        if type(value) is str:
            size = len(value)
        elif isinstance(value, str | list | tuple | dict):
            size = text_size(value)
        else:
            return value
        self.left -= size // _CHARACTERS
        if size > MAX_TEXT or self.left < 0:
            raise too_long()
        return value

    def check_time(self) -> None:
        """On a busy machine a thread waits; from here on only its own time counts, which takes longer to read."""
        used = thread_time()
        self.cpu_end = self.cpu_end or used + self.seconds / 2
        if used > self.cpu_end:
            raise BudgetExceeded(f"it takes more than {self.seconds:g} s")
        self.end = monotonic() + _MAX_WAIT


# --- collections ------------------------------------------------------------------------------------------------------


class Frozen(dict[str, Any]):
    """An immutable dictionary with a cached JSON text: a tool's definition, or arguments exactly as a model wrote
    them. No template can name an attribute with underscores."""

    __slots__ = ("__json__",)
    __json__: str


class FrozenList(list[Any]):
    """A list that a template cannot change."""


def frozen(value: Any) -> Any:
    """A copy that a template cannot change. Values of other types cannot be changed anyway."""
    if type(value) is list:
        return FrozenList(map(frozen, value))
    if type(value) is dict:
        return Frozen((key, frozen(item)) for key, item in value.items())
    return value


def text_size(value: Any) -> int:
    """About the length of the value as text. It is not measured beyond the limit."""
    size, rest = 0, [value]
    while rest:
        item = rest.pop()
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, list | tuple | dict):
            size += _ITEM * len(item)
            if size <= MAX_TEXT:
                rest += [*item.keys(), *item.values()] if isinstance(item, dict) else item
        if size > MAX_TEXT:
            raise too_long()
    return size


def text(value: Any) -> str:
    """`str`, for a collection only if its text is not too long."""
    if type(value) is str:
        return value
    if isinstance(value, list | tuple | dict):
        text_size(value)
    return str(value)


def items_of(context: BudgetContext, iterable: Any) -> list[Any]:
    """As a list. The iterable may compute its items, with filters such as `map`."""
    made: list[Any] = []
    iterator = iter(iterable)
    while block := list(islice(iterator, _STRETCH)):
        made += block
        context.pay(len(block))
        if len(made) * _ITEM > MAX_TEXT:
            raise too_long()
    return made


# --- payments in the syntax tree --------------------------------------------------------------------------------------


class _Watched:
    """A long iterable that looks at the clock while it is read."""

    def __init__(self, context: BudgetContext, items: Any, weight: int) -> None:
        self._context, self._items, self._block = context, items, max(1, _STRETCH // weight)

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self._blocks())

    def _blocks(self) -> Iterator[Any]:
        context, iterator, block = self._context, iter(self._items), self._block
        while items := tuple(islice(iterator, block)):
            yield items
            if monotonic() > context.end:
                context.check_time()


@pass_context
def _loop(context: BudgetContext, iterable: Any, weight: int) -> Any:
    try:
        work = weight * len(iterable)
    except TypeError:
        iterable = items_of(context, iterable)
        work = weight * len(iterable)
    context.pay(work)
    return iterable if work <= _STRETCH else _Watched(context, iterable, weight)


@pass_context
def _pay(context: BudgetContext, work: int) -> str:
    context.pay(work)
    return ""


@pass_context
def _keep(context: BudgetContext, value: Any) -> Any:
    return context.pay_for(value)


@pass_context
def _text(_: BudgetContext, value: Any) -> Any:
    return text(value) if isinstance(value, list | tuple | dict) else value


@pass_context
def _concat(context: BudgetContext, *values: Any) -> str:
    parts = list(map(text, values))
    if sum(map(len, parts)) > MAX_TEXT:
        raise too_long()
    return str(context.pay_for("".join(parts)))


@pass_context
def _collect(context: BudgetContext, value: Any) -> Any:
    """A list, tuple or dictionary that the template writes."""
    context.pay_for(value)
    if not getattr(context.environment, "builds", True):
        return value
    if isinstance(value, dict):
        return {key: frozen(item) for key, item in value.items()}
    return type(value)(map(frozen, value))


# With a space, so that no template can name them; `map` refuses them. They take the context, so Jinja does not run them
# while it compiles.
PAYMENTS: Mapping[str, Callable[..., Any]] = {
    "budget collect": _collect,
    "budget concat": _concat,
    "budget keep": _keep,
    "budget loop": _loop,
    "budget pay": _pay,
    "budget text": _text,
}

_FREE = (nodes.Const, nodes.TemplateData, nodes.Name, nodes.Pair, nodes.Keyword, nodes.NSRef, nodes.Operand)
_UNSUPPORTED = (nodes.Block, nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport)
_PLAIN = (nodes.Const, nodes.Pair, nodes.List, nodes.Tuple, nodes.Dict)


def with_budget(tree: nodes.Template, *, builds: bool) -> nodes.Template:
    """The tree with its payments added. It is changed in place. `builds`: it may change collections."""
    for node in tree.find_all(_UNSUPPORTED):
        raise TemplateSyntaxError(f"a chat template has no {type(node).__name__.lower()}", node.lineno)
    tree.body = _statements(tree.body, "text" if builds else "")
    return tree


def _statements(body: list[nodes.Node], output: str) -> list[nodes.Node]:
    """`output` is the payment for what they write: `keep` where it becomes a value of the template."""
    out: list[nodes.Node] = []
    stretch = 0
    for node in body:
        weight = _weight(node)
        if stretch and stretch + weight > _STRETCH:
            out.append(_payment(stretch, node.lineno))
            stretch = 0
        stretch += weight
        out.append(_statement(node, output))
    return out


def _statement(node: Any, output: str) -> Any:
    is_value = isinstance(node, nodes.Macro | nodes.CallBlock | nodes.AssignBlock | nodes.FilterBlock)
    inside = "keep" if is_value or getattr(node, "recursive", False) else output
    body, weight = getattr(node, "body", None), 1
    if isinstance(node, nodes.Output):
        node.nodes = [_output(each, output) for each in node.nodes]
        return node
    if isinstance(node, nodes.For):
        tested = [node.test] if node.test is not None else []
        weight += sum(map(_weight, [*node.body, *tested]))
    elif isinstance(node, nodes.Macro | nodes.CallBlock):
        weight += sum(map(_weight, node.body))
    for name, value in node.iter_fields():
        if isinstance(value, nodes.Expr):
            setattr(node, name, _expression(value))
        elif isinstance(value, list) and name not in ("body", "elif_", "else_"):
            setattr(node, name, [_expression(each) if isinstance(each, nodes.Expr) else each for each in value])
    if isinstance(node, nodes.For):
        node.iter = _filter("loop", node.iter, nodes.Const(weight))
    if body is not None:
        node.body = _statements(body, inside)
        if weight > 1 and not (isinstance(node, nodes.For) and not node.recursive):
            node.body.insert(0, _payment(weight, node.lineno))
    for each in getattr(node, "elif_", ()):
        _statement(each, output)
    if getattr(node, "else_", None):
        node.else_ = _statements(node.else_, output)
    return node


def _output(node: nodes.Expr, payment: str) -> nodes.Expr:
    if isinstance(node, nodes.TemplateData | nodes.Const):
        return node
    made = _expression(node)
    return _filter(payment, made) if payment else made


def _expression(node: nodes.Expr) -> Any:
    if _weight(node) > _MAX_EXPRESSION:
        raise TemplateSyntaxError(f"an expression has more than {_MAX_EXPRESSION} operations", node.lineno)
    return _guarded(node)


def _guarded(node: Any) -> Any:
    """The expression with payments for what multiplies inside it."""
    for name, value in node.iter_fields():
        if isinstance(value, nodes.Node):
            setattr(node, name, _guarded(value))
        elif isinstance(value, list):
            setattr(node, name, [_guarded(each) if isinstance(each, nodes.Node) else each for each in value])
    if isinstance(node, nodes.Concat):
        return _filter("concat", *node.nodes)
    is_written = isinstance(node, nodes.List | nodes.Tuple | nodes.Dict) and getattr(node, "ctx", "load") == "load"
    return _filter("collect", node) if is_written and not _is_constant(node) else node


def _is_constant(node: nodes.Node) -> bool:
    """As long as the template."""
    return isinstance(node, _PLAIN) and all(map(_is_constant, node.iter_child_nodes()))


def _weight(node: nodes.Node) -> int:
    """The number of operations in this node. Loops and macros inside it pay for themselves."""
    if isinstance(node, nodes.Macro | nodes.CallBlock):
        return 1
    own = 0 if isinstance(node, _FREE) else 1
    skipped = ("body", "else_", "test") if isinstance(node, nodes.For) else ()
    return own + sum(map(_weight, node.iter_child_nodes(exclude=skipped)))


def _filter(name: str, value: Any, *arguments: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, f"budget {name}", list(arguments), [], None, None, lineno=value.lineno)


def _payment(work: int, line: int) -> nodes.Stmt:
    return nodes.ExprStmt(_filter("pay", nodes.Const(work, lineno=line)), lineno=line)


# --- operators --------------------------------------------------------------------------------------------------------


def check_operator(operator: str, left: Any, right: Any) -> None:
    if operator == "+":
        if isinstance(left, str | list | tuple) and text_size(left) + text_size(right) > MAX_TEXT:
            raise too_long()
    elif operator == "*":
        check_product(left, right)
    elif operator == "%":
        if isinstance(left, str):
            check_format(left, right, "%")
    elif isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _MAX_BITS:  # a power
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


def _replace_method(value: str, _: Context, old: str, new: str, count: int = -1) -> str:
    if len(new) > len(old) and len(value) + (value.count(old) if old else len(value) + 1) * len(new) > MAX_TEXT:
        raise too_long()
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
    context.pay_for([*arguments, *named.values()])
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


# --- filters ----------------------------------------------------------------------------------------------------------

_jinja = ImmutableSandboxedEnvironment()


def _replace(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    return _replace_method(text(value), None, str(old), str(new), -1 if count is None else count)  # type: ignore[arg-type]


@pass_context
def _join(context: BudgetContext, items: Any, d: str = "", attribute: str | int | None = None) -> Any:
    if attribute is not None:
        items = context.environment.call_filter("map", items, [], {"attribute": attribute}, context)
    return context.pay_for(_join_method(str(d), context, map(text, items)))


def _center(value: Any, width: int = 80) -> str:
    check_product(" ", width)
    return text(value).center(width)


def _indent(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    pad = width if isinstance(width, str) else " " * min(width, _MAX_INDENT)
    head, *rest = text(value).split("\n")
    if len(pad) * (len(rest) + 1) > MAX_TEXT:
        raise too_long()
    lines = [(pad if first else "") + head] + [pad + line if line or blank else line for line in rest]
    return "\n".join(lines)


def _format(value: Any, *arguments: Any, **named: Any) -> str:
    check_format(text(value), [*arguments, *named.values()], "%")
    return str(value) % (named or arguments)


def _trim(value: Any, chars: str | None = None) -> str:
    return text(value).strip(chars)


def _lower(value: Any) -> str:
    return text(value).lower()


def _upper(value: Any) -> str:
    return text(value).upper()


def paid(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that pays for its result."""

    @pass_context
    def run(context: BudgetContext, *arguments: Any, **named: Any) -> Any:
        return context.pay_for(function(*arguments, **named))

    return run


def _own(name: str, check: Callable[..., None] | None = None, *, sorts: bool = False) -> Callable[..., Any]:
    """Jinja's filter, which pays for its result. `sorts`: it reads all items before it returns the first."""

    @pass_context
    def run(context: BudgetContext, value: Any, *arguments: Any, **named: Any) -> Any:
        if check is not None:
            check(*arguments, **named)
        if sorts:
            value = items_of(context, value)
            context.pay(_SORTING * len(value))
        elif isinstance(value, list | tuple | dict):
            text_size(value)
        return context.pay_for(_jinja.call_filter(name, value, arguments, named, context, context.eval_ctx))

    return run


def _check_batch(linecount: int, fill_with: Any = None) -> None:  # noqa: ARG001 - named as in Jinja
    if linecount > MAX_BUILT:
        raise BudgetExceeded("it fills a list with too many items")


def _check_round(precision: int = 0, method: Any = "common") -> None:  # noqa: ARG001
    if abs(precision) > _MAX_DIGITS:
        raise BudgetExceeded("it rounds to too many digits")


def _check_sum(attribute: Any = None, start: Any = 0) -> None:  # noqa: ARG001
    if not isinstance(start, int | float):
        raise BudgetExceeded("it adds up lists")


@pass_context
def _list(context: BudgetContext, items: Any) -> list[Any]:
    return items_of(context, items)


# Not needed by templates, and with results or times that are hard to bound.
REMOVED_FILTERS = ("pprint", "slice", "striptags", "urlize", "wordwrap", "xmlattr")
_TEXT_FILTERS = ("capitalize", "e", "escape", "forceescape", "string", "title", "truncate", "urlencode", "wordcount")
FILTERS: Mapping[str, Callable[..., Any]] = {
    **PAYMENTS,
    **{name: _own(name) for name in _TEXT_FILTERS},
    **{name: _own(name, sorts=True) for name in ("groupby", "max", "min", "sort", "unique")},
    "batch": _own("batch", _check_batch),
    "center": paid(_center),
    "format": paid(_format),
    "indent": paid(_indent),
    "join": _join,
    "list": _list,
    "lower": paid(_lower),
    "replace": paid(_replace),
    "round": _own("round", _check_round),
    "sum": _own("sum", _check_sum),
    "trim": paid(_trim),
    "upper": paid(_upper),
}
