"""Hypothesis strategies for the core values, shared by the tests of every protocol.

Everything drawn is in the normal form of `core/request.py`. The switches turn on what only some protocols can express.
A test that needs expressible values leaves them off, or normalises what it drew with `msgspec.structs.replace`.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from modelyard.core.errors import InvalidRequest
from modelyard.core.events import (
    Block,
    BlockDelta,
    BlockEnd,
    Event,
    Failed,
    Finished,
    Reply,
    Started,
    StopReason,
    TokenLogprob,
    Usage,
    reply_events,
)
from modelyard.core.request import (
    Constraint,
    Image,
    Message,
    Part,
    Reasoning,
    Request,
    Sampling,
    Text,
    Thinking,
    Tool,
    ToolCall,
    ToolChoice,
    ToolReference,
    ToolResult,
)
from modelyard.protocols.common.json import encode

# --- texts, names, ids and JSON -------------------------------------------------------------------------------------

# Surrogates are not valid in UTF-8; quotes, newlines and halves of SSE frames are what breaks writers.
_ALPHABET = st.characters(codec="utf-8")
_SPECIAL_TEXTS = st.sampled_from(['"', "\\", "\n\n", "\r", "data: {}", "\x00", "é", "🦜", "<tool_call>", "</think>"])


@cache
def texts(min_size: int = 0, max_size: int = 12) -> SearchStrategy[str]:
    return st.text(_ALPHABET, min_size=min_size, max_size=max_size) | _SPECIAL_TEXTS


@cache
def names() -> SearchStrategy[str]:
    return st.text("abcxyz_", min_size=1, max_size=6)


@cache
def ids(prefix: str = "call_") -> SearchStrategy[str]:
    return st.text("abcXYZ0189", min_size=1, max_size=8).map(lambda tail: prefix + tail)


@cache
def json_values() -> SearchStrategy[Any]:
    leaves = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | texts()
    return leaves | st.lists(leaves, max_size=2) | st.dictionaries(texts(), leaves, max_size=2)


@cache
def json_objects() -> SearchStrategy[dict[str, Any]]:
    return st.dictionaries(texts(), json_values(), max_size=3)


@cache
def arguments() -> SearchStrategy[str]:
    """The JSON text of a call's arguments, with and without spaces."""
    compact = json_objects().map(lambda o: encode(o).decode())
    return compact | compact.map(lambda text: msgspec.json.format(text, indent=1))


@cache
def broken_arguments() -> SearchStrategy[str]:
    """Arguments that a limit cut off: never valid JSON."""
    return texts().map(lambda text: '{"path": ' + encode(text).decode()[:-1])


def _optional(values: SearchStrategy[Any]) -> SearchStrategy[Any]:
    return st.none() | values


# --- messages -------------------------------------------------------------------------------------------------------


def images(*, details: bool = False) -> SearchStrategy[Image]:
    data = st.binary(min_size=1, max_size=6).map(lambda b: "data:image/png;base64," + base64.b64encode(b).decode())
    url = names().map(lambda name: f"https://example.com/{name}.png")
    return st.builds(Image, data | url, st.sampled_from([None, "low", "high"]) if details else st.none())


def thinkings(*, redacted: bool = False) -> SearchStrategy[Thinking]:
    visible = st.builds(Thinking, texts(), st.sampled_from(["", "sig", "EqQBCgIYAg=="]))
    return visible | st.builds(Thinking, st.just(""), ids("enc_"), st.just(True)) if redacted else visible


def tool_calls(*, custom: bool = False, namespaces: bool = False, broken: bool = False) -> SearchStrategy[ToolCall]:
    spaces = st.sampled_from([None, "space"]) if namespaces else st.none()
    text = arguments() | broken_arguments() if broken else arguments()
    functions = st.builds(ToolCall, ids(), names(), text, spaces)
    return functions | st.builds(ToolCall, ids(), names(), texts(), spaces, st.just(True)) if custom else functions


def tool_results(
    *, images_in_results: bool = False, errors: bool = False, references: bool = False, custom: bool = False
) -> SearchStrategy[ToolResult]:
    parts: SearchStrategy[Any] = st.builds(Text, texts())
    if images_in_results:
        parts |= images()
    if references:
        parts |= st.builds(ToolReference, names())
    content = st.lists(parts, min_size=1, max_size=3).map(tuple)
    return st.builds(
        ToolResult,
        ids(),
        content,
        st.booleans() if errors else st.just(False),
        st.booleans() if custom else st.just(False),
    )


def _messages(role: str, parts: SearchStrategy[Any]) -> SearchStrategy[Message]:
    return st.builds(Message, st.just(role), st.lists(parts, min_size=1, max_size=3).map(tuple))


def conversations(
    *,
    tools: bool = True,
    redacted: bool = False,
    custom: bool = False,
    namespaces: bool = False,
    broken: bool = False,
    details: bool = False,
    errors: bool = False,
    references: bool = False,
    images_in_results: bool = False,
    developer: bool = False,
) -> SearchStrategy[tuple[Message, ...]]:
    """Messages in normal form: never two `tool` messages in a row, every message with at least one part."""
    text: SearchStrategy[Part] = st.builds(Text, texts())
    answer: SearchStrategy[Part] = text | thinkings(redacted=redacted)
    if tools:
        answer = answer | tool_calls(custom=custom, namespaces=namespaces, broken=broken)
    turns = [
        _messages("user", text | images(details=details)),
        _messages("assistant", answer),
        _messages("system", text),
    ]
    if developer:
        turns.append(_messages("developer", text))
    if tools:
        results = tool_results(images_in_results=images_in_results, errors=errors, references=references, custom=custom)
        turns.append(_messages("tool", results))
    rest = st.lists(st.one_of(turns), min_size=1, max_size=5)
    system = st.lists(_messages("system", text), max_size=1)
    return st.tuples(system, _messages("user", text), rest).map(lambda t: _join_tool_messages([*t[0], t[1], *t[2]]))


def _join_tool_messages(messages: Sequence[Message]) -> tuple[Message, ...]:
    out: list[Message] = []
    for message in messages:
        if out and message.role == "tool" == out[-1].role:
            out[-1] = Message("tool", out[-1].parts + message.parts)
        else:
            out.append(message)
    return tuple(out)


# --- requests -------------------------------------------------------------------------------------------------------


def request_tools(
    *, custom: bool = False, server: bool = False, deferred: bool = False, namespaces: bool = False
) -> SearchStrategy[tuple[Tool, ...]]:
    schemas = json_objects().map(lambda o: {"type": "object", "properties": o})
    kinds = [
        st.builds(
            Tool,
            names(),
            texts(),
            schemas,
            namespace=st.sampled_from([None, "space"]) if namespaces else st.none(),
            strict=st.sampled_from([None, True, False]),
            deferred=st.booleans() if deferred else st.just(False),
        )
    ]
    if custom:
        kinds.append(st.builds(Tool, names(), texts(), kind=st.just("custom")))
    if server:
        kinds.append(st.builds(Tool, names(), kind=st.just("server"), type=st.just("web_search_20250305")))
    return st.lists(st.one_of(kinds), max_size=3, unique_by=lambda tool: tool.name).map(tuple)


def samplings() -> SearchStrategy[Sampling]:
    share = _optional(st.floats(0, 1))
    return st.builds(
        Sampling,
        temperature=_optional(st.floats(0, 2)),
        top_p=share,
        top_k=_optional(st.integers(0, 100)),
        min_p=share,
        presence_penalty=_optional(st.floats(-2, 2)),
        frequency_penalty=_optional(st.floats(-2, 2)),
        dry_sequence_breakers=_optional(st.lists(texts(), min_size=1, max_size=2).map(tuple)),
        seed=_optional(st.integers(0, 2**31)),
        logit_bias=_optional(st.dictionaries(st.integers(0, 1000), st.floats(-100, 100), min_size=1, max_size=2)),
    )


def constraints(*, named: bool = False, json_object: bool = True) -> SearchStrategy[Constraint]:
    """`named` schemas have a name, a description and strict, as in OpenAI's protocols."""
    schema = json_objects().map(lambda o: encode({"type": "object", "properties": o}).decode())
    fields: dict[str, Any] = {}
    if named:
        fields = {
            "name": names(),
            "description": _optional(texts(1)),
            "strict": st.sampled_from([None, True, False]),
        }
    kinds: list[SearchStrategy[Constraint]] = [st.builds(Constraint, st.just("json_schema"), schema, **fields)]
    kinds += [st.builds(Constraint, st.just(kind), texts(1)) for kind in ("gbnf", "regex", "lark")]
    if json_object:
        kinds.append(st.just(Constraint("json_object")))
    return st.one_of(kinds)


def reasonings() -> SearchStrategy[Reasoning]:
    return st.builds(
        Reasoning,
        enabled=st.sampled_from([None, True, False]),
        effort=st.sampled_from([None, "low", "medium", "high"]),
        budget=_optional(st.integers(1024, 65536)),
    )


def requests(
    *,
    tools: bool = True,
    custom: bool = False,
    server: bool = False,
    deferred: bool = False,
    namespaces: bool = False,
    constrained: bool = True,
    named_constraints: bool = False,
    json_object: bool = True,
    reasoning: bool = True,
    logprobs: bool = False,
    n: bool = False,
    **conversation: bool,
) -> SearchStrategy[Request]:
    """A whole request. The other switches are those of `conversations`."""
    fields: dict[str, SearchStrategy[Any]] = {
        "model": names(),
        "messages": conversations(tools=tools, custom=custom, namespaces=namespaces, **conversation),
        "sampling": samplings(),
        "max_tokens": _optional(st.integers(1, 100_000)),
        "stop": st.lists(texts(1), max_size=3).map(tuple),
        "n": st.integers(1, 4) if n else st.just(1),
        "logprobs": _optional(st.integers(0, 20)) if logprobs else st.none(),
        "constraint": _optional(constraints(named=named_constraints, json_object=json_object))
        if constrained
        else st.none(),
        "reasoning": reasonings() if reasoning else st.just(Reasoning()),
        "stream": st.booleans(),
        "user": _optional(names()),
        "lora_adapter": _optional(names()),
        "chat_template_kwargs": st.sampled_from([{}, {"flavour": "plain"}]),
        "documents": st.sampled_from([(), ({"title": "a", "text": "b"},)]),
        "priority": st.sampled_from([None, "main", "background"]),
    }
    if not tools:
        return st.builds(Request, **fields)
    offered = request_tools(custom=custom, server=server, deferred=deferred, namespaces=namespaces)
    use = st.tuples(offered, st.integers(0, 5), st.sampled_from([None, True, False]))
    return st.builds(lambda a, b: Request(**a, **_tool_fields(*b)), st.fixed_dictionaries(fields), use)


def _tool_fields(tools: tuple[Tool, ...], choice: int, parallel: bool | None) -> dict[str, Any]:
    """Tools, the choice among them and whether calls may be parallel; nothing without tools."""
    if not tools:
        return {}
    choices = [ToolChoice(), ToolChoice("none"), ToolChoice("required")]
    choices += [ToolChoice("named", tool.name) for tool in tools if tool.kind != "server"]
    return {"tools": tools, "tool_choice": choices[choice % len(choices)], "parallel_tool_calls": parallel}


# --- replies and event streams --------------------------------------------------------------------------------------


def usages() -> SearchStrategy[Usage]:
    counts = st.integers(0, 5000)
    return st.builds(
        lambda uncached, cached, visible, reasoning: Usage(uncached + cached, cached, visible + reasoning, reasoning),
        *[counts] * 4,
    )


def token_logprobs() -> SearchStrategy[TokenLogprob]:
    def build(text: str, value: float, others: list[tuple[str, float]]) -> TokenLogprob:
        top = tuple(TokenLogprob(t, v, t.encode()) for t, v in others)
        return TokenLogprob(text, value, text.encode(), top)

    value = st.floats(-50, 0)
    return st.builds(build, texts(1, 3), value, st.lists(st.tuples(texts(1, 3), value), max_size=2))


def blocks(
    *,
    tools: bool = True,
    custom: bool = False,
    namespaces: bool = False,
    logprobs: bool = False,
    signatures: bool = True,
) -> SearchStrategy[Block]:
    """Complete blocks, none of them empty."""
    signature = st.sampled_from(["", "sig"]) if signatures else st.just("")
    kinds = [
        texts(1).map(lambda text: Block(Text(text))),
        st.builds(lambda text, signature: Block(Thinking(text, signature)), texts(1), signature),
    ]
    if logprobs:
        kinds.append(st.lists(token_logprobs(), min_size=1, max_size=3).map(_block_with_logprobs))
    if tools:
        kinds.append(tool_calls(custom=custom, namespaces=namespaces).map(Block))
    return st.one_of(kinds)


def _block_with_logprobs(tokens: list[TokenLogprob]) -> Block:
    return Block(Text("".join(token.token for token in tokens)), tuple(tokens))


def incomplete_calls() -> SearchStrategy[Block]:
    return st.builds(
        lambda id, name, text: Block(ToolCall(id, name, text), (), False), ids(), names(), broken_arguments()
    )


def replies(
    *, tools: bool = True, incomplete: bool = False, empty: bool = False, **switches: bool
) -> SearchStrategy[Reply]:
    """Replies with a stop reason that fits their blocks. With `incomplete` the last block may be an incomplete call.

    The other switches are those of `blocks`.
    """
    complete = st.lists(blocks(tools=tools, **switches), min_size=0 if empty else 1, max_size=4)
    last = st.none() | incomplete_calls() if incomplete and tools else st.none()
    started = st.tuples(ids(""), names(), st.integers(0, 2**31))
    return st.builds(_reply, started, complete, last, usages(), st.integers(0, 3), texts(1))


def _reply(
    start: tuple[str, str, int], complete: list[Block], last: Block | None, usage: Usage, pick: int, stop: str
) -> Reply:
    all_blocks = tuple(complete) if last is None else (*complete, last)
    limits: tuple[StopReason, ...] = ("max_tokens", "window")
    natural: StopReason = "tool_calls" if any(isinstance(b.part, ToolCall) for b in complete) else "end"
    reason = limits[pick % 2] if last else (natural, "stop_string", *limits)[pick]
    finished = Finished(reason, usage, stop if reason == "stop_string" else None)
    return Reply(Started(*start, Usage(usage.prompt, usage.cached)), all_blocks, finished)


def events(*, failing: bool = False, **switches: Any) -> SearchStrategy[list[Event]]:
    """Valid streams with deltas split anywhere; `failing` ones may end in Failed. Switches as for `replies`."""
    splits = st.lists(st.integers(1, 20), min_size=1, max_size=4)
    stream = st.builds(_split_deltas, replies(**switches), splits)
    if not failing:
        return stream
    return stream | st.builds(_fail, stream, st.integers(0, 100), texts(1))


def _split_deltas(reply: Reply, splits: list[int]) -> list[Event]:
    out: list[Event] = []
    for index, event in enumerate(reply_events(reply)):
        at = splits[index % len(splits)]
        if isinstance(event, BlockDelta) and not event.logprobs and at < len(event.text):
            out += [BlockDelta(event.index, event.text[:at]), BlockDelta(event.index, event.text[at:])]
        else:
            out.append(event)
    return out


def _fail(stream: list[Event], pick: int, message: str) -> list[Event]:
    """Replace the rest of the stream by a failure, between two blocks."""
    positions = [i for i, event in enumerate(stream) if i and not isinstance(event, BlockDelta | BlockEnd)]
    return [*stream[: positions[pick % len(positions)]], Failed(InvalidRequest(message))]


def merged(stream: Sequence[Event]) -> list[Event]:
    """The same stream with neighbouring deltas joined and empty ones dropped."""
    out: list[Event] = []
    for event in stream:
        last = out[-1] if out else None
        if isinstance(event, BlockDelta) and not event.text and not event.logprobs:
            continue
        if isinstance(event, BlockDelta) and isinstance(last, BlockDelta):
            out[-1] = BlockDelta(event.index, last.text + event.text, last.logprobs + event.logprobs)
        else:
            out.append(event)
    return out


def chunkings(data: bytes, max_splits: int = 8) -> SearchStrategy[list[bytes]]:
    """The same bytes, split anywhere."""
    positions = st.lists(st.integers(0, len(data)), max_size=max_splits).map(sorted)
    return positions.map(lambda cuts: [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)])
