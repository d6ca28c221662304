"""Chat templates: sandboxed Jinja with Hugging Face's semantics, and limits on what a template may consume.

A template comes with a model, so it is untrusted code. Jinja's sandbox protects Python's internals; a budget limits the
work and the text of each render (`template_budget.py`), and the output has a maximum length.

`AdaptedTemplate` adapts message histories that a template would refuse or drop. Agents send what no template author
expected: system messages in the middle and at the end, two messages of one role in a row, calls and results for
templates without tool support. What a template accepts is found once, by rendering small probes: a probe fails if the
template raises, or if one of its texts is missing from the prompt or out of order. Each failed probe enables one step
for all conversations, so a prompt's form never depends on earlier requests and prefixes stay stable. If a history fails
all the same, the remaining steps are added one by one until it renders.

A step is a pure function from messages to messages. No step loses text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from itertools import product
from types import BuiltinMethodType, GeneratorType, TracebackType
from typing import Any, cast

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import TemplateRuntimeError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from modelyard.core.errors import InvalidRequest
from modelyard.core.output_format import RESULTS, Dumps, NamedCalls
from modelyard.prompt import template_budget
from modelyard.prompt.template_budget import (
    BUILDING_METHODS,
    MAX_ITEMS,
    MAX_SOURCE,
    BudgetContext,
    BudgetExceeded,
    Frozen,
    text_size,
    with_budget,
)

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


class PlainNamespace(Namespace):
    """One may contain another any number of times: its text does not show them."""

    def __repr__(self) -> str:
        return "<namespace>"


class GenerationBlocks(Extension):
    """`{% generation %}…{% endgeneration %}` marks generated text for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it as a plain set

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


_DICT_ATTRIBUTES = frozenset(dir(dict))
_LOOP_ATTRIBUTES = frozenset({"first", "last", "index", "index0", "length", "previtem", "nextitem"})
_TEXT_METHODS = ("endswith", "lower", "lstrip", "rstrip", "split", "startswith", "strip", "title", "upper")
_SAFE_METHODS = frozenset({*_TEXT_METHODS, "get", "items", "keys", "values"})
_SAFE_KINDS = (str, dict, Frozen, LoopContext)


class PromptEnvironment(ImmutableSandboxedEnvironment):
    """`builds`: its templates may change lists and dictionaries. Some keep a queue of call ids in a list.

    Most templates consist of `message.role`, `loop.first` and methods such as `strip`. They are safe, and the sandbox
    takes microseconds for each.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    context_class = BudgetContext
    builds = False

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        is_safe = attribute in (_LOOP_ATTRIBUTES if kind is LoopContext else _SAFE_METHODS)
        if is_safe and kind in _SAFE_KINDS and (found := getattr(obj, attribute, None)) is not None:
            return found
        return super().getattr(obj, attribute)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 as in Jinja
        kind = type(__obj)
        if kind is not Macro and not (kind is BuiltinMethodType and __obj.__name__ in _SAFE_METHODS):
            return cast(BudgetContext, __context).pay_for(super().call(__context, __obj, *args, **kwargs))
        kwargs.pop("_loop_vars", None)
        kwargs.pop("_block_vars", None)
        if kind is Macro:  # it has paid for each of its outputs
            return __obj(__context.eval_ctx, *args, **kwargs)
        return cast(BudgetContext, __context).pay_for(__obj(*args, **kwargs))

    def call_filter(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Filters such as `map` take the name of another."""
        if name.startswith("budget "):
            raise TemplateRuntimeError(f"No filter named {name!r}.")
        return super().call_filter(name, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) is type(right) is str:
            made = left + right
        else:
            template_budget.check_operator(operator, left, right)
            made = super().call_binop(context, operator, left, right)
        return cast(BudgetContext, context).pay_for(made)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr in template_budget.FORBIDDEN_METHODS:
            return False
        if isinstance(obj, int) and attr == "to_bytes":
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., Any] | None:
        """Jinja asks here for each attribute that it returns."""
        if (guarded := template_budget.guarded_method(value, builds=self.builds)) is not None:
            return guarded
        made = super().wrap_str_format(value)
        return made if made is None else _checked_format(value.__self__, made)


def _checked_format(form: str, function: Callable[..., str]) -> Callable[..., str]:
    def run(*arguments: Any, **named: Any) -> str:
        template_budget.check_format(form, [*arguments, *named.values()], "{")
        return function(*arguments, **named)

    return run


_plain_json = json.JSONEncoder(ensure_ascii=False).encode


def with_json(value: dict[str, Any], text: str) -> Frozen:
    """`text` is the value's JSON text."""
    made = Frozen(value)
    made.__json__ = text
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
        return value.__json__
    except AttributeError:
        value.__json__ = _plain_json(value)
        return value.__json__


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
    made.filters |= {**template_budget.FILTERS, "tojson": template_budget.paid(to_json)}
    for name in template_budget.REMOVED_FILTERS:
        del made.filters[name]
    del made.globals["lipsum"]  # unbounded output
    made.globals |= {"raise_exception": raise_exception, "range": _range, "namespace": PlainNamespace}
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
        if "date_string" in self._words:  # else Llama's templates write the day on which they were made
            variables = {"date_string": self._fixed["strftime_now"]("%d %b %Y"), **variables}
        context = self._template.new_context({**self._fixed, **variables}, shared=True)
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
            raise TemplateFailed(f"the chat template failed{where}: {_in_plain_words(error)}") from error

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


_INTERNAL = re.compile(  # classes, and the functions of filters and methods
    r"\b(?:jinja2|modelyard)\.(?:\w+\.)*(\w+)|\b(Frozen|FrozenList|NoneType|Undefined)\b"
    r"|[\w.<>]+\(\)(?= (?:got|missing|takes)\b)"
)
_PLAIN = {
    "Frozen": "dict",
    "FrozenList": "list",
    "LoopContext": "loop",
    "NoneType": "none",
    "PlainNamespace": "namespace",
}


def _in_plain_words(error: Exception) -> str:
    """Messages of Python and Jinja name classes that no user knows."""

    def plain(found: re.Match[str]) -> str:
        name = found[1] or found[2] or "a filter or method"
        return _PLAIN.get(name, name.lower())

    return _INTERNAL.sub(plain, f"there is no {error}" if isinstance(error, KeyError) else str(error))


@lru_cache(maxsize=16)  # it takes 40 ms, models share templates, and a reload needs those of all models again
def _compile(source: str) -> tuple[frozenset[str], PromptEnvironment, Template]:
    """The words of the template, and itself. It holds no state of a render."""
    if len(source) > MAX_SOURCE:
        raise ValueError(f"it has more than {MAX_SOURCE:,} characters")
    tree = _environment.parse(source)
    words = frozenset(_words(tree))
    builds = not words.isdisjoint(BUILDING_METHODS)
    chosen = _building_environment if builds else _environment
    return words, chosen, chosen.from_string(with_budget(tree, builds=builds))


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


# --- histories that a template would refuse or drop -------------------------------------------------------------------

Step = Callable[[list[TemplateMessage]], list[TemplateMessage]]


def developer_as_system(entries: list[TemplateMessage]) -> list[TemplateMessage]:
    return [entry | {"role": "system"} if entry["role"] == "developer" else entry for entry in entries]


def short_call_ids(entries: list[TemplateMessage]) -> list[TemplateMessage]:
    """Some templates require nine letters and digits."""
    return [_with_ids(entry, _short) for entry in entries]


def _with_ids(entry: TemplateMessage, change: Callable[[str], str]) -> TemplateMessage:
    if "tool_call_id" in entry:
        return entry | {"tool_call_id": change(entry["tool_call_id"])}
    if "tool_calls" in entry:
        return entry | {"tool_calls": [call | {"id": change(call["id"])} for call in entry["tool_calls"]]}
    return entry


def _short(id: str) -> str:
    if len(id) == 9 and id.isascii() and id.isalnum():
        return id
    return hashlib.blake2b(id.encode("utf-8", "replace"), digest_size=5).hexdigest()[:9]


def one_system_first(entries: list[TemplateMessage]) -> list[TemplateMessage]:
    """Leading system messages become one; later ones stay in place as a reminder in a user message."""
    start = _first_after_system(entries)
    head: list[TemplateMessage] = []
    for entry in entries[:start]:
        head = [_joined(head[0], entry)] if head else [entry]
    return head + [_reminder(entry) if entry["role"] in _SYSTEM else entry for entry in entries[start:]]


_SYSTEM = ("system", "developer")


def _first_after_system(entries: Sequence[TemplateMessage]) -> int:
    return next((at for at, entry in enumerate(entries) if entry["role"] not in _SYSTEM), len(entries))


def _reminder(entry: TemplateMessage) -> TemplateMessage:
    return _message("user", f"<system-reminder>\n{_text(entry['content'])}\n</system-reminder>")


def user_opens(entries: list[TemplateMessage]) -> list[TemplateMessage]:
    start = _first_after_system(entries)
    if start < len(entries) and entries[start]["role"] == "user":
        return entries
    return [*entries[:start], {"role": "user", "content": "(the conversation goes on)"}, *entries[start:]]


def one_message_a_turn(entries: list[TemplateMessage]) -> list[TemplateMessage]:
    out: list[TemplateMessage] = []
    for entry in entries:
        if out and entry["role"] == out[-1]["role"] and entry["role"] in ("user", "assistant"):
            out[-1] = _joined(out[-1], entry)
        else:
            out.append(entry)
    return out


def named_call_ids(entries: list[TemplateMessage]) -> list[TemplateMessage]:
    """Kimi's ids contain the names: its templates write nothing else."""
    calls = [call for entry in entries for call in entry.get("tool_calls", ())]
    ids = {call["id"]: f"functions.{call['function']['name']}:{at}" for at, call in enumerate(calls)}
    return [_with_ids(entry, lambda id: ids.get(id, id)) for entry in entries]


def one_part_a_message(entries: list[TemplateMessage]) -> list[TemplateMessage]:
    """Some templates drop the text beside calls, or write only the first call. Each result follows its call."""
    out: list[TemplateMessage] = []
    for entry in entries:
        if "tool_calls" in entry:
            out += [_message("assistant", entry["content"])] if entry["content"] else []
            first, *more = entry["tool_calls"]
            out.append(entry | {"content": "", "tool_calls": [first]})
            out += [_message("assistant", "") | {"tool_calls": [call]} for call in more]
        else:
            later = range(len(out), 0, -1) if entry["role"] == "tool" else ()
            calls = (at for at in later if entry["tool_call_id"] in _call_ids(out[at - 1]))
            out.insert(next(calls, len(out)), entry)
    return out


def _call_ids(entry: TemplateMessage) -> list[str]:
    return [call["id"] for call in entry.get("tool_calls", ())]


WriteCalls = Callable[[NamedCalls, Dumps], str]


def hermes_calls(calls: NamedCalls, dumps: Dumps) -> str:
    """The most common way to write calls: for models whose own is not known."""
    objects = (dumps({"name": name, "arguments": arguments}) for name, arguments in calls)
    return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)


def calls_as_text(entries: list[TemplateMessage], write: WriteCalls = hermes_calls) -> list[TemplateMessage]:
    return [_call_as_text(entry, write) if "tool_calls" in entry else entry for entry in entries]


def _call_as_text(entry: TemplateMessage, write: WriteCalls) -> TemplateMessage:
    functions = [call["function"] for call in entry["tool_calls"]]
    calls = write([(function["name"], function["arguments"]) for function in functions], tojson)
    content = f"{entry['content']}\n{calls}" if entry["content"] else calls
    return {key: value for key, value in entry.items() if key != "tool_calls"} | {"content": content}


def results_as_text(entries: list[TemplateMessage], marks: tuple[str, str] = RESULTS) -> list[TemplateMessage]:
    """For templates without a role for results: as messages of the user, with the marks of the model's family."""
    return [_message("user", _result_as_text(entry, marks)) if entry["role"] == "tool" else entry for entry in entries]


def _result_as_text(entry: TemplateMessage, marks: tuple[str, str]) -> str:
    before = marks[0].replace("{name}", entry.get("name", "")).replace("{id}", entry.get("tool_call_id", ""))
    return f"{before}{_text(entry['content'])}{marks[1]}"


def system_in_first_user(entries: list[TemplateMessage]) -> list[TemplateMessage]:
    head = one_system_first(entries)
    if not head or head[0]["role"] not in _SYSTEM:
        return head
    system, rest = head[0] | {"role": "user"}, head[1:]
    return [_joined(system, rest[0]), *rest[1:]] if rest and rest[0]["role"] == "user" else [system, *rest]


def with_types(entries: list[TemplateMessage]) -> list[TemplateMessage]:
    """Some templates, mostly of models that see, read lists of typed parts only and drop a plain string. It is no step:
    such a template accepts nothing without it."""
    return [
        entry | {"content": _listed(entry["content"]) or [{"type": "text", "text": ""}]}
        if isinstance(entry.get("content"), str)
        else entry
        for entry in entries
    ]


_OF_CALLS: tuple[Step, ...] = (named_call_ids, one_part_a_message, calls_as_text, results_as_text)
_OF_TURNS: tuple[Step, ...] = (one_system_first, user_opens, system_in_first_user, one_message_a_turn)
# The order in which enabled steps apply; later steps rely on earlier ones.
STEPS: tuple[Step, ...] = (developer_as_system, short_call_ids, *_OF_CALLS, *_OF_TURNS)
# Added last, because they cost the model most, to a history that still fails.
_LAST: tuple[Step, ...] = (calls_as_text, results_as_text, system_in_first_user)
FALLBACK_ORDER = (*(step for step in STEPS if step not in (*_LAST, *_OF_CALLS)), *_LAST)


def _ordered(*steps: Step) -> tuple[Step, ...]:
    return tuple(step for step in STEPS if step in steps)


def _joined(first: TemplateMessage, second: TemplateMessage) -> TemplateMessage:
    """Join two messages of one role."""
    both = first | second | {"content": _joined_content(first["content"], second["content"])}
    if "tool_calls" in both:
        both["tool_calls"] = first.get("tool_calls", []) + second.get("tool_calls", [])
    if "reasoning_content" in first and "reasoning_content" in second:
        both["reasoning_content"] = first["reasoning_content"] + "\n" + second["reasoning_content"]
    return both


def _joined_content(
    first: str | list[TemplateMessage], second: str | list[TemplateMessage]
) -> str | list[TemplateMessage]:
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}" if first and second else first or second
    return _listed(first) + _listed(second)


def _listed(content: str | list[TemplateMessage]) -> list[TemplateMessage]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return content


def _text(content: str | list[TemplateMessage]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(item.get("text", "[image]") for item in content)


# --- probes -----------------------------------------------------------------------------------------------------------


def _message(role: str, content: str) -> TemplateMessage:
    return {"role": role, "content": content}


def used_tool(text: str = "", calls: int = 1) -> list[TemplateMessage]:
    """A conversation with one message of text and calls."""
    asked, answered = _message("assistant", text) | {"tool_calls": []}, []
    for at, id in enumerate(["call_0123456789", "call_9876543210"][:calls]):
        function = {"name": "probename", "arguments": {"probekey": f"probevalue{at}"}}
        asked["tool_calls"].append({"id": id, "type": "function", "function": function})
        answered.append(_message("tool", f"probe result{at}") | {"name": "probename", "tool_call_id": id})
    return [_ONE, asked, *answered, _TWO, _THREE]


_PARAMETERS = {"type": "object", "properties": {"probekey": {"type": "string", "description": "probe"}}, "required": []}
_TOOL = {"type": "function", "function": {"name": "probetool", "description": "probe", "parameters": _PARAMETERS}}
_ONE, _TWO, _THREE = _message("user", "probe one"), _message("assistant", "probe two"), _message("user", "probe three")
_UNKNOWN_ROLE = "probepilot"
_CALLED = ("probe one", "probename", "probevalue0", "probe result0", "probe two", "probe three")

# step → conversations that render completely if the step is not needed: (messages, texts in order)
_PROBES: Mapping[Step, tuple[tuple[list[TemplateMessage], tuple[str, ...]], ...]] = {
    developer_as_system: (
        ([_message("developer", "probe rule"), _ONE], ("probe rule", "probe one")),
        ([_ONE, _TWO, _message("developer", "probe rule"), _THREE], ("probe two", "probe rule", "probe three")),
    ),
    short_call_ids: ((used_tool(), _CALLED),),
    one_system_first: (
        (
            [_message("system", "probe rule"), _message("system", "probe more"), _ONE],
            ("probe rule", "probe more", "probe one"),
        ),
        ([_ONE, _TWO, _message("system", "probe rule"), _THREE], ("probe two", "probe rule", "probe three")),
        ([_ONE, _TWO, _THREE, _message("system", "probe rule")], ("probe three", "probe rule")),
    ),
    user_opens: (([_TWO, _THREE], ("probe two", "probe three")),),
    system_in_first_user: (([_message("system", "probe rule"), _ONE], ("probe rule", "probe one")),),
    one_message_a_turn: (
        (
            [_ONE, _THREE, _TWO, _message("assistant", "probe four"), _ONE],
            ("probe one", "probe three", "probe two", "probe four"),
        ),
    ),
}


# What may be done to calls and results, the least first.
_TREATMENTS: tuple[tuple[Step, ...], ...] = ((), (named_call_ids,), (one_part_a_message,), _LAST[:1], _LAST[:2])


def _beside_system(entries: list[TemplateMessage], _: Any) -> list[TemplateMessage]:
    """Some templates write the tools after the system prompt, and only if there is one."""
    return entries if _first_after_system(entries) else [_message("system", ""), *entries]


def _in_system(entries: list[TemplateMessage], tools: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """Some read them from the system message, as JSON."""
    head, *rest = _beside_system(entries, tools)
    return [head | {"tools": tojson([tool["function"] for tool in tools])}, *rest]


_REASONING = ("reasoning_content", "reasoning", "thinking", "thought")  # what templates call it


class AdaptedTemplate:
    """A template that accepts every history. `write` is how calls are written that it cannot write, and `results` are
    the marks around results. `repr` shows the steps that it needs."""

    def __init__(
        self, template: ChatTemplate, write: WriteCalls = hermes_calls, results: tuple[str, str] = RESULTS
    ) -> None:
        self.template = template
        self._write, self._results = write, results
        self._offer: Callable[..., list[TemplateMessage]] | None = None
        self._no_tools: list[Any] | None
        self._reasoning = next(filter(template.mentions, _REASONING), _REASONING[0])
        # Some templates take no strings, and some no None: they need an empty list if there are no tools.
        for self._needs_types, self._no_tools in ((False, None), (False, []), (True, None), (True, []), (False, None)):
            if self._accepts([_ONE], ("probe one",)):
                break
        self.shows_tools = False
        for self._offer in (None, _beside_system, _in_system, None) if template.mentions("tools") else ():
            if self._accepts([_ONE], ("probetool",), offered=True):
                self.shows_tools = True
                break
        self._steps: dict[tuple[bool, bool, bool], tuple[Step, ...]] = {}
        for offered in (False, True)[: 1 + self.shows_tools]:
            always = [step for step in _PROBES if self._needs(step, offered)]
            for text, parallel in product((False, True), repeat=2):
                self._steps[offered, text, parallel] = self._with_calls(always, offered, text, parallel)
        self.steps = self._steps[False, False, False]
        if self.shows_tools:  # some only after the last question
            self.shows_tools = self._accepts(used_tool()[:3], ("probetool",), self._steps[True, False, False], True)
        # Some put the system prompt into the last message, if that is a question.
        asked, answered = ([_message("system", "probe rule"), *rest] for rest in ([_ONE], [_ONE, _TWO]))
        self._drops_system = self._accepts(asked, ("probe rule",)) and not self._accepts(answered, ("probe rule",))

    def __repr__(self) -> str:
        return f"<AdaptedTemplate [{', '.join(step.__name__ for step in self.steps)}]>"

    def _with_calls(self, always: list[Step], offered: bool, text: bool, parallel: bool) -> tuple[Step, ...]:
        """The steps for conversations with or without tools, text beside calls, and parallel calls."""
        probe = used_tool("probe text" if text else "", 1 + parallel)
        others = ("probe text",) * text + ("probevalue1", "probe result1") * parallel
        for more in _TREATMENTS:
            steps = _ordered(*always, *more)
            if all(self._accepts(probe, texts, steps, offered) for texts in (_CALLED, *((one,) for one in others))):
                break
        return steps

    def _needs(self, step: Step, offered: bool) -> bool:
        if not all(self._accepts(*probe, offered=offered) for probe in _PROBES[step]):
            return True
        return step is developer_as_system and self._copies_role("developer")

    def _copies_role(self, role: str) -> bool:
        """Whether the template writes the name of this role as it would write any word: the model was not trained on
        it."""
        try:
            known, unknown = (self._render([_message(name, "probe rule"), _ONE], {}) for name in (role, _UNKNOWN_ROLE))
        except TemplateFailed:
            return False
        return role in known and known.replace(role, _UNKNOWN_ROLE) == unknown

    def _accepts(
        self, entries: list[TemplateMessage], texts: Sequence[str], steps: Sequence[Step] = (), offered: bool = False
    ) -> bool:
        try:
            text = self._render(entries, {"tools": [_TOOL] if offered else None, "add_generation_prompt": True}, steps)
        except TemplateFailed:
            return False
        at = 0
        for wanted in texts:
            if (at := text.find(wanted, at)) < 0:
                return False
            at += len(wanted)
        return True

    def _render(self, entries: list[TemplateMessage], variables: Mapping[str, Any], steps: Sequence[Step] = ()) -> str:
        for step in steps:
            if step is results_as_text:
                entries = results_as_text(entries, self._results)
            else:
                entries = calls_as_text(entries, self._write) if step is calls_as_text else step(entries)
        if (tools := variables.get("tools")) and self._offer is not None:
            entries = self._offer(entries, tools)
        if self._needs_types:
            entries = with_types(entries)
        if self._reasoning != _REASONING[0]:
            entries = [{self._reasoning if k == _REASONING[0] else k: v for k, v in e.items()} for e in entries]
        return self.template.render({**variables, "tools": tools or self._no_tools, "messages": entries})

    def render(self, entries: list[TemplateMessage], variables: Mapping[str, Any]) -> str:
        calling = [entry for entry in entries if "tool_calls" in entry]
        has_text, is_parallel = any(e["content"] for e in calling), any(len(e["tool_calls"]) > 1 for e in calling)
        needed = self._steps[bool(variables.get("tools")) and self.shows_tools, has_text, is_parallel]
        if self._drops_system and entries and entries[-1]["role"] != "user":
            needed = _ordered(*needed, system_in_first_user)
        try:
            return self._render(entries, variables, needed)
        except TemplateFailed as error:
            first = error  # it describes the conversation as it was sent
        for step in FALLBACK_ORDER:
            needed = _ordered(*needed, step)
            with suppress(TemplateFailed):
                return self._render(entries, variables, needed)
        raise first
