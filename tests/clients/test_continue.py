"""Continue's command line, headless, against a scripted model: its tools work, and it recovers from errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.agent_bench import (
    DEADLINE,
    AgentBench,
    call_step,
    called_tools,
    request_text,
    rule,
    text_step,
    tool_results,
)
from tests.e2e.helpers import wait_until_idle

PRINT = ("--auto", "-p")


@pytest.fixture
def bench(tmp_path: Path) -> AgentBench:
    return AgentBench("continue", tmp_path)


@pytest.mark.steady
def test_it_writes_and_reads_a_file_with_its_tools(bench: AgentBench) -> None:
    note = bench.work / "note.txt"
    script = [
        rule({"think": "It is there."}, text_step("The note says: forty-two."), result="forty-two"),
        rule(call_step("Read", filepath=str(note)), result="(?i)success|created|wrote"),
        rule(
            {"think": "Write it first."},
            call_step("Write", filepath=str(note), content="forty-two\n"),
            when="write a note",
        ),
    ]
    with bench.serve(script):
        done = bench.run(*PRINT, "write a note")
    assert done.code == 0, done
    assert "The note says: forty-two." in done.out, done
    assert note.read_text() == "forty-two\n"
    assert [called_tools(request) for request in bench.turns] == [[], ["Write"], ["Write", "Read"]]
    assert "forty-two" in tool_results(bench.turns[-1])


@pytest.mark.steady
def test_a_second_turn_continues_the_first(bench: AgentBench) -> None:
    script = [rule(text_step("Remembered."), when="remember 42"), rule(text_step("It was 42."), when="what was")]
    with bench.serve(script):
        bench.run(*PRINT, "remember 42")
        done = bench.run(*PRINT, "--resume", "what was it?")
    assert "It was 42." in done.out, done
    assert "Remembered." in request_text(bench.turns[-1])


@pytest.mark.steady
def test_a_model_named_like_gpt_5_uses_the_responses_api(bench: AgentBench) -> None:
    note = bench.work / "note.txt"
    script = [
        rule(text_step("Written."), result="(?i)success|created|wrote"),
        rule(call_step("Write", filepath=str(note), content="forty-two\n"), when="write a note"),
    ]
    with bench.serve(script):
        done = bench.run(*PRINT, "write a note", target=bench.target(model="gpt-5-local"))
    assert "Written." in done.out, done
    assert note.read_text() == "forty-two\n"


def test_it_waits_for_a_long_prefill(bench: AgentBench) -> None:
    """Its own patience is a few seconds where a timeout is set in the wrong unit."""
    with bench.serve([rule({"prefill": 6}, text_step("At last."))]):
        done = bench.run(*PRINT, "a long prompt")
    assert "At last." in done.out, done
    assert len(bench.requests) == 1


def test_an_interrupted_reply_frees_its_slot(bench: AgentBench) -> None:
    with bench.serve([rule(text_step("So far "), {"hang": True})]) as server:
        process = bench.start(*PRINT, "wait for ever")
        bench.wait_for_request()
        bench.interrupt(process)
        wait_until_idle(server)


def test_it_compacts_before_the_conversation_exceeds_the_window(bench: AgentBench) -> None:
    """From the window set by the launcher and its own count."""
    script = [
        rule(text_step("We spoke of yards."), when="(?i)summar[iy]"),
        rule({"tokens": 1800}, when="tell me a long story"),
        rule(text_step("Short enough."), when="and now"),
    ]
    with bench.serve(script, n_ctx=6_000):
        bench.run(*PRINT, "tell me a long story")
        bench.run(*PRINT, "--resume", "tell me a long story, again")
        done = bench.run(*PRINT, "--resume", "and now")
    assert done.out.strip() == "Short enough.", done
    assert "We spoke of yards." in request_text(bench.requests[-1])
    assert len(bench.requests) == 4


def test_an_overflow_error_is_shown(bench: AgentBench) -> None:
    with bench.serve([rule(text_step("Never said."))], n_ctx=1000):
        done = bench.run(*PRINT, "hello", target=bench.target(window=200_000))
    assert done.code != 0
    assert "maximum context length is 1000 tokens" in done.out + done.err, done


@pytest.mark.parametrize("kind", ["rate_limited", "overloaded", "internal"])
def test_it_retries_after_an_overloaded_error(bench: AgentBench, kind: str) -> None:
    script = [
        rule({"fail": "not now", "kind": kind}, when="try it", turn=1),
        rule(text_step("Second time lucky."), when="try it"),
    ]
    with bench.serve(script):
        done = bench.run(*PRINT, "try it")
    assert "Second time lucky." in done.out, done
    assert len(bench.turns) == 2


def test_it_recovers_from_an_engine_that_dies_during_a_reply(bench: AgentBench) -> None:
    with bench.serve([rule(text_step("Half an ans"), {"hang": True}, when="try it")]):
        process = bench.start(*PRINT, "try it")
        bench.wait_for_request()
        bench.kill_engine([rule(text_step("Back again."), when="try it")])
        out, err = process.communicate(timeout=DEADLINE)
    assert "Back again." in out, (out, err)
