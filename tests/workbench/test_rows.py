"""Requests as rows of a table: what changes from look to look, and where a request's time went."""

from __future__ import annotations

from typing import Any

from modelyard.workbench.rows import Table, client, first_token, merged, timeline

TIMINGS: dict[str, Any] = {
    "queue": 0.5, "tokenize": 0.1, "prefill": 0.3, "first_token": 0.4, "decode": 2.0, "backend": None, "engine": None,
    "total": 3.5,
}  # fmt: skip


def ended(id: str, at: float = 10.0, **more: Any) -> dict[str, Any]:
    return {
        "id": id, "status": "end", "failed": False, "model": "m", "cache": "main", "key": "", "session": None,
        "endpoint": "/v1/messages", "usage": {"prompt": 9, "cached": 3, "output": 5}, "timings": TIMINGS,
        "tokens_per_s": 2.0, "at": at, **more,
    }  # fmt: skip


def live(id: str, **more: Any) -> dict[str, Any]:
    return {
        "id": id, "state": "running", "model": "m", "cache": "main", "key": "k", "session": "k/s", "waited": 0.1,
        "tokens": 9, "since": 8.0, "position": 0, **more,
    }  # fmt: skip


def ids(rows: list[dict[str, Any]]) -> list[str]:
    return [row["id"] for row in rows]


def test_a_request_is_added_then_updated_when_it_ends() -> None:
    table = Table(10)
    first = table.take([live("a")], [], 9.0)
    assert (ids(first.add), first.update, first.remove) == (["a"], [], [])
    assert (first.add[0]["status"], first.add[0]["session"]) == ("running", "s")
    second = table.take([], [ended("a")], 10.0)
    assert (second.add, ids(second.update), second.remove) == ([], ["a"], [])
    assert table.newest == 10.0


def test_what_is_known_already_changes_nothing() -> None:
    table = Table(10)
    assert table.take([], [ended("a")], 10.0)
    assert not table.take([], [ended("a")], 11.0)


def test_one_that_left_without_a_trace_is_removed() -> None:
    table = Table(10)
    table.take([live("a")], [], 9.0)
    assert ids(table.take([], [], 10.0).remove) == ["a"]
    assert table.rows == []


def test_the_oldest_leave_a_full_table_and_those_that_run_stay() -> None:
    table = Table(3)
    table.take([live("l")], [ended("b", 2.0), ended("a", 1.0)], 3.0)
    changes = table.take([live("l")], [ended("c", 3.0)], 4.0)
    assert ids(changes.remove) == ["a"]
    assert sorted(ids(table.rows)) == ["b", "c", "l"]


def test_those_that_run_stand_above_those_that_ended() -> None:
    table = Table(10)
    table.take([live("l")], [ended("a", 2e9)], 9.0)
    assert ids(sorted(table.rows, key=lambda row: -row["at"])) == ["l", "a"]


def test_one_that_waits_says_its_place_and_can_be_cancelled() -> None:
    (row,) = Table(10).take([live("a", state="waiting", position=2)], [], 9.9).add
    assert (row["status"], row["act"], row["total"]) == ("waiting (2.)", "cancel", 1.0)


def test_the_choices_of_one_request_are_one_row_and_a_failure_shows() -> None:
    good, bad = (
        Table(9).take([], [ended("a")], 1.0).add[0],
        Table(9).take([], [ended("a", 11.0, failed=True)], 1.0).add[0],
    )
    (row,) = merged([good, bad]).values()
    assert (row["output"], row["failed"], row["at"]) == (10, True, 11.0)


def test_a_client_is_its_key_and_its_protocol() -> None:
    assert client(ended("a", key="laptop")) == "laptop · Messages"
    assert client(ended("a", endpoint="/v1/else")) == "/v1/else"


def test_the_first_token_is_counted_from_the_clients_side() -> None:
    assert first_token(TIMINGS) == 1.0
    assert first_token({**TIMINGS, "first_token": None}) is None


def test_a_timeline_names_the_time_that_nobody_measured() -> None:
    names = [name for name, _ in timeline(TIMINGS)]
    assert names == ["tokenize", "queue", "prefill", "decode", "other"]
    assert dict(timeline(TIMINGS))["other"] == 0.5
    assert timeline(dict.fromkeys(TIMINGS)) == []
