"""The budget of a render: how much work and how much text a chat template may cost.

A template comes with a model, so it is untrusted code, and it runs on the server's event loop. Counting each operation
would double the time of ordinary templates. So `with_budget` adds the counting to the template's syntax tree, only
where work or text can multiply:

- a loop pays for all its iterations when it starts, by the size of its body; long ones also look at the clock;
- a macro, a call block, an iteration of a recursive loop and each run of many statements pay and look at the clock;
- a text or collection pays by its size when it is kept: assigned, passed, or collected by a macro. A collection pays by
  the size of its text, because one list may be contained in another any number of times; so that this stays true, what
  is put into a collection is frozen.

In between, an operation is on values of bounded size. Filters and methods whose result may be much larger than their
arguments are checked before they run, and so is the text of a collection.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial, wraps
from itertools import islice
from time import monotonic, thread_time
from typing import Any

from jinja2 import filters as jinja_filters
from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.runtime import Context, markup_join

MAX_WORK = 20_000_000  # operations, each 50 ns or more
MAX_SECONDS = 1.0
_MAX_WAIT = 0.05  # seconds until the next look at the thread's time
MAX_TEXT = 8_000_000  # characters of one value: more than fit in any window
MAX_ITEMS = 1_000_000  # of a range
MAX_BUILT = 100_000  # items that a template adds to a collection one by one
MAX_BITS = 4096  # of an integer
MAX_SOURCE = 1 << 17  # characters of a template; the longest known has 40,000
_CHARACTERS = 8  # for the price of one operation
_ITEM = 32  # characters that an item of a collection counts as, beside its text
_STRETCH = 100  # operations without a look at the clock
_MAX_EXPRESSION = 500
_MAX_OPERANDS = 8  # of `+` and `~` in a row


class BudgetExceeded(SecurityError):
    """The template costs too much."""


class BudgetContext(Context):
    """The variables of one render, and what is left of its budget."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.left = MAX_WORK
        self.end = monotonic() + MAX_SECONDS
        self._cpu_end = 0.0

    def pay(self, work: int) -> None:
        self.left -= work
        if self.left < 0:
            raise BudgetExceeded(f"it takes more than {MAX_WORK:,} operations")
        if monotonic() > self.end:
            self.check_time()

    def check_time(self) -> None:
        """On a busy machine a thread waits; from here on only its own time counts, which takes longer to read."""
        used = thread_time()
        self._cpu_end = self._cpu_end or used + MAX_SECONDS
        if used > self._cpu_end:
            raise BudgetExceeded(f"it takes more than {MAX_SECONDS:.0f} s")
        self.end = monotonic() + _MAX_WAIT


# --- at run time ------------------------------------------------------------------------------------------------------


class _Watched:
    """A long iterable that looks at the clock while it is read."""

    def __init__(self, context: BudgetContext, items: Any, weight: int) -> None:
        self._context, self._items, self._weight = context, items, weight

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        context, stretch, weight = self._context, 0, self._weight
        end = context.end
        for item in self._items:
            stretch += weight
            if stretch > _STRETCH:
                stretch = 0
                if monotonic() > end:
                    context.check_time()
                    end = context.end
            yield item


@pass_context
def _loop(context: BudgetContext, iterable: Any, weight: int) -> Any:
    try:
        count = len(iterable)
    except TypeError:
        iterable = _items(context, iterable)
        count = len(iterable)
    work = weight * count
    context.pay(work)
    return iterable if work <= _STRETCH else _Watched(context, iterable, weight)


def _items(context: BudgetContext, iterable: Any) -> list[Any]:
    """As a list. The iterable may compute its items, with filters such as `map`."""
    made: list[Any] = []
    iterator = iter(iterable)
    while block := list(islice(iterator, _STRETCH)):
        made += block
        context.pay(len(block))
        if len(made) * _ITEM > MAX_TEXT:
            raise _too_long()
    return made


@pass_context
def _pay(context: BudgetContext, work: int) -> str:
    context.pay(work)
    return ""


@pass_context
def _keep(context: BudgetContext, value: Any) -> Any:
    if type(value) is str:
        if len(value) > _CHARACTERS:
            _pay_text(context, len(value))
    elif isinstance(value, str | list | tuple | dict):
        _pay_text(context, text_size(value))
    return value


@pass_context
def _collect(context: BudgetContext, value: Any) -> Any:
    """A list, tuple or dictionary that the template writes."""
    _pay_text(context, text_size(value))
    if isinstance(value, dict):
        return {key: frozen(item) for key, item in value.items()}
    return type(value)(map(frozen, value))


class FrozenList(list[Any]):
    """A list that a template cannot change."""


def frozen(value: Any) -> Any:
    """A copy that the template cannot change. Other types than these two cannot be changed anyway."""
    if type(value) is list:
        return FrozenList(map(frozen, value))
    if type(value) is dict:
        return Frozen((key, frozen(item)) for key, item in value.items())
    return value


class Frozen(dict[str, Any]):
    """An immutable dictionary with a cached JSON text: a tool's definition, or arguments exactly as a model wrote
    them."""

    __slots__ = ("_json",)
    _json: str


def _pay_text(context: BudgetContext, size: int) -> None:
    context.left -= size // _CHARACTERS
    if size > MAX_TEXT or context.left < 0:
        raise _too_long()


def _too_long() -> BudgetExceeded:
    return BudgetExceeded(f"it builds a text or a list of more than {MAX_TEXT:,} characters")


def text_size(value: Any) -> int:
    """About the length of the value as text. It is not measured beyond the limit."""
    size, rest = 0, [value]
    while rest:
        item = rest.pop()
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, dict):
            size += _ITEM * len(item)
            if size <= MAX_TEXT:
                rest += item.keys()
                rest += item.values()
        elif isinstance(item, list | tuple):
            size += _ITEM * len(item)
            if size <= MAX_TEXT:
                rest += item
        if size > MAX_TEXT:
            raise _too_long()
    return size


def text(value: Any) -> str:
    """Takes the place of `str` in compiled templates."""
    if type(value) is str:
        return value
    if isinstance(value, list | tuple | dict):
        text_size(value)
    return str(value)


def _concat(values: Iterable[Any]) -> str:
    """Takes the place of Jinja's `str_join`, which is the operator `~`."""
    return "".join(map(text, values))


def _concat_markup(values: Iterable[Any]) -> str:
    return markup_join(text(value) if isinstance(value, list | tuple | dict) else value for value in values)


REPLACED_GLOBALS = {"str": text, "str_join": _concat, "markup_join": _concat_markup}


def check_power(base: Any, exponent: Any) -> None:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > MAX_BITS:
        raise BudgetExceeded("the exponent is too large")


def check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > MAX_BITS:
            raise BudgetExceeded("it computes a number that is too large")
        return
    value, times = (right, left) if isinstance(left, int) else (left, right)
    is_repetition = isinstance(value, str | list | tuple) and isinstance(times, int)
    if is_repetition and max(len(value), text_size(value)) * times > MAX_ITEMS:
        raise BudgetExceeded("it repeats a text too often")


_WIDE = re.compile(
    r"%[^a-zA-Z%]*(?:\d{5}|\*)|\{[^{}]*:[^{}]*(?:\d{5}|\{)"
)  # widths of five digits, or given by an argument


def check_format(text: str, arguments: Any, marker: str) -> None:
    """Each place may contain the longest argument, and be as wide as its width says."""
    if _WIDE.search(text):
        raise BudgetExceeded("it formats with a width that is too large or unknown")
    places = text.count(marker)
    longest = max(map(text_size, arguments), default=0) if isinstance(arguments, tuple | list) else text_size(arguments)
    wide = max(map(int, re.findall(r"\d{2,4}", text)), default=0)
    if places * max(longest, wide) > MAX_TEXT:
        raise _too_long()


def _check_replace(text: str, old: str, new: str) -> None:
    if len(new) > len(old) and len(text) + (len(text) + 1 if not old else text.count(old)) * len(new) > MAX_TEXT:
        raise _too_long()


def _replace_method(text: str, _: Context, old: str, new: str, count: int = -1) -> str:
    _check_replace(text, old, new)
    return text.replace(old, new, count)


def _join_method(text: str, context: BudgetContext, items: Iterable[str]) -> str:
    parts = _items(context, items)
    if len(parts) * len(text) + text_size(parts) > MAX_TEXT:
        raise _too_long()
    return text.join(parts)


def _build(method: Callable[..., Any], context: BudgetContext, *arguments: Any, **named: Any) -> Any:
    """A method that puts its arguments into a list or a dictionary."""
    if len(getattr(method, "__self__", ())) > MAX_BUILT:
        raise BudgetExceeded(f"it builds a collection of more than {MAX_BUILT:,} items")
    context.pay(1)
    _pay_text(context, text_size([*arguments, *named.values()]))
    return method(*map(frozen, arguments), **{name: frozen(value) for name, value in named.items()})


_METHODS: dict[str, Callable[..., Any]] = {"replace": _replace_method, "join": _join_method}
BUILDING_METHODS = frozenset({"append", "extend", "insert", "pop", "remove", "setdefault", "update"})
FORBIDDEN_METHODS = frozenset(
    {"center", "encode", "expandtabs", "format_map", "ljust", "maketrans", "rjust", "translate", "zfill"}
)  # of texts: padding, other encodings, tables of replacements


def guarded_method(value: Any) -> Callable[..., Any] | None:
    """What is called in place of this method of a text, list or dictionary."""
    name = getattr(value, "__name__", "")
    if name in _METHODS and isinstance(owner := getattr(value, "__self__", None), str):
        return pass_context(partial(_METHODS[name], owner))
    if name in BUILDING_METHODS and type(getattr(value, "__self__", None)) in (list, dict):
        return pass_context(partial(_build, value))
    return None


# --- filters ----------------------------------------------------------------------------------------------------------
#
# Those whose result may be larger than their arguments take the context, so that Jinja does not run them on constants
# while it compiles.


@pass_context
def _replace(context: Context, text: Any, old: Any, new: Any, count: int | None = None) -> Any:
    _check_replace(str(text), str(old), str(new))
    return jinja_filters.do_replace(context.eval_ctx, str(text), str(old), str(new), count)


@pass_context
def _join(context: BudgetContext, items: Any, d: str = "", attribute: str | int | None = None) -> Any:
    if attribute is not None:
        items = map(jinja_filters.make_attrgetter(context.environment, attribute), items)
    parts = _items(context, items)
    if len(parts) * len(str(d)) + text_size(parts) > MAX_TEXT:
        raise _too_long()
    return jinja_filters.sync_do_join(context.eval_ctx, parts, str(d))


@pass_context
def _list(context: BudgetContext, items: Any) -> list[Any]:
    return _items(context, items)


@pass_context
def _batch(_: Context, items: Any, linecount: int, fill_with: Any = None) -> Any:
    if linecount * _ITEM > MAX_TEXT:
        raise BudgetExceeded("it fills a list with too many items")
    return jinja_filters.do_batch(items, linecount, fill_with)


@pass_context
def _round(_: Context, value: float, precision: int = 0, method: Any = "common") -> float:
    if abs(precision) > 30:
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
    return str(value).center(width)


@pass_context
def _indent(_: Context, value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    pad = width if isinstance(width, str) else " " * min(width, 100)
    head, *rest = str(value).split("\n")
    if len(pad) * (len(rest) + 1) > MAX_TEXT:
        raise _too_long()
    lines = [(pad if first else "") + head] + [pad + line if line or blank else line for line in rest]
    return "\n".join(lines)


@pass_context
def _format(_: Context, value: Any, *arguments: Any, **named: Any) -> str:
    check_format(str(value), [*arguments, *named.values()], "%")
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
        made = items if isinstance(items, dict) else _items(context, items)
        context.pay(_SORTING * len(made))
        return function(context.environment, made, *arguments, **named)

    return run


def limited(function: Callable[..., str]) -> Callable[..., str]:
    """A filter whose result may be a multiple of its value, as a filter that pays for it."""

    @pass_context
    def run(context: BudgetContext, value: Any, *arguments: Any, **named: Any) -> str:
        text = function(value, *arguments, **named)
        _pay_text(context, len(text))
        return text

    return run


# Not needed by templates, and with results or times that are hard to bound.
REMOVED_FILTERS = ("pprint", "slice", "striptags", "urlize", "wordwrap", "xmlattr")
_SORTING = 20  # operations for an item
_TEXT_FILTERS = ("capitalize", "e", "escape", "forceescape", "string", "title", "truncate", "urlencode", "wordcount")
FILTERS: Mapping[str, Callable[..., Any]] = {
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
    "budget loop": _loop,  # with a space: no template can name them
    "budget pay": _pay,
    "budget keep": _keep,
    "budget collect": _collect,
}

# --- at compile time --------------------------------------------------------------------------------------------------

_FREE = (nodes.Const, nodes.TemplateData, nodes.Name, nodes.Pair, nodes.Keyword, nodes.NSRef, nodes.Operand)
_UNSUPPORTED = (nodes.Block, nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport)
_COLLECTIONS = (nodes.List, nodes.Tuple, nodes.Dict)


def with_budget(tree: nodes.Template) -> nodes.Template:
    """The tree with its costs added. It is changed in place."""
    for node in tree.find_all(_UNSUPPORTED):
        raise TemplateSyntaxError(f"a chat template has no {type(node).__name__.lower()}", node.lineno)
    tree.body = _statements(tree.body, collected=False)
    return tree


def _weight(node: nodes.Node) -> int:
    """The number of operations in this node. Loops and macros inside it pay for themselves."""
    if isinstance(node, nodes.Macro | nodes.CallBlock):
        return 1
    own = 0 if isinstance(node, _FREE) else 1
    skipped = ("body", "else_", "test") if isinstance(node, nodes.For) else ()
    return own + sum(map(_weight, node.iter_child_nodes(exclude=skipped)))


def _filter(name: str, value: nodes.Expr, *arguments: Any) -> nodes.Filter:
    line = value.lineno
    given: list[nodes.Expr] = [nodes.Const(argument, lineno=line) for argument in arguments]
    return nodes.Filter(value, f"budget {name}", given, [], None, None, lineno=line)


def _payment(work: int, line: int) -> nodes.Stmt:
    return nodes.ExprStmt(_filter("pay", nodes.Const(work, lineno=line)), lineno=line)


def _statements(body: list[nodes.Node], *, collected: bool) -> list[nodes.Node]:
    """`collected`: the output is a value of the template."""
    out: list[nodes.Node] = []
    stretch = 0
    for node in body:
        weight = _weight(node)
        if stretch and stretch + weight > _STRETCH:
            out.append(_payment(stretch, node.lineno))
            stretch = 0
        stretch += weight
        out.append(_statement(node, collected))
    return out


def _statement(node: nodes.Node, collected: bool) -> nodes.Node:
    if isinstance(node, nodes.Output):
        node.nodes = [_output(each, collected) for each in node.nodes]
        return node
    _expressions(node)
    if isinstance(node, nodes.For):
        _for(node, collected)
    elif isinstance(node, nodes.Macro | nodes.CallBlock):
        pay = _payment(1 + sum(map(_weight, node.body)), node.lineno)
        node.body = [pay, *_statements(node.body, collected=True)]
        node.defaults = [_kept(each) for each in node.defaults]
    elif isinstance(node, nodes.Assign):
        node.node = _kept(node.node)
    elif isinstance(node, nodes.With):
        node.values = [_kept(each) for each in node.values]
        node.body = _statements(node.body, collected=collected)
    elif isinstance(node, nodes.AssignBlock):
        node.body = _statements(node.body, collected=True)
    elif isinstance(node, nodes.If):
        node.body = _statements(node.body, collected=collected)
        node.elif_ = [_if(each, collected) for each in node.elif_]
        node.else_ = _statements(node.else_, collected=collected)
    elif hasattr(node, "body"):
        node.body = _statements(node.body, collected=collected or isinstance(node, nodes.FilterBlock))
    return node


def _if(node: nodes.If, collected: bool) -> nodes.If:
    _statement(node, collected)
    return node


def _for(node: nodes.For, collected: bool) -> None:
    tested = [node.test] if node.test is not None else []
    weight = 1 + sum(map(_weight, [*node.body, *tested]))
    node.iter = _filter("loop", node.iter, weight)
    node.body = _statements(node.body, collected=collected or node.recursive)
    if node.recursive:
        node.body.insert(0, _payment(weight, node.lineno))
    node.else_ = _statements(node.else_, collected=collected)


def _output(node: nodes.Expr, collected: bool) -> nodes.Expr:
    if isinstance(node, nodes.TemplateData):
        return node
    made = _expression(node)
    return _filter("keep", made) if collected and not isinstance(node, nodes.Const) else made


def _expressions(statement: nodes.Node) -> None:
    """Guard the expressions of a statement, not those of the statements inside it."""
    for name, value in statement.iter_fields():
        if isinstance(value, nodes.Expr):
            setattr(statement, name, _expression(value))
        elif isinstance(value, list):
            made = [_expression(each) if isinstance(each, nodes.Expr) else each for each in value]
            setattr(statement, name, made)


def _expression(node: nodes.Expr) -> Any:
    if _weight(node) > _MAX_EXPRESSION:
        raise TemplateSyntaxError(f"an expression has more than {_MAX_EXPRESSION} operations", node.lineno)
    return _guarded(node)


def _guarded(node: nodes.Node) -> Any:
    """The expression with guards for what multiplies inside it."""
    for name, value in node.iter_fields():
        if isinstance(value, nodes.Node):
            setattr(node, name, _guarded(value))
        elif isinstance(value, list):
            setattr(node, name, [_guarded(each) if isinstance(each, nodes.Node) else each for each in value])
    if isinstance(node, nodes.Call):
        node.args = [_kept(each) for each in node.args]
        for keyword in node.kwargs:
            keyword.value = _kept(keyword.value)
        return node
    if isinstance(node, _COLLECTIONS) and getattr(node, "ctx", "load") == "load" and not _is_constant(node):
        return _filter("collect", node)
    if isinstance(node, nodes.Add):
        node.left = _shortened(node.left)
    elif isinstance(node, nodes.Concat) and len(node.nodes) > _MAX_OPERANDS:
        head = nodes.Concat(node.nodes[:_MAX_OPERANDS], lineno=node.lineno)
        return _guarded_concat(head, node.nodes[_MAX_OPERANDS:])
    return node


def _guarded_concat(head: nodes.Expr, rest: list[nodes.Expr]) -> nodes.Expr:
    while rest:
        head = nodes.Concat([_filter("keep", head), *rest[: _MAX_OPERANDS - 1]], lineno=head.lineno)
        rest = rest[_MAX_OPERANDS - 1 :]
    return head


def _shortened(node: nodes.Expr) -> nodes.Expr:
    """`a + b + c` is a chain to the left. A long one is kept in between."""
    count, each = 0, node
    while isinstance(each, nodes.Add):
        count, each = count + 1, each.left
    return _filter("keep", node) if count and count % _MAX_OPERANDS == 0 else node


def _is_constant(node: nodes.Node) -> bool:
    return all(isinstance(each, nodes.Const) or _is_constant(each) for each in node.iter_child_nodes()) and (
        isinstance(node, nodes.Const | nodes.Pair | nodes.List | nodes.Tuple | nodes.Dict)
    )


def _kept(node: Any) -> Any:
    """Only what may be new and large is worth a payment."""
    return _filter("keep", node) if _grows(node) else node


def _grows(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Filter) and node.name.startswith("budget"):
        return False
    if isinstance(node, nodes.Add | nodes.Concat | nodes.Mul | nodes.Mod | nodes.Call | nodes.Filter):
        return not (isinstance(node, nodes.Filter) and node.name in _SHRINKING and not _inner_grows(node))
    if isinstance(node, nodes.CondExpr):
        return _grows(node.expr1) or (node.expr2 is not None and _grows(node.expr2))
    if isinstance(node, nodes.And | nodes.Or):
        return _grows(node.left) or _grows(node.right)
    return isinstance(node, nodes.Getitem) and _grows(node.node)


_SHRINKING = frozenset({"count", "default", "first", "int", "last", "length", "lower", "trim", "upper"})


def _inner_grows(node: nodes.Filter) -> bool:
    return node.node is not None and _grows(node.node)
