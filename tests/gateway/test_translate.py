"""What an engine says becomes what a client hears: started once, ended once, and nothing after the end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.core.engine import Accepted, Chunk, End, IdLogprob, Progress, Tokens
from modelyard.core.errors import Cancelled, Internal, ModelyardError, Unavailable
from modelyard.core.events import (
    BlockDelta,
    BlockEnd,
    BlockStart,
    Event,
    Failed,
    Finished,
    Started,
    Timings,
    Usage,
    collect_reply,
)
from modelyard.core.request import Caller, Reasoning, Request, Tool
from modelyard.gateway.gateway import ChatOutput, TextOutput
from modelyard.gateway.prepared_request import OutputBudget, PreparedRequest, RenderedPrompt
from modelyard.router.routes import Target
from tests.gateway.stage import asked, ids, model

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'


def job(request: Request, limit: Any = "max_tokens") -> PreparedRequest:
    rendered = model().pipeline.renderer
    text = rendered.text(request)
    return PreparedRequest(
        request=request,
        caller=Caller(trace="our-id", endpoint="/v1/chat/completions"),
        target=Target("demo", "main", 4096),
        model=model(),
        prompts=(RenderedPrompt(rendered.tokens(text), text, OutputBudget(50, limit)),),
        sampling=request.sampling,
        constraint=None,
        created=7,
        tokenize_s=0.0,
    )


def texts(limit: Any = "max_tokens", on_text: Any = None, **request: Any) -> TextOutput:
    return TextOutput(job(asked(**request), limit), 0, lambda: "call_1", on_text)


def said(*chunks: str | Chunk) -> list[Chunk]:
    return [Accepted(), *(Tokens(ids(chunk)) if isinstance(chunk, str) else chunk for chunk in chunks)]


def lasts(events: Iterable[Event]) -> list[Event]:
    return [event for event in events if isinstance(event, Finished | Failed)]


@pytest.mark.parametrize(
    ("spoken", "end", "limit", "reason"),
    [
        ("Hello.", "stop", "max_tokens", "end"),
        ("Hello.", "stop", "window", "end"),
        ("Hello.", "length", "max_tokens", "max_tokens"),
        ("Hello.", "length", "window", "window"),
        ("Hello.", "window", "max_tokens", "window"),
        (CALL, "stop", "max_tokens", "tool_calls"),
        (CALL, "length", "max_tokens", "max_tokens"),
        ("", "stop", "max_tokens", "end"),
    ],
)
def test_every_end_has_its_reason(spoken: str, end: Any, limit: str, reason: str) -> None:
    heard = texts(limit, tools=(Tool("look"),))
    events = heard.feed([*said(spoken), End(end, timings=Timings(total=1.5))])
    assert [last.reason for last in lasts(events) if isinstance(last, Finished)] == [reason]
    assert events[-1] is lasts(events)[0]
    assert isinstance(events[-1], Finished)
    assert events[-1].timings == Timings(total=1.5)
    assert (heard.over, heard.slot_free) == (True, True)


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (End("error", error=Unavailable("lost")), Unavailable("lost")),
        (End("cancelled"), Cancelled("the request was cancelled")),
    ],
)
def test_a_bad_end_is_one_failure(end: End, error: ModelyardError) -> None:
    heard = texts()
    events = heard.feed([*said("Hel"), end])
    assert lasts(events) == [Failed(error)]
    assert (heard.over, heard.slot_free, heard.has_output) == (True, True, True)


def test_it_starts_once_under_our_own_id_with_what_was_cached() -> None:
    heard = texts()
    first, again = heard.feed([Accepted(cached_tokens=3)]), heard.feed([Accepted(cached_tokens=9)])
    prompt = heard.usage.prompt
    assert first == [Started("our-id", "demo", 7, Usage(prompt, 3))]
    assert prompt > 3
    assert again == []


def test_progress_is_not_content() -> None:
    heard = texts()
    assert heard.feed([Progress(1, 2)]) == []
    assert heard.has_output is False


def test_a_stop_string_ends_it_while_the_engine_runs_ahead() -> None:
    heard = texts(stop=("STOP",))
    events = heard.feed(said("one STOP two", " three"))
    assert collect_reply(events).text == "one "
    last = events[-1]
    assert isinstance(last, Finished)
    assert (last.reason, last.stop_string) == ("stop_string", "STOP")
    assert (heard.over, heard.slot_free) == (True, False)
    assert heard.feed([Tokens(ids(" four"))]) == []
    assert heard.feed([End("length")]) == []
    assert heard.slot_free is True


def test_tokens_after_the_verdict_are_not_counted() -> None:
    heard = texts(stop=("STOP",))
    heard.feed(said("one STOP"))
    counted = heard.usage.output
    heard.feed([Tokens(ids(" and so on"))])
    assert heard.usage.output == counted == len(ids("one STOP"))


def test_reasoning_is_counted_apart_and_hidden_where_asked() -> None:
    thought = "<think>\nso\n</think>\n\nYes."
    shown, hidden = texts(), texts(reasoning=Reasoning(visible=False))
    replies = [collect_reply(heard.feed([*said(thought), End("stop")])) for heard in (shown, hidden)]
    assert [reply.text.strip() for reply in replies] == ["Yes.", "Yes."]
    assert ["so" in reply.thinking for reply in replies] == [True, False]
    assert replies[0].finished.usage == replies[1].finished.usage
    assert replies[0].finished.usage.reasoning > 0


def test_logprobs_stay_with_their_text() -> None:
    tokens = ids("Hello there.")
    logprobs = [IdLogprob(token, -0.5, ((token, -0.5), (tokens[0], -3.0))) for token in tokens]
    heard = texts(logprobs=2)
    reply = collect_reply(heard.feed([Accepted(), Tokens(tokens, logprobs), End("stop")]))
    block = reply.blocks[0]
    assert "".join(each.token for each in block.logprobs) == reply.text == "Hello there."
    assert {each.logprob for each in block.logprobs} == {-0.5}
    assert [top.logprob for top in block.logprobs[0].top] == [-0.5, -3.0]


def test_the_raw_text_is_told_to_whoever_keeps_it() -> None:
    kept: list[str] = []
    heard = texts(on_text=kept.append, tools=(Tool("look"),))
    heard.feed([*said(CALL), End("stop")])
    assert "".join(kept) == CALL


def test_half_a_character_at_the_end_is_still_given() -> None:
    heard = texts()
    smile = ids("😀")
    assert len(smile) > 1
    reply = collect_reply(heard.feed([Accepted(), Tokens(smile[:-1]), End("length")]))
    assert "\ufffd" in reply.text


WORDS = ["Hello", " there", ".", "\n", " ", "<", CALL, "<think>\nso\n</think>\n\n", "STOP", "é😀", "{", "<|im_end|>"]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    words=st.lists(st.sampled_from(WORDS), max_size=5),
    end=st.sampled_from(["stop", "length", "window", "cancelled"]),
    limit=st.sampled_from(["max_tokens", "window"]),
    more=st.fixed_dictionaries(
        {"tools": st.sampled_from([(), (Tool("look"),)]), "stop": st.sampled_from([(), ("STOP",)])}
    ),
    half=st.booleans(),
)
def test_an_answer_in_one_go_is_told_as_one_that_comes_bit_by_bit(
    words: list[str], end: Any, limit: str, more: dict[str, Any], half: bool
) -> None:
    kept: tuple[list[str], list[str]] = ([], [])
    at_once, in_bits = (texts(limit, on_text=each.append, **more) for each in kept)
    spoken = ids("".join(words))[: -1 if half else None]
    first, rest, last = Accepted(cached_tokens=2), Tokens(spoken), End(end, Usage(9999), Timings(total=1.5))
    assert at_once.feed([first, rest, last]) == [*in_bits.feed([first]), *in_bits.feed([rest, last])]
    seen = [
        (one.usage, one.over, one.slot_free, one.has_output, one.ids, list(one.warnings)) for one in (at_once, in_bits)
    ]
    assert seen[0] == seen[1]
    assert "".join(kept[0]) == "".join(kept[1])


# --- engines that speak in events -------------------------------------------------------------------------------------

TALK: list[Event] = [
    Started("upstream-id", "gpt-x", 1, Usage(5)),
    BlockStart(0, "text"),
    BlockDelta(0, "Hi"),
    BlockEnd(0),
    Finished("end", Usage(5, 0, 1)),
]


def test_an_engines_events_pass_under_our_own_id_and_name() -> None:
    heard = ChatOutput(job(asked()))
    events = heard.feed(TALK)
    assert events == [Started("our-id", "demo", 7, Usage(5)), *TALK[1:]]
    assert (heard.over, heard.slot_free, heard.has_output, heard.usage) == (True, True, True, Usage(5, 0, 1))


def test_the_prompts_tokens_are_told_from_the_start_where_they_are_known_here() -> None:
    events = ChatOutput(counted := job(asked())).feed([Started("x", "y", 1)])
    assert events == [Started("our-id", "demo", 7, Usage(len(counted.prompts[0].ids)))]


@pytest.mark.parametrize(("limit", "reason"), [("window", "window"), ("max_tokens", "max_tokens")])
def test_whose_limit_an_answer_met_is_known_from_its_room(limit: str, reason: str) -> None:
    (last,) = ChatOutput(job(asked(), limit)).feed([Finished("max_tokens", Usage())])
    assert last == Finished(reason, Usage())  # type: ignore[arg-type]


THOUGHTS: list[Event] = [
    TALK[0],
    *(BlockStart(0, "thinking"), BlockDelta(0, "hm"), BlockEnd(0)),
    *(BlockStart(1, "text"), BlockDelta(1, "Hi"), BlockEnd(1)),
    *(BlockStart(2, "thinking"), BlockEnd(2)),
    *(BlockStart(3, "tool_call", "c", "look"), BlockDelta(3, "{}"), BlockEnd(3)),
    Finished("tool_calls", Usage(5, 0, 4, 1)),
]


@pytest.mark.parametrize(("visible", "shown"), [(None, True), (True, True), (False, False)])
def test_hidden_reasoning_is_left_out_and_still_counted(visible: bool | None, shown: bool) -> None:
    heard = ChatOutput(job(asked(reasoning=Reasoning(visible=visible))))
    events = heard.feed(THOUGHTS)
    if shown:
        assert events[1:] == THOUGHTS[1:]
    else:
        assert [event.index for event in events if isinstance(event, BlockStart)] == [0, 1]
        assert collect_reply(events).text == "Hi"
        assert collect_reply(events).thinking == ""
        assert heard.usage.reasoning == 1


def test_a_second_beginning_is_not_told() -> None:
    events = ChatOutput(job(asked())).feed([TALK[0], *TALK])
    assert sum(isinstance(event, Started) for event in events) == 1


@pytest.mark.parametrize("last", [Finished("end", Usage()), Failed(Internal("x", id="y"))])
def test_nothing_follows_the_last_event(last: Event) -> None:
    heard = ChatOutput(job(asked()))
    events = heard.feed([TALK[0], last, BlockStart(0, "text"), Finished("end", Usage())])
    assert lasts(events) == [last]
    assert events[-1] == last
    assert heard.feed([BlockDelta(0, "late")]) == []


def test_what_pictures_take_of_the_prompt_the_engine_tells() -> None:
    heard = texts()
    own = heard.usage.prompt
    (last,) = lasts(heard.feed([*said("Hello."), End("stop", Usage(prompt=own + 64))]))
    assert isinstance(last, Finished)
    assert last.usage.prompt == own + 64


def test_prompt_is_never_counted_as_less_than_it_was() -> None:
    heard = texts()
    own = heard.usage.prompt
    (last,) = lasts(heard.feed([*said("Hello."), End("stop", Usage(prompt=0))]))
    assert isinstance(last, Finished)
    assert last.usage.prompt == own > 0
