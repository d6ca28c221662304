"""Claude Code, headless, against a scripted model: its tools work, and it recovers from errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

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

ALLOWED = "--dangerously-skip-permissions"


@pytest.fixture
def bench(tmp_path: Path) -> AgentBench:
    return AgentBench("claude", tmp_path)


def result_of(out: str) -> dict[str, Any]:
    """The last line of --output-format json."""
    found: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return found


@pytest.mark.steady
def test_it_writes_and_reads_a_file_with_its_tools_and_echoes_reasoning(bench: AgentBench) -> None:
    note = bench.work / "note.txt"
    script = [
        rule({"think": "It is there."}, text_step("The note says: forty-two."), result="forty-two"),
        rule({"think": "Now read it."}, call_step("Read", file_path=str(note)), result="(?i)created|written"),
        rule(
            {"think": "Write it first."},
            text_step("Writing."),
            call_step("Write", file_path=str(note), content="forty-two\n"),
            when="write a note",
        ),
    ]
    with bench.serve(script):
        done = bench.run("-p", "write a note", ALLOWED, "--output-format", "json")
    assert done.code == 0, done
    assert result_of(done.out)["result"] == "The note says: forty-two.", done
    assert note.read_text() == "forty-two\n"
    first, second, third = bench.turns
    assert (called_tools(first), called_tools(second), called_tools(third)) == ([], ["Write"], ["Write", "Read"])
    assert reasoning_texts(third) == ["Write it first.", "Now read it."]
    assert "forty-two" in tool_results(third)


@pytest.mark.steady
def test_a_second_turn_continues_the_first_from_the_cache(bench: AgentBench) -> None:
    script = [
        rule({"think": "A number."}, text_step("Remembered."), when="remember 42"),
        rule(text_step("It was 42."), when="what was"),
    ]
    with bench.serve(script):
        first = bench.run("-p", "remember 42", ALLOWED, "--output-format", "json")
        session = result_of(first.out)["session_id"]
        second = bench.run("-p", "what was it?", ALLOWED, "--output-format", "json", "--resume", session)
    assert result_of(second.out)["result"] == "It was 42.", second
    assert bench.turns[0].session == bench.turns[1].session
    assert reasoning_texts(bench.turns[1]) == ["A number."]
    assert "Remembered." in request_text(bench.turns[1])
    before, usage = result_of(first.out)["usage"], result_of(second.out)["usage"]
    known = before["input_tokens"] + before["cache_read_input_tokens"] + before["output_tokens"]
    assert usage["cache_read_input_tokens"] > 0.9 * known


def test_a_sub_agent_has_its_own_conversation(bench: AgentBench) -> None:
    script = [
        rule(text_step("The sub-agent has found it."), when="FOUND-IT"),
        rule(text_step("FOUND-IT"), when="look for the needle"),
        rule(text_step("Waiting."), result="."),
        rule(
            call_step("Agent", description="find it", prompt="look for the needle", subagent_type="general-purpose"),
            when="send somebody",
        ),
    ]
    with bench.serve(script):
        done = bench.run("-p", "send somebody", ALLOWED)
    assert done.code == 0, done
    assert "The sub-agent has found it." in done.out, done
    sessions = {request.session for request in bench.turns}
    assert len(sessions) == 2, sessions


@pytest.mark.steady
def test_an_image_in_a_tool_result_reaches_the_model(bench: AgentBench) -> None:
    picture = bench.work / "red.png"
    picture.write_bytes(red_png())
    script = [
        rule(text_step("It is red."), result=r"<image>"),
        rule(call_step("Read", file_path=str(picture)), when="look at"),
    ]
    with bench.serve(script):
        done = bench.run("-p", "look at red.png", ALLOWED)
    assert "It is red." in done.out, done
    assert count_images(bench.turns[-1]) == 1


@pytest.mark.steady
def test_a_text_only_model_gets_a_placeholder_for_an_image(bench: AgentBench) -> None:
    picture = bench.work / "red.png"
    picture.write_bytes(red_png())
    script = [
        rule(text_step("A picture, I am told."), result=r"\[image"),
        rule(call_step("Read", file_path=str(picture)), when="look at"),
    ]
    with bench.serve(script, modalities=["text"]):
        done = bench.run("-p", "look at red.png", ALLOWED)
    assert "A picture, I am told." in done.out, done


@pytest.mark.steady
def test_a_deferred_tool_is_found_by_search_and_then_called(bench: AgentBench) -> None:
    script = [
        rule(text_step("Nothing is planned."), result="(?i)no scheduled"),
        rule(call_step("CronList"), result="From here on this tool"),
        rule(call_step("ToolSearch", query="select:CronList"), when="what is planned", turn=1),
    ]
    with bench.serve(script):
        done = bench.run("-p", "what is planned", ALLOWED)
    assert "Nothing is planned." in done.out, done
    assert called_tools(bench.turns[-1]) == ["ToolSearch", "CronList"]


def test_an_interrupted_reply_frees_its_slot(bench: AgentBench) -> None:
    with bench.serve([rule(text_step("So far "), {"hang": True})]) as served:
        process = bench.start("-p", "wait for ever", ALLOWED)
        bench.wait_for_request()
        bench.interrupt(process)
        wait_until_idle(served)


def test_it_compacts_when_the_conversation_exceeds_the_window(bench: AgentBench) -> None:
    """The client assumes a larger window, so only the error of the server shows the limit."""
    script = [
        rule(
            text_step("<summary>We spoke of yards.</summary>"), when="(?i)summary of the conversation|detailed summary"
        ),
        rule({"tokens": 6000}, when="tell me a long story"),
        rule(text_step("Short enough."), when="and now"),
    ]
    with bench.serve(script, n_ctx=24_000):
        target = bench.target(window=200_000)
        first = bench.run("-p", "tell me a long story", ALLOWED, "--output-format", "json", target=target)
        session = result_of(first.out)["session_id"]
        for _ in range(2):
            done = bench.run("-p", "tell me a long story, again", ALLOWED, "--resume", session, target=target)
            assert done.code == 0, done
        done = bench.run("-p", "and now", ALLOWED, "--resume", session, target=target)
    assert "Short enough." in done.out, done
    assert "We spoke of yards." in request_text(bench.turns[-1])


def test_it_finishes_its_task_after_a_compaction_of_its_own(bench: AgentBench) -> None:
    """The usage that the server reports makes it compact; nothing has failed before."""
    for name in ("first", "second"):
        (bench.work / f"{name}.txt").write_text(400 * (60 * "x" + "\n"))
    task = "Both files are read. The word yard is still to be written to done.txt."

    def read(name: str) -> dict[str, Any]:
        return call_step("Bash", command=f"cat {name}.txt; echo end of the {name}", description=f"Read the {name}")

    script = [
        rule(text_step(f"<summary>{task}</summary>"), when="(?i)summary of the conversation|detailed summary"),
        rule(text_step("It is written."), result="written now"),
        rule(read("second"), result="end of the first"),
        rule(read("first"), when="read both"),
        rule(call_step("Bash", command="echo yard > done.txt; echo written now", description="Write")),
    ]
    with bench.serve(script, n_ctx=100_000):
        done = bench.run(
            "-p", "read both, then write the word yard to done.txt", ALLOWED, target=bench.target(window=50_000)
        )
    assert (done.code, done.out.strip()) == (0, "It is written."), done
    assert (bench.work / "done.txt").read_text() == "yard\n"
    assert task in request_text(bench.turns[-1])
    assert "end of the first" not in tool_results(bench.turns[-1])


@pytest.mark.parametrize(
    ("kind", "requests"), [("rate_limited", 2), ("overloaded", 2), ("internal", 2), ("timeout", 2)]
)
def test_it_retries_after_an_overloaded_error(bench: AgentBench, kind: str, requests: int) -> None:
    script = [
        rule({"fail": "not now", "kind": kind}, when="try it", turn=1),
        rule(text_step("Second time lucky."), when="try it"),
    ]
    with bench.serve(script):
        done = bench.run("-p", "try it", ALLOWED)
    assert "Second time lucky." in done.out, done
    assert len(bench.turns) == requests


def test_it_recovers_from_an_engine_that_dies_during_a_reply(bench: AgentBench) -> None:
    with bench.serve([rule(text_step("Half an ans"), {"hang": True}, when="try it")]):
        process = bench.start("-p", "try it", ALLOWED)
        bench.wait_for_request()
        bench.kill_engine([rule(text_step("Back again."), when="try it")])
        out, err = process.communicate(timeout=DEADLINE)
    assert "Back again." in out, (out, err)


def test_it_ends_with_an_error_if_its_own_prompt_exceeds_the_window(bench: AgentBench) -> None:
    """The server's numbers reach the user, and it does not try in vain."""
    with bench.serve([rule(text_step("Never said."))], n_ctx=8_000):
        done = bench.run("-p", "hello", ALLOWED, target=bench.target(window=200_000))
    assert done.code != 0
    assert "Prompt is too long" in done.out, done
    assert "8000" in done.out, done
    assert len(bench.turns) == 1
