"""Replies, and the event streams that fold to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
from modelyard.core.request import Text, Thinking, ToolCall
from tests.strategies.messages import tool_calls
from tests.strategies.values import broken_arguments, ids, names, texts


def usages() -> SearchStrategy[Usage]:
    counts = st.integers(0, 5000)
    return st.builds(
        lambda fresh, cached, plain, reasoning: Usage(fresh + cached, cached, plain + reasoning, reasoning),
        *[counts] * 4,
    )


def token_logprobs(*, top: int = 2) -> SearchStrategy[TokenLogprob]:
    def build(text: str, value: float, others: list[tuple[str, float]]) -> TokenLogprob:
        rest = tuple(TokenLogprob(t, v, t.encode()) for t, v in others)
        return TokenLogprob(text, value, text.encode(), rest)

    value = st.floats(-50, 0)
    return st.builds(build, texts(1, 3), value, st.lists(st.tuples(texts(1, 3), value), max_size=top))


def blocks(
    *,
    thinking: bool = True,
    tools: bool = True,
    custom: bool = False,
    namespaces: bool = False,
    logprobs: bool = False,
    signatures: bool = True,
) -> SearchStrategy[Block]:
    """Finished blocks, none of them empty."""
    kinds = [texts(1).map(lambda text: Block(Text(text)))]
    if logprobs:
        kinds.append(st.lists(token_logprobs(), min_size=1, max_size=3).map(_scored))
    if thinking:
        signature = st.sampled_from(["", "sig"]) if signatures else st.just("")
        kinds.append(st.builds(lambda text, sealed: Block(Thinking(text, sealed)), texts(1), signature))
    if tools:
        kinds.append(tool_calls(custom=custom, namespaces=namespaces).map(Block))
    return st.one_of(kinds)


def _scored(scores: list[TokenLogprob]) -> Block:
    return Block(Text("".join(score.token for score in scores)), tuple(scores))


def cut_calls() -> SearchStrategy[Block]:
    """A call that a limit cut off in the middle of its arguments."""
    return st.builds(
        lambda id, name, text: Block(ToolCall(id, name, text), (), False), ids(), names(), broken_arguments()
    )


def replies(
    *, tools: bool = True, incomplete: bool = False, empty: bool = False, max_blocks: int = 4, **switches: bool
) -> SearchStrategy[Reply]:
    """Replies whose stop reason fits their blocks. With `incomplete` the last block may be a call cut off.

    The other switches are those of `blocks`.
    """
    whole = st.lists(blocks(tools=tools, **switches), min_size=0 if empty else 1, max_size=max_blocks)
    tail = st.none() | cut_calls() if incomplete and tools else st.none()
    started = st.tuples(ids(""), names(), st.integers(0, 2**31))
    return st.builds(_reply, started, whole, tail, usages(), st.integers(0, 3), texts(1))


def _reply(
    start: tuple[str, str, int], whole: list[Block], tail: Block | None, usage: Usage, pick: int, stop: str
) -> Reply:
    all_blocks = tuple(whole) if tail is None else (*whole, tail)
    limits: tuple[StopReason, ...] = ("max_tokens", "window")
    natural: StopReason = "tool_calls" if any(isinstance(b.part, ToolCall) for b in whole) else "end"
    reason = limits[pick % 2] if tail else (natural, "stop_string", *limits)[pick]
    finished = Finished(reason, usage, stop if reason == "stop_string" else None)
    return Reply(Started(*start, Usage(usage.prompt, usage.cached)), all_blocks, finished)


def events(*, failing: bool = False, **switches: Any) -> SearchStrategy[list[Event]]:
    """Legal streams, their deltas cut anywhere; `failing` ones may end in Failed. Switches as for `replies`."""
    cuts = st.lists(st.integers(1, 20), min_size=1, max_size=4)
    stream = st.builds(_cut_deltas, replies(**switches), cuts)
    if not failing:
        return stream
    return stream | st.builds(_fail, stream, st.integers(0, 100), texts(1))


def _cut_deltas(reply: Reply, cuts: list[int]) -> list[Event]:
    out: list[Event] = []
    for place, event in enumerate(reply_events(reply)):
        at = cuts[place % len(cuts)]
        if isinstance(event, BlockDelta) and not event.logprobs and at < len(event.text):
            out += [BlockDelta(event.index, event.text[:at]), BlockDelta(event.index, event.text[at:])]
        else:
            out.append(event)
    return out


def _fail(stream: list[Event], pick: int, message: str) -> list[Event]:
    """Between blocks, where the grammar of streams has its place for it."""
    places = [i for i, event in enumerate(stream) if i and not isinstance(event, BlockDelta | BlockEnd)]
    return [*stream[: places[pick % len(places)]], Failed(InvalidRequest(message))]


def merged(stream: Sequence[Event]) -> list[Event]:
    """The same stream with neighbouring deltas joined and empty ones left out: how it was cut does not matter."""
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


def chunkings(data: bytes, most: int = 8) -> SearchStrategy[list[bytes]]:
    """The same bytes, cut anywhere."""
    places = st.lists(st.integers(0, len(data)), max_size=most).map(sorted)
    return places.map(lambda cuts: [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)])
