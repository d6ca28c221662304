"""aider, headless, against a scripted model: its edits are written, and it recovers from errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.agent_bench import DEADLINE, AgentBench, request_text, rule, text_step
from tests.e2e.helpers import wait_until_idle

MESSAGE = ("--yes-always", "--no-git", "--no-auto-commits", "--no-pretty", "--message")
EDIT = "Here it is.\n\nnote.txt\n```\nforty-two\n```\n"


@pytest.fixture
def bench(tmp_path: Path) -> AgentBench:
    return AgentBench("aider", tmp_path)


@pytest.mark.steady
def test_it_writes_a_file_from_a_reply(bench: AgentBench) -> None:
    (bench.work / "note.txt").write_text("nothing\n")
    with bench.serve([rule({"think": "An edit."}, text_step(EDIT), when="write a note"), rule(text_step("ok"))]):
        done = bench.run(*MESSAGE, "write a note", "note.txt")
    assert done.code == 0, done
    assert (bench.work / "note.txt").read_text() == "forty-two\n", done
    assert "nothing" in request_text(bench.requests[0])


@pytest.mark.steady
def test_a_second_turn_continues_the_first(bench: AgentBench) -> None:
    script = [rule(text_step("Remembered."), when="remember 42"), rule(text_step("It was 42."), when="what was")]
    with bench.serve(script):
        bench.run(*MESSAGE, "remember 42")
        done = bench.run("--restore-chat-history", *MESSAGE, "what was it?")
    assert "It was 42." in done.out, done
    assert "Remembered." in request_text(bench.requests[-1])


def test_an_interrupted_reply_frees_its_slot(bench: AgentBench) -> None:
    with bench.serve([rule(text_step("So far "), {"hang": True})]) as server:
        process = bench.start(*MESSAGE, "wait for ever")
        bench.wait_for_request()
        bench.interrupt(process)
        wait_until_idle(server)


def test_it_compacts_before_the_conversation_exceeds_the_window(bench: AgentBench) -> None:
    """From the window set by the launcher and its own count."""
    script = [
        rule(text_step("We spoke of yards."), when="# ASSISTANT"),  # it shows the conversation to be summarised
        rule({"tokens": 1800}, when="tell me a long story"),
        rule(text_step("Short enough."), when="and now"),
    ]
    with bench.serve(script, n_ctx=5_000):
        bench.run(*MESSAGE, "tell me a long story")
        bench.run("--restore-chat-history", *MESSAGE, "tell me a long story, again")
        done = bench.run("--restore-chat-history", *MESSAGE, "and now")
    assert "Short enough." in done.out, done
    assert "We spoke of yards." in request_text(bench.requests[-1])
    assert "github" not in done.out.lower(), "it asked the internet for a model that it was told of"


def test_an_overflow_error_is_recognised(bench: AgentBench) -> None:
    with bench.serve([rule(text_step("Never said."))], n_ctx=500):
        done = bench.run(*MESSAGE, "hello", target=bench.target(window=200_000))
    assert "has hit a token limit" in done.out, done
    assert len(bench.requests) == 1, "it tried again in vain"
    assert "Never said." not in done.out


@pytest.mark.parametrize("kind", ["rate_limited", "overloaded", "internal"])
def test_it_retries_after_an_overloaded_error(bench: AgentBench, kind: str) -> None:
    script = [
        rule({"fail": "not now", "kind": kind}, when="try it", turn=1),
        rule(text_step("Second time lucky."), when="try it"),
    ]
    with bench.serve(script):
        done = bench.run(*MESSAGE, "try it")
    assert "Second time lucky." in done.out, done


def test_it_recovers_from_an_engine_that_dies_during_a_reply(bench: AgentBench) -> None:
    with bench.serve([rule(text_step("Half an ans"), {"hang": True}, when="try it")]):
        process = bench.start(*MESSAGE, "try it")
        bench.wait_for_request()
        bench.kill_engine([rule(text_step("Back again."), when="try it")])
        out, err = process.communicate(timeout=DEADLINE)
    assert "Back again." in out, (out, err)
