"""Engine output as events: one start, one end, nothing after the end."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.core.engine import Accepted, Chunk, End, Progress, Tokens
from modelyard.core.errors import (
    Cancelled,
    Internal,
    ModelyardError,
    Unavailable,
)
from modelyard.core.events import (
    BlockDelta,
    BlockEnd,
    BlockStart,
    Event,
    Failed,
    Finished,
    Measured,
    PromptRead,
    Started,
    Timings,
    Usage,
    collect_reply,
)
from modelyard.core.request import (
    Caller,
    Reasoning,
    Request,
    Sampling,
    Tool,
)
from modelyard.core.tokenizer import IdLogprob
from modelyard.gateway.output import ChatOutput, TextOutput
from modelyard.gateway.prepared_request import OutputBudget, PreparedRequest, RenderedPrompt
from modelyard.router.router import Target
from tests.gateway.harness import (
    ids,
    make_request,
    model,
)

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'


def prepared(request: Request, limit: Any = "max_tokens") -> PreparedRequest:
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


def text_output(limit: Any = "max_tokens", on_text: Any = None, **request: Any) -> TextOutput:
    return TextOutput(prepared(make_request(**request), limit), 0, lambda: "call_1", on_text)


def chunks(*parts: str | Chunk) -> list[Chunk]:
    return [Accepted(), *(Tokens(ids(part)) if isinstance(part, str) else part for part in parts)]


def final_events(events: Iterable[Event]) -> list[Event]:
    return [event for event in events if isinstance(event, Finished | Failed)]


@pytest.mark.parametrize(
    ("generated", "end", "limit", "reason"),
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
def test_finish_reasons(generated: str, end: Any, limit: str, reason: str) -> None:
    output = text_output(limit, tools=(Tool("look"),))
    events = output.feed([*chunks(generated), End(end, timings=Timings(total=1.5))])
    assert [last.reason for last in final_events(events) if isinstance(last, Finished)] == [reason]
    assert events[-1] is final_events(events)[0]
    assert isinstance(events[-1], Finished)
    assert events[-1].timings == Timings(total=1.5)
    assert (output.over, output.slot_free) == (True, True)


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (End("error", error=Unavailable("lost")), Unavailable("lost")),
        (End("cancelled"), Cancelled("the request was cancelled")),
    ],
)
def test_an_error_end_is_one_failure(end: End, error: ModelyardError) -> None:
    output = text_output()
    events = output.feed([*chunks("Hel"), end])
    assert final_events(events) == [Failed(error)]
    assert (output.over, output.slot_free, output.has_output) == (True, True, True)


def test_started_is_sent_once_with_our_id_and_the_cached_tokens() -> None:
    output = text_output()
    first, again = output.feed([Accepted(cached_tokens=3)]), output.feed([Accepted(cached_tokens=9)])
    prompt = output.usage.prompt
    assert first == [Started("our-id", "demo", 7, Usage(prompt, 3))]
    assert prompt > 3
    assert again == []


def test_progress_is_not_content() -> None:
    output = text_output()
    assert output.feed([Progress(1, 2)]) == []
    assert output.has_output is False


def test_a_stop_string_ends_the_reply_while_the_engine_still_runs() -> None:
    output = text_output(stop=("STOP",))
    events = output.feed(chunks("one STOP two", " three"))
    assert collect_reply(events).text == "one "
    last = events[-1]
    assert isinstance(last, Finished)
    assert (last.reason, last.stop_string) == ("stop_string", "STOP")
    assert (output.over, output.slot_free) == (True, False)
    assert output.feed([Tokens(ids(" four"))]) == []
    assert output.feed([End("length")]) == []
    assert output.slot_free is True


@pytest.mark.parametrize("cut", range(1, 8))
def test_a_stop_string_counts_from_the_token_on_that_may_end_the_output(cut: int) -> None:
    generated = ids("STOP a STOP b")
    first = len(ids("STOP a"))
    output = text_output(stop=("STOP",), sampling=Sampling(min_tokens=first))
    events = output.feed([Accepted(), Tokens(generated[:cut]), Tokens(generated[cut:]), End("stop")])
    reply = collect_reply(events)
    assert (reply.text.strip(), reply.finished.stop_string) == ("STOP a", "STOP")


def test_times_and_progress_are_events_only_on_request() -> None:
    read = [Accepted(2), Progress(5, 9), *chunks("Hello", " there")[1:], End("stop")]
    assert not any(isinstance(event, PromptRead | Measured) for event in text_output().feed(read))
    output = text_output(stream=True, progress=True, timings="all")
    events = output.feed(read)
    total = output.usage.prompt
    progress = [(event.total, event.cached, event.done) for event in events if isinstance(event, PromptRead)]
    assert progress == [(total, 2, 2), (total, 2, 5), (total, 2, total)]
    measured = [event.usage.output for event in events if isinstance(event, Measured)]
    assert measured == [len(ids("Hello")), output.usage.output]
    assert isinstance(events[0], Started)
    assert collect_reply(events).text == "Hello there"


def test_a_prompts_log_probabilities_come_with_ids_and_ranks() -> None:
    output = text_output(prompt_logprobs=1)
    prompt = output._rendered.ids
    scored = [IdLogprob(id, -1.0, ((7, -0.5),), 3) for id in prompt[1:]]
    events = output.feed([Accepted(), Progress(len(prompt), len(prompt), scored), Tokens(ids("Hi")), End("stop")])
    found = collect_reply(events).started.prompt_logprobs
    assert [token.id for token in found] == prompt
    assert math.isnan(found[0].logprob)
    assert (found[1].rank, found[1].top[0].id) == (3, 7)


def test_tokens_after_a_stop_string_are_not_counted() -> None:
    output = text_output(stop=("STOP",))
    output.feed(chunks("one STOP"))
    counted = output.usage.output
    output.feed([Tokens(ids(" and so on"))])
    assert output.usage.output == counted == len(ids("one STOP"))


def test_reasoning_is_counted_separately_and_can_be_hidden() -> None:
    thought = "<think>\nso\n</think>\n\nYes."
    shown, hidden = text_output(), text_output(reasoning=Reasoning(visible=False))
    replies = [collect_reply(output.feed([*chunks(thought), End("stop")])) for output in (shown, hidden)]
    assert [reply.text.strip() for reply in replies] == ["Yes.", "Yes."]
    assert ["so" in reply.thinking for reply in replies] == [True, False]
    assert replies[0].finished.usage == replies[1].finished.usage
    assert replies[0].finished.usage.reasoning > 0


def test_logprobs_match_their_text() -> None:
    tokens = ids("Hello there.")
    logprobs = [IdLogprob(token, -0.5, ((token, -0.5), (tokens[0], -3.0))) for token in tokens]
    output = text_output(logprobs=2)
    reply = collect_reply(output.feed([Accepted(), Tokens(tokens, logprobs), End("stop")]))
    block = reply.blocks[0]
    assert "".join(each.token for each in block.logprobs) == reply.text == "Hello there."
    assert {each.logprob for each in block.logprobs} == {-0.5}
    assert [top.logprob for top in block.logprobs[0].top] == [-0.5, -3.0]


def test_on_text_receives_the_raw_text() -> None:
    kept: list[str] = []
    output = text_output(on_text=kept.append, tools=(Tool("look"),))
    output.feed([*chunks(CALL), End("stop")])
    assert "".join(kept) == CALL


@pytest.mark.parametrize(("reason", "end"), [("length", ""), ("window", ""), ("stop", "\ufffd")])
def test_a_character_that_a_limit_cuts_is_dropped(reason: Any, end: str) -> None:
    smile = ids("😀")
    assert len(smile) > 1
    reply = collect_reply(text_output().feed([Accepted(), Tokens([*ids("Hi "), *smile[:-1]]), End(reason)]))
    assert reply.text == "Hi " + end


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
def test_chunking_does_not_change_the_events(
    words: list[str], end: Any, limit: str, more: dict[str, Any], half: bool
) -> None:
    kept: tuple[list[str], list[str]] = ([], [])
    at_once, piecewise = (text_output(limit, on_text=each.append, **more) for each in kept)
    generated = ids("".join(words))[: -1 if half else None]
    first, rest, last = Accepted(cached_tokens=2), Tokens(generated), End(end, Usage(9999), Timings(total=1.5))
    assert at_once.feed([first, rest, last]) == [*piecewise.feed([first]), *piecewise.feed([rest, last])]
    states = [
        (one.usage, one.over, one.slot_free, one.has_output, one.ids, list(one.warnings))
        for one in (at_once, piecewise)
    ]
    assert states[0] == states[1]
    assert "".join(kept[0]) == "".join(kept[1])


# --- engines that produce events --------------------------------------------------------------------------------------


CHAT_EVENTS: list[Event] = [
    Started("upstream-id", "gpt-x", 1, Usage(5)),
    BlockStart(0, "text"),
    BlockDelta(0, "Hi"),
    BlockEnd(0),
    Finished("end", Usage(5, 0, 1)),
]


def test_events_of_a_chat_engine_get_our_id_and_model_name() -> None:
    output = ChatOutput(prepared(make_request()))
    events = output.feed(CHAT_EVENTS)
    assert events == [Started("our-id", "demo", 7, Usage(5)), *CHAT_EVENTS[1:]]
    assert (output.over, output.slot_free, output.has_output, output.usage) == (True, True, True, Usage(5, 0, 1))


def test_a_chat_engines_deltas_count_as_the_tokens_that_arrive_not_the_usage_at_the_end() -> None:
    output = ChatOutput(prepared(make_request()))
    output.feed([CHAT_EVENTS[0], BlockStart(0, "text"), BlockDelta(0, "a"), BlockDelta(0, "b")])
    assert output.tokens == 2
    output.feed([BlockEnd(0), Finished("end", Usage(5, 0, 40))])
    assert (output.tokens, output.usage.output) == (2, 40)


def test_started_has_the_prompt_tokens_if_the_prompt_is_tokenized_here() -> None:
    events = ChatOutput(counted := prepared(make_request())).feed([Started("x", "y", 1)])
    assert events == [Started("our-id", "demo", 7, Usage(len(counted.prompts[0].ids)))]


@pytest.mark.parametrize(("limit", "reason"), [("window", "window"), ("max_tokens", "max_tokens")])
def test_the_output_budget_decides_between_window_and_max_tokens(limit: str, reason: str) -> None:
    (last,) = ChatOutput(prepared(make_request(), limit)).feed([Finished("max_tokens", Usage())])
    assert last == Finished(reason, Usage())  # type: ignore[arg-type]


REASONING_EVENTS: list[Event] = [
    CHAT_EVENTS[0],
    *(BlockStart(0, "thinking"), BlockDelta(0, "hm"), BlockEnd(0)),
    *(BlockStart(1, "text"), BlockDelta(1, "Hi"), BlockEnd(1)),
    *(BlockStart(2, "thinking"), BlockEnd(2)),
    *(BlockStart(3, "tool_call", "c", "look"), BlockDelta(3, "{}"), BlockEnd(3)),
    Finished("tool_calls", Usage(5, 0, 4, 1)),
]


@pytest.mark.parametrize(("visible", "shown"), [(None, True), (True, True), (False, False)])
def test_hidden_reasoning_is_dropped_but_counted(visible: bool | None, shown: bool) -> None:
    output = ChatOutput(prepared(make_request(reasoning=Reasoning(visible=visible))))
    events = output.feed(REASONING_EVENTS)
    if shown:
        assert events[1:] == REASONING_EVENTS[1:]
    else:
        assert [event.index for event in events if isinstance(event, BlockStart)] == [0, 1]
        assert collect_reply(events).text == "Hi"
        assert collect_reply(events).thinking == ""
        assert output.usage.reasoning == 1


def test_a_second_started_event_is_dropped() -> None:
    events = ChatOutput(prepared(make_request())).feed([CHAT_EVENTS[0], *CHAT_EVENTS])
    assert sum(isinstance(event, Started) for event in events) == 1


@pytest.mark.parametrize("last", [Finished("end", Usage()), Failed(Internal("x", id="y"))])
def test_nothing_follows_the_last_event(last: Event) -> None:
    output = ChatOutput(prepared(make_request()))
    events = output.feed([CHAT_EVENTS[0], last, BlockStart(0, "text"), Finished("end", Usage())])
    assert final_events(events) == [last]
    assert events[-1] == last
    assert output.feed([BlockDelta(0, "late")]) == []


def test_the_engine_reports_the_prompt_tokens_of_images() -> None:
    output = text_output()
    own = output.usage.prompt
    (last,) = final_events(output.feed([*chunks("Hello."), End("stop", Usage(prompt=own + 64))]))
    assert isinstance(last, Finished)
    assert last.usage.prompt == own + 64


def test_the_engine_cannot_lower_the_prompt_tokens() -> None:
    output = text_output()
    own = output.usage.prompt
    (last,) = final_events(output.feed([*chunks("Hello."), End("stop", Usage(prompt=0))]))
    assert isinstance(last, Finished)
    assert last.usage.prompt == own > 0
