"""Answers of the fake engine when no rule matches, and every answer as raw model output.

Without a rule there is a demo, or the smallest value that satisfies a constraint. Raw output has reasoning and calls in
a model's format, as token ids.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import chain, count
from typing import Any, Literal, NamedTuple

from modelyard.core.errors import InvalidRequest
from modelyard.core.request import Constraint
from modelyard.core.tokenizer import Tokenizer
from modelyard_fake.script import ConversationView, ScriptCall, ScriptStep, unroll

Steps = tuple[ScriptStep, ...]
Schema = dict[Any, Any]

_CALL = re.compile(r"\bcall\s+[`\"']?([\w.-]+)[`\"']?\s*(\{.*\})?", re.IGNORECASE | re.DOTALL)
_THINK = re.compile(r"\bthink\b", re.IGNORECASE)
_MAX_QUOTE = 300  # characters


def demo_answer(conversation: ConversationView) -> Steps:
    user = conversation.user
    if conversation.result is not None:
        return (ScriptStep(text=f"The tool answered: {_shorten(conversation.result)}"),)
    call = _CALL.search(user)
    if call and (name := call[1].rstrip(".")) in conversation.tools:
        return (ScriptStep(text=f"I call {name} for you. "), _call_step(name, conversation, call[2]))
    quote = f"You said: “{_shorten(user)}”. " if user else ""
    # Finding the tools decodes the whole prompt: only do it when the user mentions them.
    tool = next(iter(conversation.tools), None) if "tool" in user.lower() else None
    hint = f"You offer tools: say “call {tool}” and I will. " if tool else ""
    greeting = ScriptStep(
        text=f"Hello! I am the built-in fake engine: there is no model behind me, only a script. {quote}{hint}"
        "Everything around me is real, though: routes, templates, tokens and streams. "
        "Give a model another backend in the configuration to talk to somebody wiser."
    )
    if not _THINK.search(user):
        return (greeting,)
    return (ScriptStep(think="The user wants to see some reasoning, so here is a thought."), greeting)


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_QUOTE else text[:_MAX_QUOTE] + "…"


def _call_step(name: str, conversation: ConversationView, arguments: str | None) -> ScriptStep:
    """Uses the user's arguments if they are a JSON object, else the smallest ones that the tool's schema accepts."""
    try:
        value = json.loads(arguments or "null")
    except ValueError:
        value = None
    if not isinstance(value, dict):
        value = schema_instance(conversation.tools.get(name) or {"type": "object"})
    return ScriptStep(call=ScriptCall(name=name, arguments=value if isinstance(value, dict) else {}))


def constrained_answer(constraint: Constraint | None, conversation: ConversationView) -> Steps | None:
    """None if the constraint leaves the answer free or is a grammar, which the fake engine does not support."""
    if constraint is None or constraint.trigger is not None:
        return None
    if constraint.kind == "json_object":
        return (ScriptStep(text="{}"),)
    if constraint.kind == "json_schema":
        return _schema_answer(constraint.text)
    if constraint.schema:  # and calls, if any, are optional
        call = _CALL.search(conversation.user) if conversation.result is None else None
        if call and call[1] in constraint.tools:
            return (_call_step(call[1], conversation, call[2]),)
        return _schema_answer(constraint.schema)
    if constraint.kind == "regex":
        return (ScriptStep(text=regex_sample(constraint.text)),)
    if constraint.kind != "tools" and not constraint.tools:
        return None
    allowed = constraint.tools or tuple(conversation.tools)
    if not allowed:
        return None
    call = _CALL.search(conversation.user)
    name = call[1] if call and call[1] in allowed else allowed[0]
    return (_call_step(name, conversation, call[2] if call else None),)


def _schema_answer(text: str) -> Steps:
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"the JSON schema is not JSON: {error}", code="invalid_json_schema") from None
    return (ScriptStep(text=json.dumps(schema_instance(schema), ensure_ascii=False)),)


# --- JSON schema ------------------------------------------------------------------------------------------------------

_FORMATS = {
    "date-time": "2026-01-01T00:00:00Z",
    "date": "2026-01-01",
    "time": "00:00:00Z",
    "duration": "P1D",
    "email": "user@example.com",
    "hostname": "example.com",
    "ipv4": "127.0.0.1",
    "ipv6": "::1",
    "uri": "https://example.com/",
    "uuid": "00000000-0000-4000-8000-000000000000",
}
_IMPLIED_TYPES = {  # by the keywords of a schema without a type
    **dict.fromkeys(("properties", "required"), "object"),
    **dict.fromkeys(("items", "prefixItems"), "array"),
    **dict.fromkeys(("minimum", "maximum"), "number"),
}
_MAX_NODES = 10_000


class _InfiniteSchema(InvalidRequest):
    default_code = "invalid_json_schema"


def schema_instance(root: Any) -> Any:
    """Returns a minimal value that the JSON schema accepts. Raises InvalidRequest if the schema is invalid, needs an
    infinite value, or has a dangling reference."""
    nodes = count()

    def resolve(ref: str) -> Schema:
        target = root
        for part in ref.removeprefix("#").strip("/").split("/"):
            key = part.replace("~1", "/").replace("~0", "~")
            target = target if key == "" else target.get(key) if isinstance(target, dict) else None
        if not isinstance(target, dict):
            raise InvalidRequest(f"the JSON schema has no definition for {ref}", code="invalid_json_schema")
        return target

    def make(schema: Any, path: tuple[str, ...] = (), nth: int = 0) -> Any:
        """`path` holds the references being followed; meeting one again means infinite recursion. `nth` asks for the
        n-th of several distinct values."""
        _check_size(next(nodes))
        match schema:
            case {"$ref": ref, **rest}:
                if ref in path:
                    raise _InfiniteSchema(f"the JSON schema never ends: every value of {ref} contains another one")
                return make(_merge(resolve(ref), rest), (*path, ref), nth)
            case {"const": value}:
                return value
            case {"enum": values}:
                return values[nth % len(values)]
            case {"allOf": [part, *parts], **rest}:
                return make(_merge({**rest, "allOf": parts}, part), path, nth)
            case {"anyOf": [option, *others], **rest} | {"oneOf": [option, *others], **rest}:
                try:
                    return make(_merge(rest, option), path, nth)
                except _InfiniteSchema:
                    if not others:
                        raise
                    return make({**rest, "anyOf": others}, path, nth)
            case {"type": "object"} | {"type": ["object", *_]}:
                return make_object(schema, path, nth)
            case {"type": "array"} | {"type": ["array", *_]}:
                items = list(schema.get("prefixItems", ()))
                items += [schema.get("items", {})] * (_check_size(schema.get("minItems", 0)) - len(items))
                items = items[: schema.get("maxItems", len(items))]
                return [make(item, path, i if schema.get("uniqueItems") else nth) for i, item in enumerate(items)]
            case {"type": "integer" | "number" as type_} | {"type": ["integer" | "number" as type_, *_]}:
                return _number(schema, type_ == "integer") + nth * schema.get("multipleOf", 1)
            case {"type": "boolean"} | {"type": ["boolean", *_]}:
                return nth % 2 == 0
            case {"type": "null"} | {"type": ["null", *_]}:
                return None
            case {"type": _}:
                return _string(schema, nth)
            case dict():  # the keywords imply the type
                implied = (type_ for keyword, type_ in _IMPLIED_TYPES.items() if keyword in schema)
                return make({**schema, "type": next(implied, "string")}, path, nth)
        return "text"

    def make_object(schema: Schema, path: tuple[str, ...], nth: int) -> Schema:
        properties, names = schema.get("properties", {}), list(dict.fromkeys(schema.get("required", ())))
        if not all(isinstance(name, str) for name in names):
            raise TypeError("a required property must be a string")
        missing = _check_size(max(0, schema.get("minProperties", 0) - len(names)))
        optional = [name for name in properties if name not in names] + [f"key{i}" for i in range(missing)]
        return {name: make(properties.get(name, {}), path, nth) for name in names + optional[:missing]}

    try:
        return make(root)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise InvalidRequest(f"the JSON schema is not valid: {error}", code="invalid_json_schema") from None


def _check_size(count: int) -> int:
    if count > _MAX_NODES:
        raise _InfiniteSchema("the JSON schema asks for a value that is too large to generate")
    return count


def _merge(base: Schema, over: Schema | bool) -> Schema:
    if not isinstance(over, dict):
        return base
    merged = base | over
    if "properties" in base and "properties" in over:
        merged["properties"] = base["properties"] | over["properties"]
    for keyword in ("required", "allOf"):
        if keyword in base and keyword in over:
            merged[keyword] = [*base[keyword], *over[keyword]]
    return merged


def _string(schema: Schema, nth: int) -> str:
    if schema.get("format") in _FORMATS:
        return _FORMATS[schema["format"]]
    if "pattern" in schema:
        return regex_sample(schema["pattern"])
    text = "text"[: schema.get("maxLength", 4)].ljust(_check_size(schema.get("minLength", 0)), "x")
    return f"{text[: len(text) - len(str(nth))]}{nth}" if nth else text


def _number(schema: Schema, is_integer: bool) -> float | int:
    """Returns the lowest allowed number, or 0 if there is no lower bound."""
    low, exclusive = schema.get("minimum"), schema.get("exclusiveMinimum")
    if exclusive is not None and is_integer:
        low = math.floor(exclusive) + 1
    elif exclusive is not None:
        bound = min(schema.get("maximum", math.inf), schema.get("exclusiveMaximum", math.inf))
        low = float(exclusive + 1 if bound > exclusive + 1 else (exclusive + bound) / 2)
    high = schema.get("maximum", schema.get("exclusiveMaximum", math.inf) - 1)
    value: float | int = low if low is not None else min(0, high)
    if multiple := schema.get("multipleOf"):
        value = math.ceil(value / multiple) * multiple
    return math.ceil(value) if is_integer else value


# --- regular expressions ----------------------------------------------------------------------------------------------

_LETTERS, _OTHERS = range(97, 123), (range(32, 0x3000), range(32))  # code points
_SURROGATES = range(0xD800, 0xE000)
_MAX_SAMPLE = 100_000  # characters
_SHOWN_CHARS = 200  # of a pattern in an error
# `re.compile` takes 10 ms for a class with characters beyond these 256. Which ones they are makes no pattern invalid.
_FAR_CHARACTER = re.compile(r"\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}|[^\0-\xff]")
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_REPEAT = re.compile(r"(?:([*?+])|\{(?=[\d,])(\d*)(?:,\d*)?\})[?+]?")
_CODE = r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})"
_ESCAPE = re.compile(rf"\\(?:{_CODE}|(0[0-7]{{0,2}}|[0-3][0-7]{{2}})|([1-9]\d?)|(.))", re.DOTALL)
_NAMED = re.compile(rf"\\(?:{_CODE})|(.)", re.DOTALL)
_CONTROLS = {"a": "\a", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_EMPTY_GROUP = re.compile(r"\(\?(?:#[^)]*|[a-zA-Z]+)\)")  # a comment, or flags for all
_NAMED_REFERENCE = re.compile(r"\(\?P=(\w+)\)")
_GROUP = re.compile(r"\((?:\?(?:P<(\w+)>|(<?[=!])|\(\w+\)|>|[a-zA-Z-]*:))?")


def regex_sample(pattern: str) -> str:
    """Returns a short text that the pattern matches. It ignores look-arounds."""
    try:
        flags = re.compile(_FAR_CHARACTER.sub("\xff", pattern)).flags
        return _RegexSampler(pattern, bool(flags & re.VERBOSE)).first_branch()
    except (re.error, RecursionError, OverflowError) as error:
        message = f"{pattern[:_SHOWN_CHARS]!r} is not a regular expression that can be read: {error}"
        raise InvalidRequest(message, code="invalid_regex") from None


class _RegexSampler:
    """Reads a pattern that `re` accepts, from left to right."""

    def __init__(self, pattern: str, is_verbose: bool) -> None:
        self._pattern, self._is_verbose, self._at = pattern, is_verbose, 0
        self._groups: dict[str, str] = {}
        self._count = 0

    def first_branch(self) -> str:
        """Of those up to the end of the group; the others are only read."""
        first, groups = self._sequence(), self._groups.copy()
        while self._pattern[self._at : self._at + 1] == "|":
            self._at += 1
            self._sequence()
        self._groups = groups
        return first

    def _sequence(self) -> str:
        out: list[str] = []
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)":
            text = self._atom()
            if (found := self._take(_REPEAT)) is not None:
                least = int(found[2] or 0) if found[1] is None else int(found[1] == "+")
                if len(text) * least > _MAX_SAMPLE:
                    raise InvalidRequest(
                        "a match of the regular expression is too long to generate", code="invalid_regex"
                    )
                text *= least
            out.append(text)
        return "".join(out)

    def _take(self, expected: re.Pattern[str]) -> re.Match[str] | None:
        if (found := expected.match(self._pattern, self._at)) is not None:
            self._at = found.end()
        return found

    def _atom(self) -> str:
        if (found := self._take(_CLASS)) is not None:
            return _character(found[0])
        if (found := self._take(_ESCAPE)) is not None:
            return self._escape(found)
        if self._take(_EMPTY_GROUP) is not None:
            return ""
        if (found := self._take(_NAMED_REFERENCE)) is not None:
            return self._groups.get(found[1], "")
        if (found := self._take(_GROUP)) is not None:
            return self._group(found)
        char = self._pattern[self._at]
        self._at += 1
        if self._is_verbose and (char.isspace() or char == "#"):
            self._at = self._at if char != "#" else (self._pattern + "\n").index("\n", self._at)
            return ""
        return _character(".") if char == "." else char.strip("^$")

    def _group(self, found: re.Match[str]) -> str:
        names = [found[1]] if found[1] is not None else []
        if names or found[0] == "(":
            self._count += 1
            names.append(str(self._count))
        text = self.first_branch()
        self._at += 1  # the bracket
        self._groups |= dict.fromkeys(names, text)
        return "" if found[2] is not None else text

    def _escape(self, found: re.Match[str]) -> str:
        if (code := found[1] or found[2] or found[3]) is not None:
            return chr(int(code, 16))
        if found[4] is not None:
            return chr(int(found[4], 8))
        if found[5] is not None:
            return self._groups.get(found[5], "")
        if found[6] in "dDwWsS":
            return _character(found[0])
        return "" if found[6] in "AZbB" else _CONTROLS.get(found[6], found[6])


@lru_cache(maxsize=256)
def _character(one: str) -> str:
    """Returns a character that the class matches, a letter if it can."""
    found = next(filter(re.compile(one).match, map(chr, chain(_LETTERS, _named(one), *_OTHERS))), None)
    if found is None:
        raise InvalidRequest("a part of the regular expression matches no character", code="invalid_regex")
    return found


def _named(one: str) -> Iterator[int]:
    """Yields the code points in a character class and beside them: it or its opposite begins there."""
    for found in _NAMED.finditer(one):
        code = ord(found[4]) if found[4] is not None else int(found[1] or found[2] or found[3], 16)
        yield from (c for c in (code, code + 1, code - 1) if 0 <= c < 0x110000 and c not in _SURROGATES)


# --- raw model output -------------------------------------------------------------------------------------------------

Segment = tuple[str, str]  # (markup, text); only markup becomes control tokens, so a text may quote a marker
Channel = Literal["think", "text", "call"]


class Format(NamedTuple):
    """`channels` has the opening and closing markup of each kind of message. `start` precedes every message but the
    first. `end` closes the message that is open at the end of the answer; None: as if another one followed."""

    channels: dict[Channel, tuple[str, str]]
    write_call: Callable[[ScriptCall], list[Segment]]
    start: str = ""
    end: str | None = None


def _hermes_call(call: ScriptCall) -> list[Segment]:
    return [("", f'\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments_text}}}\n')]


def _qwen3_coder_call(call: ScriptCall) -> list[Segment]:
    lines = [call.arguments] if isinstance(call.arguments, str) else list[str]()
    for key, value in call.arguments.items() if isinstance(call.arguments, dict) else ():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines.append(f"<parameter={key}>\n{text}\n</parameter>")
    return [("", "\n".join(["", f"<function={call.name}>", *lines, "</function>", ""]))]


def _harmony_call(call: ScriptCall) -> list[Segment]:
    return [("", f"commentary to=functions.{call.name} "), ("<|constrain|>json<|message|>", call.arguments_text)]


_HERMES: dict[Channel, tuple[str, str]] = {
    "think": ("<think>\n", "\n</think>\n\n"),
    "text": ("", ""),
    "call": ("<tool_call>", "</tool_call>"),
}
_HARMONY: dict[Channel, tuple[str, str]] = {
    "think": ("<|channel|>analysis<|message|>", "<|end|>"),
    "text": ("<|channel|>final<|message|>", "<|end|>"),
    "call": ("<|channel|>", "<|call|>"),
}
_RAW_FORMATS = {  # a format without an entry uses Hermes; its scripts use `raw` steps
    "hermes": Format(_HERMES, _hermes_call),
    "qwen3_coder": Format(_HERMES, _qwen3_coder_call),
    "harmony": Format(_HARMONY, _harmony_call, start="<|start|>assistant", end="<|return|>"),
}


class FormatWriter:
    """One per answer. `in_reasoning`: the template has opened the reasoning already."""

    def __init__(self, format: Format, in_reasoning: bool) -> None:
        self._format, self._start = format, ""
        self._channel: Channel | None = "think" if in_reasoning else None  # of the open message

    def write(self, channel: Channel, text: str) -> list[Segment]:
        return [(self._open(channel), text)]

    def write_calls(self, calls: Iterable[ScriptCall]) -> list[Segment]:
        out: list[Segment] = []
        for call in calls:
            separator = "\n" if out and not self._format.start else ""
            out += [(separator + self._open("call"), ""), *self._format.write_call(call), (self._close(), "")]
        return out

    def end(self) -> list[Segment]:
        end = self._close()
        return [(end if self._format.end is None else self._format.end, "")] if end else []

    def _open(self, channel: Channel) -> str:
        if channel == self._channel:
            return ""
        markup = f"{self._close()}{self._start}{self._format.channels[channel][0]}"
        self._channel, self._start = channel, self._format.start
        return markup

    def _close(self) -> str:
        channel, self._channel = self._channel, None
        return self._format.channels[channel][1] if channel else ""


class OutputEncoder:
    def __init__(self, tokenizer: Tokenizer, format: str = "hermes") -> None:
        self._format = _RAW_FORMATS.get(format, _RAW_FORMATS["hermes"])
        # Scripts repeat texts. The lists are shared: do not modify them.
        self._encode, self._encode_plain = lru_cache(1024)(tokenizer.encode), lru_cache(1024)(tokenizer.encode_plain)
        # Tokens that are one word each; if a vocabulary has none, the tokens of a word.
        words = [token for token in range(min(tokenizer.size, 4096)) if _is_word(tokenizer.token_bytes(token))]
        self._words = words[:97] or tokenizer.encode_plain(" word")

    def encode(self, steps: Iterable[ScriptStep], *, in_reasoning: bool) -> Iterator[list[int] | ScriptStep]:
        """Yields the token ids of each step with output, and every other step as it is. Lazily: a script may repeat a
        million times."""
        writer = FormatWriter(self._format, in_reasoning)
        for step in unroll(steps):
            if step.text is not None:
                yield self._ids(writer.write("text", step.text))
            elif step.think is not None:
                yield self._ids(writer.write("think", step.think))
            elif step.call is not None:
                yield self._ids(writer.write_calls(step.calls))
            elif step.raw is not None:
                yield self._encode(step.raw)
            elif step.tokens is not None:
                yield self._ids(writer.write("text", "")) + self.filler(step.tokens)
            else:
                yield step
        if ids := self._ids(writer.end()):
            yield ids

    def filler(self, count: int) -> list[int]:
        return (self._words * (count // len(self._words) + 1))[:count]

    def _ids(self, segments: Iterable[Segment]) -> list[int]:
        ids: list[int] = []
        for markup, text in segments:
            ids += self._encode(markup) if markup else ()
            ids += self._encode_plain(text) if text else ()
        return ids


def _is_word(spelling: bytes) -> bool:
    return len(spelling) > 3 and spelling[:1] == b" " and spelling[1:].isalpha() and spelling[1:].islower()
