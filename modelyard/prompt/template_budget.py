"""The budget of a render: how much work and how much text a chat template may cost.

A template comes with a model, so it is untrusted code, and it is tried on the server's event loop first. Counting each
operation would double the time of ordinary templates. So `with_budget` adds the counting to the template's syntax tree,
only where work or text can multiply:

- a loop pays for all its iterations when it starts, by the size of its body, and looks at the clock now and then;
- a macro, a call block, an iteration of a recursive loop and each run of many statements pay and look at the clock;
- a text or collection pays by its size when it is kept: assigned, passed, or collected by a macro. A collection pays by
  the size of its text, because one list may be contained in another any number of times.

In between, operations are on values of bounded size. Filters and methods whose result may be much larger than their
arguments are checked before they run. Those that take the context are not run on constants while Jinja compiles.
`DIRECT_METHODS` are methods that templates call all the time: Jinja's sandbox takes two microseconds for each call.

Most templates change no collection. One that names a method such as `append` is compiled with more checks: what it puts
into a collection is frozen, so that a size that was paid for stays true, and a collection is measured before it becomes
text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import partial, wraps
from itertools import chain, islice
from time import monotonic, thread_time
from typing import Any

from jinja2 import Environment, nodes, pass_context
from jinja2 import filters as jinja_filters
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.nodes import EvalContext
from jinja2.runtime import Context, markup_join

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
_MAX_OPERANDS = 8  # of `+` and `~` in a row
_MAX_FIELDS = 4  # of a collection that is used at once
BUILDING_METHODS = frozenset({"append", "extend", "insert", "pop", "remove", "setdefault", "update"})


max_seconds: ContextVar[float] = ContextVar("max_seconds", default=MAX_SECONDS)  # of the next render


class BudgetExceeded(SecurityError):
    """The template costs too much."""


class BudgetContext(Context):
    """The variables of one render, and what is left of its budget. `parent` has those of all renders."""

    def __init__(
        self,
        environment: Environment,
        parent: dict[str, Any],
        *_: Any,
        variables: dict[str, Any] | None = None,
        **__: Any,
    ) -> None:
        # As in Context, without blocks and exports, which take as long as a short template.
        self.parent, self.vars, self.environment, self.name = parent, variables or {}, environment, None
        self.eval_ctx = EvalContext(environment)
        self.exported_vars, self.globals_keys, self.blocks = set(), set(), {}
        self.left = MAX_WORK
        self._seconds = max_seconds.get()
        self.end = monotonic() + self._seconds
        self._cpu_end = 0.0

    def pay(self, work: int) -> None:
        self.left -= work
        if self.left < 0:
            raise BudgetExceeded(f"it takes more than {MAX_WORK:,} operations")
        if monotonic() > self.end:
            self.check_time()

    def pay_text(self, size: int) -> None:
        self.left -= size // _CHARACTERS
        if size > MAX_TEXT or self.left < 0:
            raise too_long()

    def check_time(self) -> None:
        """On a busy machine a thread waits; from here on only its own time counts, which takes longer to read."""
        used = thread_time()
        self._cpu_end = self._cpu_end or used + self._seconds / 2
        if used > self._cpu_end:
            raise BudgetExceeded(f"it takes more than {self._seconds:g} s")
        self.end = monotonic() + _MAX_WAIT


def too_long() -> BudgetExceeded:
    return BudgetExceeded(f"it builds a text or a list of more than {MAX_TEXT:,} characters")


# --- collections ------------------------------------------------------------------------------------------------------


class Frozen(dict[str, Any]):
    """An immutable dictionary with a cached JSON text: a tool's definition, or arguments exactly as a model wrote
    them."""

    __slots__ = ("_json",)
    _json: str


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


def _concat(values: Iterable[Any]) -> str:
    return "".join(map(text, values))


def _concat_markup(values: Iterable[Any]) -> str:
    return markup_join(text(value) if isinstance(value, list | tuple | dict) else value for value in values)


# Names in the compiled code of a template that changes collections; `str_join` is the operator `~`.
CHECKED_GLOBALS: Mapping[str, Any] = {"str": text, "str_join": _concat, "markup_join": _concat_markup}


# --- payments ---------------------------------------------------------------------------------------------------------


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


@pass_context
def _pay(context: BudgetContext, work: int) -> str:
    context.pay(work)
    return ""


@pass_context
def _keep(context: BudgetContext, value: Any) -> Any:
    if type(value) is str:
        size = len(value)
        context.left -= size // _CHARACTERS
        if size > MAX_TEXT or context.left < 0:
            raise too_long()
    elif isinstance(value, str | list | tuple | dict):
        context.pay_text(text_size(value))
    return value


@pass_context
def _collect(context: BudgetContext, value: Any) -> Any:
    """A list, tuple or dictionary that the template writes."""
    context.pay_text(text_size(value))
    if isinstance(value, dict):
        return {key: frozen(item) for key, item in value.items()}
    return type(value)(map(frozen, value))


# With a space, so that no template can name them; `map` refuses them. They take the context, so Jinja does not run them
# while it compiles.
PAYMENTS: Mapping[str, Callable[..., Any]] = {
    "budget collect": _collect,
    "budget keep": _keep,
    "budget loop": _loop,
    "budget pay": _pay,
}

# --- at compile time --------------------------------------------------------------------------------------------------

_FREE = (nodes.Const, nodes.TemplateData, nodes.Name, nodes.Pair, nodes.Keyword, nodes.NSRef, nodes.Operand)
_UNSUPPORTED = (nodes.Block, nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport)
_COLLECTIONS = (nodes.List, nodes.Tuple, nodes.Dict)
_REFERENCES = (nodes.Const, nodes.Getattr, nodes.Getitem, nodes.Name)
_GROWING = (nodes.Add, nodes.Concat, nodes.Mul, nodes.Mod, nodes.Call, nodes.Filter)
_SMALL = frozenset({"count", "default", "first", "int", "last", "length"})  # filters whose result is no new text
_SMALL_CALLS = frozenset({"endswith", "get", "items", "startswith"})


def with_budget(tree: nodes.Template, direct_methods: Iterable[str], *, builds: bool) -> nodes.Template:
    """The tree with its costs added. It is changed in place. `builds`: it may change collections."""
    for node in tree.find_all(_UNSUPPORTED):
        raise TemplateSyntaxError(f"a chat template has no {type(node).__name__.lower()}", node.lineno)
    tree.body = _Budgeting(frozenset(direct_methods), "collect" if builds else "keep").statements(tree.body)
    return tree


class _Budgeting:
    def __init__(self, direct_methods: frozenset[str], collect: str) -> None:
        self._direct_methods, self._collect = direct_methods, collect

    def statements(self, body: list[nodes.Node], *, collected: bool = False) -> list[nodes.Node]:
        """`collected`: the output is a value of the template."""
        out: list[nodes.Node] = []
        stretch = 0
        for node in body:
            weight = _weight(node)
            if stretch and stretch + weight > _STRETCH:
                out.append(_payment(stretch, node.lineno))
                stretch = 0
            stretch += weight
            out.append(self._statement(node, collected))
        return out

    def _statement(self, node: Any, collected: bool) -> Any:
        if isinstance(node, nodes.Output):
            node.nodes = [self._output(each, collected) for each in node.nodes]
            return node
        if isinstance(node, nodes.For):
            self._for(node, collected)
            return node
        self._expressions(node)
        if isinstance(node, nodes.Macro | nodes.CallBlock):
            payment = _payment(1 + sum(map(_weight, node.body)), node.lineno)
            node.body = [payment, *self.statements(node.body, collected=True)]
            node.defaults = [_kept(each) for each in node.defaults]
        elif isinstance(node, nodes.Assign):
            node.node = _kept(node.node)
        elif isinstance(node, nodes.If):
            node.body = self.statements(node.body, collected=collected)
            for each in node.elif_:
                self._statement(each, collected)
            node.else_ = self.statements(node.else_, collected=collected)
        elif hasattr(node, "body"):
            if isinstance(node, nodes.With):
                node.values = [_kept(each) for each in node.values]
            is_value = isinstance(node, nodes.AssignBlock | nodes.FilterBlock)
            node.body = self.statements(node.body, collected=collected or is_value)
        return node

    def _for(self, node: nodes.For, collected: bool) -> None:
        tested = [node.test] if node.test is not None else []
        weight = 1 + sum(map(_weight, [*node.body, *tested]))
        self._expressions(node)
        node.iter = _filter("loop", node.iter, weight)
        node.body = self.statements(node.body, collected=collected or node.recursive)
        if node.recursive:
            node.body.insert(0, _payment(weight, node.lineno))
        node.else_ = self.statements(node.else_, collected=collected)

    def _output(self, node: nodes.Expr, collected: bool) -> nodes.Expr:
        if isinstance(node, nodes.TemplateData | nodes.Const):
            return node
        made = self._expression(node)
        return _filter("keep", made) if collected else made

    def _expressions(self, statement: nodes.Node) -> None:
        """Guard the expressions of a statement, not those of the statements inside it."""
        for name, value in statement.iter_fields():
            if isinstance(value, nodes.Expr):
                setattr(statement, name, self._expression(value))
            elif isinstance(value, list):
                made = [self._expression(each) if isinstance(each, nodes.Expr) else each for each in value]
                setattr(statement, name, made)

    def _expression(self, node: nodes.Expr) -> Any:
        if _weight(node) > _MAX_EXPRESSION:
            raise TemplateSyntaxError(f"an expression has more than {_MAX_EXPRESSION} operations", node.lineno)
        return self._guarded(node)

    def _guarded(self, node: nodes.Node) -> Any:
        """The expression with guards for what multiplies inside it."""
        for name, value in node.iter_fields():
            if isinstance(value, nodes.Node):
                setattr(node, name, self._guarded(value))
            elif isinstance(value, list):
                setattr(node, name, [self._guarded(each) if isinstance(each, nodes.Node) else each for each in value])
        if isinstance(node, nodes.Call):
            return self._call(node)
        if _is_collection(node) and not (self._collect == "keep" and _is_short(node)):
            return _filter(self._collect, node)
        if isinstance(node, nodes.Add):
            node.left = _shortened(node.left)
        elif isinstance(node, nodes.Concat) and len(node.nodes) > _MAX_OPERANDS:
            return _nested_concat(node.nodes)
        return node

    def _call(self, node: nodes.Call) -> nodes.Expr:
        called: Any = node.node
        keep = _always_kept if isinstance(called, nodes.Name) and called.name in ("dict", "namespace") else _kept
        node.args = [keep(each) for each in node.args]
        for keyword in node.kwargs:
            keyword.value = keep(keyword.value)
        is_method = isinstance(called, nodes.Getattr) and called.attr in self._direct_methods
        if is_method and not (node.kwargs or node.dyn_args or node.dyn_kwargs):
            name = f"budget call {called.attr}"
            return nodes.Filter(called.node, name, node.args, [], None, None, lineno=node.lineno)
        return node


def _weight(node: nodes.Node) -> int:
    """The number of operations in this node. Loops and macros inside it pay for themselves."""
    if isinstance(node, nodes.Macro | nodes.CallBlock):
        return 1
    own = 0 if isinstance(node, _FREE) else 1
    skipped = ("body", "else_", "test") if isinstance(node, nodes.For) else ()
    return own + sum(map(_weight, node.iter_child_nodes(exclude=skipped)))


def _filter(name: str, value: Any, *arguments: Any) -> nodes.Filter:
    line = value.lineno
    given: list[nodes.Expr] = [nodes.Const(argument, lineno=line) for argument in arguments]
    return nodes.Filter(value, f"budget {name}", given, [], None, None, lineno=line)


def _payment(work: int, line: int) -> nodes.Stmt:
    return nodes.ExprStmt(_filter("pay", nodes.Const(work, lineno=line)), lineno=line)


def _nested_concat(operands: list[nodes.Expr]) -> nodes.Expr:
    """`a ~ b ~ c` is one node with all operands. A long one is kept in between."""
    first, rest = operands[:_MAX_OPERANDS], operands[_MAX_OPERANDS:]
    made = nodes.Concat(first, lineno=first[0].lineno)
    while rest:
        step, rest = rest[: _MAX_OPERANDS - 1], rest[_MAX_OPERANDS - 1 :]
        made = nodes.Concat([_filter("keep", made), *step], lineno=made.lineno)
    return made


def _shortened(node: nodes.Expr) -> nodes.Expr:
    """`a + b + c` is a chain to the left. A long one is kept in between."""
    count, each = 0, node
    while isinstance(each, nodes.Add):
        count, each = count + 1, each.left
    return _filter("keep", node) if count and count % _MAX_OPERANDS == 0 else node


def _is_constant(node: nodes.Node) -> bool:
    is_plain = isinstance(node, nodes.Const | nodes.Pair | nodes.List | nodes.Tuple | nodes.Dict)
    return is_plain and all(map(_is_constant, node.iter_child_nodes()))


def _is_collection(node: nodes.Node) -> bool:
    """Of variables; constants are as long as the template."""
    return isinstance(node, _COLLECTIONS) and getattr(node, "ctx", "load") == "load" and not _is_constant(node)


def _is_short(node: nodes.Node) -> bool:
    """A few fields, such as those of a call: worth no payment unless they are kept."""
    values = [each.value if isinstance(each, nodes.Pair) else each for each in node.iter_child_nodes()]
    return len(values) <= _MAX_FIELDS and all(isinstance(each, _REFERENCES) for each in values)


def _always_kept(node: Any) -> Any:
    return node if isinstance(node, nodes.Const) or _is_kept(node) else _filter("keep", node)


def _kept(node: Any) -> Any:
    """Only what may be new and large is worth a payment."""
    return _filter("keep", node) if _grows(node) else node


def _is_kept(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Filter) and node.name in PAYMENTS


def _grows(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Filter):
        if node.name in _SMALL:
            return node.node is not None and _grows(node.node)
        return not _is_kept(node) and node.name.removeprefix("budget call ") not in _SMALL_CALLS
    if isinstance(node, _GROWING) or _is_collection(node):
        return True
    if isinstance(node, nodes.CondExpr):
        return _grows(node.expr1) or (node.expr2 is not None and _grows(node.expr2))
    if isinstance(node, nodes.And | nodes.Or):
        return _grows(node.left) or _grows(node.right)
    return isinstance(node, nodes.Getitem) and _grows(node.node)


# --- compiled code ----------------------------------------------------------------------------------------------------

_TEXT_FILTERS = frozenset({"lower", "tojson", "trim", "upper"})
DICT_ATTRIBUTES = frozenset(dir(dict))
LOOP_ATTRIBUTES = frozenset({"first", "last", "index", "index0", "length", "previtem", "nextitem"})


class FastCodeGenerator(CodeGenerator):
    """Jinja's code with two shortcuts: no conversion of an output that is a text anyway, and no call for `message.role`
    and `loop.first`, of which most templates consist. They save more than the budget costs."""

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        if is_text(node) and not (frame.eval_ctx.volatile or frame.eval_ctx.autoescape):
            self.write("(" + (finalize.src or ""))
        else:
            super()._output_child_pre(node, frame, finalize)

    def visit_Getattr(self, node: nodes.Getattr, frame: Frame) -> None:  # noqa: N802 as in Jinja
        shortcut = _field_shortcut(node.node, node.attr, frame) if node.attr not in DICT_ATTRIBUTES else ""
        self.write(shortcut)
        super().visit_Getattr(node, frame)
        self.write(")" if shortcut else "")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        shortcut = _field_shortcut(node.node, node.arg.value, frame) if isinstance(node.arg, nodes.Const) else ""
        self.write(shortcut)
        super().visit_Getitem(node, frame)
        self.write(")" if shortcut else "")


def _field_shortcut(node: nodes.Expr, field: Any, frame: Frame) -> str:
    reference = frame.symbols.find_ref(node.name) if isinstance(node, nodes.Name) else None
    if reference is None or not isinstance(field, str):
        return ""
    if reference.endswith("_loop"):
        is_known = field in LOOP_ATTRIBUTES
        return f"({reference}.{field} if type({reference}) is LoopContext else " if is_known else ""
    return f"({reference}[{field!r}] if type({reference}) is dict and {field!r} in {reference} else "


def is_text(node: nodes.Node) -> bool:
    """A sum with a text is a text, or fails."""
    if isinstance(node, nodes.Add):
        return is_text(node.left) or is_text(node.right)
    if isinstance(node, nodes.Filter):
        return node.name in _TEXT_FILTERS or (
            node.name == "budget keep" and node.node is not None and is_text(node.node)
        )
    return isinstance(node, nodes.Concat) or (isinstance(node, nodes.Const) and isinstance(node.value, str))


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


_CHECKED_FILTERS = ("capitalize", "e", "escape", "forceescape", "string", "title", "truncate", "urlencode", "wordcount")
# Not needed by templates, and with results or times that are hard to bound.
REMOVED_FILTERS = ("pprint", "slice", "striptags", "urlize", "wordwrap", "xmlattr")
FILTERS: Mapping[str, Callable[..., Any]] = {
    **PAYMENTS,
    **{f"budget call {name}": function for name, function in DIRECT_METHODS.items()},
    **{name: _checked(name) for name in _CHECKED_FILTERS},
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
