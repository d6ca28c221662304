"""goose, headless, against a scripted model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.agent_bench import (
    AgentBench,
    call_step,
    called_tools,
    request_text,
    rule,
    text_step,
    tool_results,
)
from tests.e2e.helpers import wait_until_idle

RUN = ("run", "--quiet", "--text")


@pytest.fixture
def bench(tmp_path: Path) -> AgentBench:
    return AgentBench("goose", tmp_path)


@pytest.mark.steady
def test_it_writes_and_reads_a_file_with_its_tools(bench: AgentBench) -> None:
    note = bench.work / "note.txt"
    script = [
        rule({"think": "It is there."}, text_step("The note says: forty-two."), result="forty-two"),
        rule(call_step("shell", command=f"cat {note}"), result="(?i)wrote|created|success"),
        rule(call_step("write", path=str(note), content="forty-two\n"), when="write a note"),
        rule(text_step("A note")),
    ]
    with bench.serve(script):
        done = bench.run(*RUN, "write a note")
    assert done.code == 0, done
    assert "The note says: forty-two." in done.out, done
    assert note.read_text() == "forty-two\n"
    assert called_tools(bench.turns[-1]) == ["write", "shell"]
    assert "forty-two" in tool_results(bench.turns[-1])


@pytest.mark.steady
def test_a_second_turn_continues_the_first(bench: AgentBench) -> None:
    script = [
        rule(text_step("It was 42."), when="what was"),
        rule(text_step("Remembered."), when="remember 42"),
        rule(text_step("A number")),
    ]
    with bench.serve(script):
        bench.run("run", "--quiet", "--name", "one", "--text", "remember 42")
        done = bench.run("run", "--quiet", "--name", "one", "--resume", "--text", "what was it?")
    assert "It was 42." in done.out, done
    assert "Remembered." in request_text(bench.turns[-1])


def test_an_interrupted_reply_frees_its_slot(bench: AgentBench) -> None:
    script = [rule(text_step("So far "), {"hang": True}, when="wait for ever"), rule(text_step("ok"))]
    with bench.serve(script) as server:
        process = bench.start(*RUN, "wait for ever")
        bench.wait_for_request()
        bench.interrupt(process)
        wait_until_idle(server)


def test_a_prompt_that_does_not_fit_is_reported_after_it_has_tried_to_compact(bench: AgentBench) -> None:
    with bench.serve([rule(text_step("ok"))], n_ctx=2048):
        done = bench.run(*RUN, "hello")
    assert "Context limit still exceeded after compaction" in done.out, done


@pytest.mark.parametrize("kind", ["overloaded", "internal"])
def test_it_retries_after_an_error(bench: AgentBench, kind: str) -> None:
    script = [
        rule({"fail": "not now", "kind": kind}, when="try it", turn=1),
        rule(text_step("Second time lucky."), when="try it"),
        rule(text_step("A title")),
    ]
    with bench.serve(script):
        done = bench.run(*RUN, "try it")
    assert "Second time lucky." in done.out, done
