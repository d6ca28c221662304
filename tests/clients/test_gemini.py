"""Gemini CLI, headless, against a scripted model: its tools work, and it recovers from errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.agent_bench import (
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

RUN = ("--skip-trust", "--approval-mode", "yolo", "--prompt")


@pytest.fixture
def bench(tmp_path: Path) -> AgentBench:
    return AgentBench("gemini", tmp_path)


@pytest.mark.steady
def test_it_writes_and_reads_a_file_with_its_tools_and_returns_reasoning(bench: AgentBench) -> None:
    note = bench.work / "note.txt"
    script = [
        rule({"think": "It is there."}, text_step("The note says: forty-two."), result="(?s)forty-two.*forty-two"),
        rule(
            {"think": "Now read it."}, call_step("read_file", file_path=str(note)), result="(?i)created|wrote|success"
        ),
        rule(
            {"think": "Write it first."},
            call_step("write_file", file_path=str(note), content="forty-two\n"),
            when="write a note",
        ),
    ]
    with bench.serve(script):
        done = bench.run(*RUN, "write a note")
    assert done.code == 0, done
    assert "The note says: forty-two." in done.out, done
    assert note.read_text() == "forty-two\n"
    assert [called_tools(request) for request in bench.turns] == [[], ["write_file"], ["write_file", "read_file"]]
    assert reasoning_texts(bench.turns[-1]) == ["Write it first.", "Now read it."]
    assert "forty-two" in tool_results(bench.turns[-1])
    assert {request.model for request in bench.requests} <= {"demo", "local-haiku"}


@pytest.mark.steady
def test_a_second_turn_continues_the_first(bench: AgentBench) -> None:
    script = [
        rule(text_step("Remembered."), when="remember 42"),
        rule(text_step("It was 42."), when="what was"),
    ]
    with bench.serve(script):
        bench.run(*RUN, "remember 42")
        done = bench.run("--resume", "latest", *RUN, "what was it?")
    assert "It was 42." in done.out, done
    assert "Remembered." in request_text(bench.turns[-1])


def test_an_image_in_a_tool_result_reaches_the_model(bench: AgentBench) -> None:
    (bench.work / "red.png").write_bytes(red_png())
    script = [
        rule(call_step("read_file", file_path=str(bench.work / "red.png")), when="look at"),
        rule(text_step("It is there.")),
    ]
    with bench.serve(script):
        done = bench.run(*RUN, "look at the picture")
    assert "It is there." in done.out, done
    assert called_tools(bench.turns[-1]) == ["read_file"]
    assert count_images(bench.turns[-1]) == 1


def test_an_interrupted_reply_frees_its_slot(bench: AgentBench) -> None:
    script = [rule(text_step("So far "), {"hang": True}, when="wait for ever"), rule(text_step("ok"))]
    with bench.serve(script) as server:
        process = bench.start(*RUN, "wait for ever", GEMINI_CLI_NO_RELAUNCH="true")  # else its child gets no signal
        bench.wait_for_request()
        bench.interrupt(process)
        wait_until_idle(server)


def test_a_prompt_that_does_not_fit_is_reported(bench: AgentBench) -> None:
    with bench.serve([rule(text_step("ok"))], n_ctx=4096):
        done = bench.run(*RUN, "hello")
    assert done.code != 0
    assert "exceeds the maximum number of tokens allowed (4096)" in done.out + done.err, done
