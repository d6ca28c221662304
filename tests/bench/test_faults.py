"""The outcomes of requests to a broken server, and which of them are failures."""

from __future__ import annotations

import json

import pytest

from bench.faults import PORTS, Dialogue, Outcomes, Row, StreamReader

MAX_WAIT_S = 5.0


async def test_only_complete_responses_and_errors_in_time_are_expected() -> None:
    outcomes = Outcomes(MAX_WAIT_S)
    outcomes.faults += [10.0, 20.0]
    outcomes.add("complete", 1.0, 9.0)  # before any fault: it may take any time
    outcomes.add("error", 9.0, 10.0 + MAX_WAIT_S, "the worker was lost")
    outcomes.add("cut", 19.0, 21.0)
    assert outcomes.unexpected(("cut",)) == {}
    assert outcomes.unexpected(()) == {"cut": 1}
    outcomes.add("complete", 19.0, 20.0 + MAX_WAIT_S + 0.1)
    outcomes.add("MIXED", 1.0, 2.0, "text of another request")
    assert outcomes.unexpected(("cut",)) == {"complete, late": 1, "MIXED": 1}
    assert (outcomes.counts["complete"], outcomes.counts["error"]) == (1, 1)
    assert round(outcomes.longest_wait_s, 1) == MAX_WAIT_S + 0.1
    assert outcomes.messages["error: the worker was lost"] == 1


async def test_the_wait_counts_from_the_first_fault_during_a_request() -> None:
    outcomes = Outcomes(MAX_WAIT_S)
    outcomes.faults += [10.0, 11.0]
    outcomes.add("error", 9.0, 12.0)
    assert outcomes.longest_wait_s == 2.0


async def test_a_recovery_ends_when_both_gateways_have_answered_requests_that_were_sent_after_the_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outcomes = Outcomes(MAX_WAIT_S)
    outcomes.healed += [10.0, 20.0, 30.0]
    for began, first in ((9.0, 10.5), (11.0, 13.0), (21.0, 21.5)):  # the first was sent before the fault
        monkeypatch.setattr("bench.faults.time.monotonic", lambda first=first: first)
        outcomes.on_first_text(PORTS[0], began)
        outcomes.on_first_text(PORTS[1], began + 0.1)
    monkeypatch.setattr("bench.faults.time.monotonic", lambda: 30.5)
    outcomes.on_first_text(PORTS[0], 30.1)
    monkeypatch.undo()
    assert outcomes.recoveries() == [3.0, 1.5, float("inf")]


@pytest.mark.parametrize("uses_responses", [False, True])
def test_a_real_engine_is_given_only_one_right_answer(uses_responses: bool) -> None:
    dialogue = Dialogue("client 1: 2 3", True, uses_responses)
    assert '{"const": "client 1: 2 3"}' in json.dumps(dialogue.body())
    assert dialogue.answer() == '{"answer":"client1:23"}'
    assert "const" not in json.dumps(Dialogue("x", False, uses_responses).body())


CHAT = ['data: {"choices":[{"delta":{"content":"a b"}}]}', "", 'data: {"choices":[{"delta":{}}]}']
RESPONSES = ['data: {"type":"response.output_text.delta","delta":"a b"}', "event: x"]


@pytest.mark.parametrize(
    ("lines", "outcome"),
    [
        ([*CHAT, "data: [DONE]"], "complete"),
        ([*RESPONSES, 'data: {"type":"response.completed"}'], "complete"),
        (CHAT, "SILENT"),
        (RESPONSES, "SILENT"),
        ([*CHAT, 'data: {"error":{"message":"lost"}}', "data: [DONE]"], "error"),
        ([*RESPONSES, 'data: {"type":"response.failed"}'], "error"),
        ([*CHAT, 'data: {"choices":[{"delta":{"content":"x"}}]}', "data: [DONE]"], "MIXED"),
    ],
)
def test_streams_of_both_protocols_are_judged_by_their_text_and_end(lines: list[str], outcome: str) -> None:
    reader = StreamReader()
    for line in lines:
        reader.feed(line)
    assert reader.outcome("ab", was_cut=False)[0] == outcome


def test_a_row_names_what_broke() -> None:
    assert Row("worker", 2, {"complete": 3}, [1.0, 2.0], 1.5, {}).line() == (
        "| worker | 2 | 3 complete | 1.5 s, at most 2.0 s | 1.5 s | held |"
    )
    assert "BROKEN: {'SILENT': 1}" in Row("worker", 1, {"SILENT": 1}, [1.0], 1.5, {"SILENT": 1}).line()
