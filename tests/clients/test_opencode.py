"""opencode, headless, against a scripted model: its tools work, and it recovers from errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelyard.gateway.prepared_request import priority
from tests.clients.agent_bench import (
    DEADLINE,
    AgentBench,
    call_step,
    called_tools,
    count_images,
    reasoning_texts,
    red_png,
    request_text,
    rule,
    text_step,
    tool_results,
)
from tests.e2e.helpers import wait_until_idle

RUN = ("run", "--auto")


@pytest.fixture
def bench(tmp_path: Path) -> AgentBench:
    return AgentBench("opencode", tmp_path)


@pytest.mark.steady
def test_it_writes_and_reads_a_file_with_its_tools_and_echoes_reasoning(bench: AgentBench) -> None:
    note = bench.work / "note.txt"
    script = [
        rule({"think": "It is there."}, text_step("The note says: forty-two."), result="forty-two"),
        rule({"think": "Now read it."}, call_step("read", filePath=str(note)), result="(?i)wrote|success"),
        rule(
            {"think": "Write it first."},
            text_step("Writing."),
            call_step("write", filePath=str(note), content="forty-two\n"),
            when="write a note",
        ),
    ]
    with bench.serve(script):
        done = bench.run(*RUN, "write a note")
    assert done.code == 0, done
    assert "The note says: forty-two." in done.out, done
    assert note.read_text() == "forty-two\n"
    assert [called_tools(request) for request in bench.turns] == [[], ["write"], ["write", "read"]]
    assert {priority(request) for request in bench.turns} == {"main"}
    assert {priority(request) for request in bench.requests if not request.tools} == {"background"}  # the title
    assert reasoning_texts(bench.turns[-1]) == ["Write it first.", "Now read it."]
    assert "forty-two" in tool_results(bench.turns[-1])


@pytest.mark.steady
def test_a_second_turn_continues_the_first(bench: AgentBench) -> None:
    script = [
        rule({"think": "A number."}, text_step("Remembered."), when="remember 42"),
        rule(text_step("It was 42."), when="what was"),
    ]
    with bench.serve(script):
        bench.run(*RUN, "remember 42")
        done = bench.run(*RUN, "--continue", "what was it?")
    assert "It was 42." in done.out, done
    assert "Remembered." in request_text(bench.turns[-1])
    assert reasoning_texts(bench.turns[-1]) == ["A number."]
    assert bench.turns[0].session == bench.turns[-1].session


def test_a_sub_agent_has_its_own_conversation(bench: AgentBench) -> None:
    script = [
        rule(text_step("The sub-agent has found it."), result="FOUND-IT"),
        rule(text_step("FOUND-IT"), when="look for the needle"),
        rule(
            call_step("task", description="find it", prompt="look for the needle", subagent_type="general"),
            when="send somebody",
        ),
    ]
    with bench.serve(script):
        done = bench.run(*RUN, "send somebody")
    assert "The sub-agent has found it." in done.out, done
    assert len({request.session for request in bench.turns}) == 2


def test_an_image_in_a_tool_result_reaches_the_model_or_is_described(bench: AgentBench) -> None:
    (bench.work / "red.png").write_bytes(red_png())
    script = [
        rule(text_step("It is there."), when="(?i)image"),
        rule(text_step("It is there."), result="(?i)image"),
        rule(call_step("read", filePath=str(bench.work / "red.png")), when="look at"),
    ]
    with bench.serve(script):
        done = bench.run(*RUN, "look at red.png")
    assert "It is there." in done.out, done
    assert called_tools(bench.turns[-1]) == ["read"]
    assert count_images(bench.turns[-1]) <= 1


def test_an_interrupted_reply_frees_its_slot(bench: AgentBench) -> None:
    with bench.serve(
        [rule(text_step("So far "), {"hang": True}, when="wait for ever"), rule(text_step("ok"))]
    ) as server:
        process = bench.start(*RUN, "wait for ever")
        bench.wait_for_request()
        bench.interrupt(process)
        wait_until_idle(server)


def test_it_compacts_when_the_conversation_exceeds_the_window(bench: AgentBench) -> None:
    """The client assumes a larger window, so only the error of the server shows the limit. It continues and
    ends with the exit code of the error."""
    script = [
        rule(text_step("We spoke of yards."), when="(?i)anchored summary|summary of|summar[iy]"),
        rule({"tokens": 4000}, when="tell me a long story"),
        rule(text_step("Short enough.")),
    ]
    with bench.serve(script, n_ctx=16_000):
        target = bench.target(window=200_000)
        bench.run(*RUN, "tell me a long story", target=target)
        bench.run(*RUN, "--continue", "tell me a long story, again", target=target)
        done = bench.run(*RUN, "--continue", "and now", target=target)
    assert "Short enough." in done.out, done
    assert "We spoke of yards." in request_text(bench.turns[-1])


@pytest.mark.parametrize("kind", ["rate_limited", "overloaded", "internal"])
def test_it_retries_after_an_overloaded_error(bench: AgentBench, kind: str) -> None:
    script = [
        rule(text_step("A title"), when="(?i)generate a title"),
        rule({"fail": "not now", "kind": kind}, when="try it", turn=1),
        rule(text_step("Second time lucky."), when="try it"),
    ]
    with bench.serve(script):
        done = bench.run(*RUN, "--title", "t", "try it")
    assert "Second time lucky." in done.out, done
    assert len(bench.turns) == 2


def test_it_recovers_from_an_engine_that_dies_during_a_reply(bench: AgentBench) -> None:
    with bench.serve([rule(text_step("Half an ans"), {"hang": True}, when="try it"), rule(text_step("ok"))]):
        process = bench.start(*RUN, "--title", "t", "try it")
        bench.wait_for_request()
        bench.kill_engine([rule(text_step("Back again."), when="try it")])
        out, err = process.communicate(timeout=DEADLINE)
    assert "Back again." in out, (out, err)


def test_it_ends_with_advice_if_its_own_prompt_exceeds_the_window(bench: AgentBench) -> None:
    """With its own settings it would make one summary after another for ever."""
    with bench.serve([rule(text_step("Never said."))], n_ctx=4_000):
        done = bench.run(*RUN, "--title", "t", "hello")
    assert done.code != 0
    assert "serve the model with a larger n_ctx" in done.err, done
    assert len(bench.turns) == 1
