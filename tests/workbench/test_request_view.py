"""Requests as the pages show them: changes of the table, timeline, cache use in sentences, events as lines."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from modelyard.core.events import (
    BlockDelta,
    BlockEnd,
    BlockStart,
    Event,
    Finished,
    MissCause,
    ReplyBuilder,
    Started,
    Usage,
)
from modelyard.core.request import Request
from modelyard.http.errors import load_protocol
from modelyard.workbench.chat_request import PROTOCOLS
from modelyard.workbench.request_view import (
    RequestTable,
    client_label,
    event_lines,
    explain_cache_use,
    live_state,
    merge_choices,
    time_to_first_token,
    timeline,
    tool_run,
)

TIMINGS: dict[str, Any] = {
    "queue": 0.5, "tokenize": 0.1, "prefill": 0.3, "first_token": 0.4, "decode": 2.0, "backend": None, "engine": None,
    "total": 3.5,
}  # fmt: skip
EVENTS: list[Event] = [
    Started("t", "m", 0),
    BlockStart(0, "text"),
    BlockDelta(0, "Hel"),
    BlockDelta(0, "lo"),
    BlockEnd(0),
    Finished("end", Usage(3, 0, 2)),
]


# --- the table --------------------------------------------------------------------------------------------------------


def ended(id: str, at: float = 10.0, **changes: Any) -> dict[str, Any]:
    return {
        "id": id, "status": "end", "failed": False, "model": "m", "cache": "main", "key": "", "session": None,
        "endpoint": "/v1/messages", "usage": {"prompt": 9, "cached": 3, "output": 5}, "timings": TIMINGS,
        "tokens_per_s": 2.0, "at": at, **changes,
    }  # fmt: skip


def live(id: str, **changes: Any) -> dict[str, Any]:
    return {
        "id": id, "state": "running", "model": "m", "cache": "main", "key": "k", "session": "k/s", "waited": 0.1,
        "tokens": 9, "since": 8.0, "position": 0, "progress": None, **changes,
    }  # fmt: skip


def ids(rows: list[dict[str, Any]]) -> list[str]:
    return [row["id"] for row in rows]


def test_a_request_is_added_and_updated_when_it_ends() -> None:
    table = RequestTable(10)
    first = table.update([live("a")], [], 9.0)
    assert (ids(first.add), first.update, first.remove) == (["a"], [], [])
    assert (first.add[0]["status"], first.add[0]["session"]) == ("running", "s")
    second = table.update([], [ended("a")], 10.0)
    assert (second.add, ids(second.update), second.remove) == ([], ["a"], [])
    assert table.newest == 10.0


def test_a_repeated_record_changes_nothing() -> None:
    table = RequestTable(10)
    assert table.update([], [ended("a")], 10.0)
    assert not table.update([], [ended("a")], 11.0)


def progress(**changes: Any) -> dict[str, Any]:
    return {"prompt": 100, "cached": 10, "read": 40, "output": 0, "endpoint": "/v1/messages", **changes}


def test_a_live_request_shows_its_prefill_its_output_and_its_client() -> None:
    table = RequestTable(10)
    (row,) = table.update([live("a", progress=progress())], [], 9.0).add
    assert (row["status"], row["cached"], row["output"], row["client"]) == ("reading 40 %", 10, 0, "k · Messages")
    (row,) = table.update([live("a", progress=progress(output=3))], [], 9.0).update
    assert (row["status"], row["output"]) == ("running", 3)
    assert live_state(live("b", state="waiting", position=2)) == "waiting (2.)"


def test_the_tools_of_mcp_servers_are_shown_while_they_run_and_afterwards() -> None:
    assert live_state(live("a", progress=progress(output=3, tools=["docs.search"]))) == "calling docs.search"
    call = {"server": "docs", "tool": "search", "status": "ok", "seconds": 0.25, "chars": 12}
    assert tool_run(call) == "docs.search · ok · 250 ms · 12 characters"


def test_a_live_request_that_vanishes_is_removed() -> None:
    table = RequestTable(10)
    table.update([live("a")], [], 9.0)
    assert ids(table.update([], [], 10.0).remove) == ["a"]
    assert table.rows == []


def test_a_full_table_drops_the_oldest_ended_requests() -> None:
    table = RequestTable(3)
    table.update([live("l")], [ended("b", 2.0), ended("a", 1.0)], 3.0)
    changes = table.update([live("l")], [ended("c", 3.0)], 4.0)
    assert ids(changes.remove) == ["a"]
    assert sorted(ids(table.rows)) == ["b", "c", "l"]


def test_live_requests_sort_above_ended_ones() -> None:
    table = RequestTable(10)
    table.update([live("l")], [ended("a", 2e9)], 9.0)
    assert ids(sorted(table.rows, key=lambda row: -row["at"])) == ["l", "a"]


def test_a_waiting_request_shows_its_position_and_can_be_cancelled() -> None:
    (row,) = RequestTable(10).update([live("a", state="waiting", position=2)], [], 9.9).add
    assert (row["status"], row["act"], row["total"]) == ("waiting (2.)", "cancel", 1.0)


def test_choices_of_one_request_are_one_row_that_shows_a_failure() -> None:
    good, bad = (
        RequestTable(9).update([], [ended("a")], 1.0).add[0],
        RequestTable(9).update([], [ended("a", 11.0, failed=True)], 1.0).add[0],
    )
    (row,) = merge_choices([good, bad]).values()
    assert (row["output"], row["failed"], row["at"]) == (10, True, 11.0)


def test_a_client_is_shown_by_its_key_and_protocol() -> None:
    assert client_label(ended("a", key="laptop")) == "laptop · Messages"
    assert client_label(ended("a", endpoint="/v1/else")) == "/v1/else"


# --- timings ----------------------------------------------------------------------------------------------------------


def test_time_to_first_token_includes_the_queue() -> None:
    assert time_to_first_token(TIMINGS) == 1.0
    assert time_to_first_token({**TIMINGS, "first_token": None}) is None


def test_the_timeline_shows_unmeasured_time_as_other() -> None:
    assert [name for name, _ in timeline(TIMINGS)] == ["tokenize", "queue", "prefill", "decode", "other"]
    assert dict(timeline(TIMINGS))["other"] == 0.5
    assert timeline(dict.fromkeys(TIMINGS)) == []


# --- the cache --------------------------------------------------------------------------------------------------------


def explain(
    prompt: int, cached: int, divergence: int | None, evicted: bool = False, cause: str | None = None
) -> list[str]:
    usage, reuse = {"prompt": prompt, "cached": cached}, {"cause": cause} if cause else None
    return list(explain_cache_use({"usage": usage, "divergence": divergence, "evicted": evicted, "reuse": reuse}))


def test_a_partial_match_says_where_it_ends() -> None:
    first, second = explain(100, 60, 60)
    assert first == "60 of 100 prompt tokens came from the cache (60 %)."
    assert "up to token 60" in second


def test_a_prompt_without_a_match_says_so() -> None:
    assert "Nothing in the cache started like this prompt." in explain(100, 0, 0)


def test_each_cause_adds_one_sentence() -> None:
    without = explain(100, 60, 60, cause="none")
    sentences = set()
    for cause in get_args(MissCause):
        lines = explain(100, 60, 60, cause=cause)
        assert lines[:2] == without
        assert len(lines) == 2 + (cause != "none"), cause
        sentences.add(lines[-1])
    assert len(sentences) == len(get_args(MissCause))


def test_a_match_in_another_slot_is_not_reported_as_missing() -> None:
    assert explain(100, 0, 0, cause="not_copied")[1:] == [
        "Another slot of the cache held more of it, but evaluating it again was cheaper than copying."
    ]


def test_an_eviction_is_reported() -> None:
    assert "was evicted from the cache" in explain(10, 0, 0, evicted=True)[-1]


def test_a_request_without_a_prompt_has_no_miss() -> None:
    assert explain(0, 0, None) == ["The request ended before its prompt was evaluated."]


# --- events -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_streamed_reply_is_read_and_its_deltas_are_joined(name: str) -> None:
    protocol, request = load_protocol(name), Request(model="m", stream=True, include_usage=True)
    writer = protocol.writer(request, "t")
    text = b"".join([*(writer.write(event) for event in EVENTS), writer.end()]).decode()
    lines = event_lines(protocol.PATHS[0], text)
    assert "delta ×2  Hello" in lines
    assert lines[-1] == "finished  end, 3 + 2 tokens"


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_complete_reply_is_read_as_the_same_events(name: str) -> None:
    builder, protocol = ReplyBuilder(), load_protocol(name)
    builder.feed(EVENTS)
    lines = event_lines(protocol.PATHS[0], protocol.write_reply([builder.reply()], Request(model="m")).decode())
    assert lines == ["started  m", "block 0  text", "delta ×1  Hello", "end of block 0", "finished  end, 3 + 2 tokens"]


def test_a_reply_without_events_says_so() -> None:
    assert event_lines("/v1/embeddings", "{}") == ["This reply has no events."]
    assert event_lines("/v1/messages", "") == ["This reply has no events."]


def test_an_error_reply_is_shown_without_raising() -> None:
    lines = event_lines("/v1/chat/completions", '{"error": {"message": "no such model", "type": "x", "code": "y"}}')
    assert lines != []
    assert all(isinstance(line, str) for line in lines)
