"""Codex, headless, against a scripted model: its tools work, and it recovers from errors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from modelyard.core.request import ToolCall
from modelyard.scanner.custom_grammar import input_pattern
from tests.clients.agent_bench import (
    DEADLINE,
    AgentBench,
    call_step,
    called_tools,
    count_images,
    parts_of_kind,
    reasoning_texts,
    red_png,
    request_text,
    rule,
    text_step,
    tool_results,
)
from tests.clients.codex_conversation import Conversation
from tests.e2e.helpers import wait_until_idle

EXEC = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")


@pytest.fixture
def bench(tmp_path: Path) -> AgentBench:
    return AgentBench("codex", tmp_path)


@pytest.mark.steady
def test_it_writes_and_reads_a_file_with_its_tools_and_echoes_reasoning(bench: AgentBench) -> None:
    script = [
        rule({"think": "It is there."}, text_step("The note says: forty-two."), result="forty-two"),
        rule({"think": "Now read it."}, call_step("exec_command", cmd="cat note.txt"), result="exited with code 0"),
        rule(
            {"think": "Write it first."},
            text_step("Writing."),
            call_step("exec_command", cmd="echo forty-$((40+2)) | sed s/42/two/ > note.txt"),
            when="write a note",
        ),
    ]
    with bench.serve(script):
        done = bench.run(*EXEC, "write a note")
    assert done.code == 0, done
    assert done.out.strip() == "The note says: forty-two.", done
    assert (bench.work / "note.txt").read_text() == "forty-two\n"
    assert [called_tools(request) for request in bench.turns] == [
        [],
        ["exec_command"],
        ["exec_command", "exec_command"],
    ]
    assert reasoning_texts(bench.turns[-1]) == ["Write it first.", "Now read it."]
    assert "forty-two" in tool_results(bench.turns[-1])


@pytest.mark.steady
def test_a_second_turn_continues_the_first(bench: AgentBench) -> None:
    script = [
        rule({"think": "A number."}, text_step("Remembered."), when="remember 42"),
        rule(text_step("It was 42."), when="what was"),
    ]
    with bench.serve(script) as server:
        bench.run(*EXEC, "remember 42")
        engine = server.app.scheduler.engine("demo")
        read = engine.stats().evaluated_tokens  # type: ignore[union-attr]
        done = bench.run(*EXEC, "resume", "--last", "what was it?")
        new = engine.stats().evaluated_tokens - read  # type: ignore[union-attr]
    assert done.out.strip() == "It was 42.", done
    assert "Remembered." in request_text(bench.turns[1])
    assert reasoning_texts(bench.turns[1]) == ["A number."]
    assert bench.turns[0].session == bench.turns[1].session
    assert new < 0.1 * read


def test_a_sub_agent_is_called_in_its_namespace_with_its_own_conversation(bench: AgentBench) -> None:
    """The main agent waits for a file that the sub-agent makes: to wait for it by name, a script cannot know its id."""
    script = [
        rule(text_step("FOUND-IT"), when="look for the needle", result="code 0"),
        rule(call_step("exec_command", cmd="touch needle"), when="look for the needle"),
        rule(text_step("The needle is there."), result="needle is here"),
        rule(
            call_step("exec_command", cmd="until [ -e needle ]; do sleep 0.1; done; echo needle is here"),
            when="send somebody",
            result=".",
        ),
        rule(call_step("spawn_agent", message="look for the needle"), when="send somebody"),
        rule(text_step("The needle is there.")),
    ]
    with bench.serve(script):
        done = bench.run(*EXEC, "send somebody")
    assert done.out.strip() == "The needle is there.", done
    made = [part for request in bench.turns for part in parts_of_kind(request, ToolCall) if part.name == "spawn_agent"]
    assert {call.namespace for call in made} == {"multi_agent_v1"}
    assert "unsupported call" not in "".join(map(tool_results, bench.turns))
    assert len({request.session for request in bench.turns}) == 2


@pytest.mark.steady
def test_a_custom_tool_is_called_with_free_text(bench: AgentBench) -> None:
    patch = "*** Begin Patch\n*** Add File: note.txt\n+forty-two\n*** End Patch\n"
    script = [
        rule(text_step("Patched."), result="Success"),
        rule(call_step("apply_patch", input=patch), when="patch it"),
    ]
    with bench.serve(script):
        done = bench.run(*EXEC, "patch it", target=bench.target(model="gpt-5.5"))
    assert done.out.strip() == "Patched.", done
    assert (bench.work / "note.txt").read_text() == "forty-two\n"
    (call,) = parts_of_kind(bench.turns[-1], ToolCall)
    assert (call.custom, call.arguments) == (True, patch)
    (offered,) = [tool for tool in bench.turns[0].tools if tool.name == "apply_patch"]
    held = input_pattern(offered)
    assert held.pattern, held.error
    assert re.fullmatch(held.pattern, patch)
    assert not re.fullmatch(held.pattern, patch.replace("+forty", "forty"))


@pytest.mark.steady
def test_an_image_in_a_tool_result_reaches_the_model(bench: AgentBench) -> None:
    (bench.work / "red.png").write_bytes(red_png())
    script = [
        rule(text_step("It is red."), result=r"<image>"),
        rule(call_step("view_image", path=str(bench.work / "red.png")), when="look at"),
    ]
    with bench.serve(script):
        done = bench.run(*EXEC, "look at red.png")
    assert done.out.strip() == "It is red.", done
    assert count_images(bench.turns[-1]) == 1


def test_an_interrupted_reply_frees_its_slot(bench: AgentBench) -> None:
    with bench.serve([rule(text_step("So far "), {"hang": True})]) as server:
        process = bench.start(*EXEC, "wait for ever")
        bench.wait_for_request()
        bench.interrupt(process)
        wait_until_idle(server)


def test_it_compacts_before_the_conversation_exceeds_the_window(bench: AgentBench) -> None:
    """From the window set by the launcher and the reported usage."""
    script = [
        rule(text_step("We spoke of yards."), when="(?i)handoff summary|compaction"),
        rule({"tokens": 3000}, when="tell me a long story"),
        rule(text_step("Short enough."), when="and now"),
    ]
    with bench.serve(script, n_ctx=20_000):
        bench.run(*EXEC, "tell me a long story")
        bench.run(*EXEC, "resume", "--last", "tell me a long story, again")
        done = bench.run(*EXEC, "resume", "--last", "and now")
    assert done.out.strip() == "Short enough.", done
    assert "We spoke of yards." in request_text(bench.turns[-1])
    assert len(bench.requests) == len(bench.turns) + 1


def test_long_tool_results_do_not_exceed_the_window(bench: AgentBench) -> None:
    """It counts four bytes a token. These have two, and the second would go over the window unless it is cut."""
    line = 60 * "x" + "\n"
    (bench.work / "first.txt").write_text(90 * line)
    (bench.work / "second.txt").write_text(200 * line)
    script = [
        rule(text_step("We spoke of yards."), when="(?i)handoff summary|compaction"),
        rule(text_step("Both are read."), when="We spoke of yards"),
        rule(call_step("exec_command", cmd="cat second.txt; echo; echo end of the second"), result="end of the first"),
        rule(text_step("Both are read."), result="end of the second"),
        rule(call_step("exec_command", cmd="cat first.txt; echo; echo end of the first"), when="read both"),
    ]
    with bench.serve(script, n_ctx=20_000):
        done = bench.run(*EXEC, "read both")
    assert (done.code, done.out.strip()) == (0, "Both are read."), done
    assert len(tool_results(bench.turns[2])) < 11_000, "nothing was cut"


def test_it_finishes_its_task_after_a_compaction_of_its_own(bench: AgentBench) -> None:
    (bench.work / "first.txt").write_text(90 * (60 * "x" + "\n"))
    (bench.work / "second.txt").write_text(200 * (60 * "x" + "\n"))
    task = "Both files are read. The word yard is still to be written to done.txt."
    script = [
        rule(text_step(task), when="(?i)handoff summary|compaction"),
        rule(text_step("It is written."), result="written now"),
        rule(call_step("exec_command", cmd="echo yard > done.txt; echo written now"), when="still to be written"),
        rule(call_step("exec_command", cmd="cat second.txt; echo; echo end of the second"), result="end of the first"),
        rule(call_step("exec_command", cmd="cat first.txt; echo; echo end of the first"), when="read both"),
    ]
    with bench.serve(script, n_ctx=20_000):
        done = bench.run(*EXEC, "read both, then write the word yard to done.txt")
    assert (done.code, done.out.strip()) == (0, "It is written."), done
    assert (bench.work / "done.txt").read_text() == "yard\n"
    assert task in request_text(bench.turns[-1])


def test_after_an_overflow_it_stops_with_the_reason_and_compacts_on_command(bench: AgentBench) -> None:
    """The client assumes a larger window, so only the error of the server shows the limit."""
    script = [
        rule(text_step("We spoke of yards."), when="(?i)handoff summary|compaction"),
        rule({"tokens": 3000}, when="tell me a long story"),
        rule(text_step("Short enough."), when="and now"),
    ]
    with bench.serve(script, n_ctx=16_000), Conversation(bench, bench.target(window=200_000)) as talk:
        assert talk.ask("tell me a long story") is None
        fault = talk.ask("and now, " + "what about yards? " * 300)
        again = talk.ask("and now")
        count = len(bench.requests)
        assert talk.compact() is None
        assert talk.ask("and now") is None
    assert fault is not None
    assert fault["codexErrorInfo"] == "contextWindowExceeded"
    assert again == fault, "it has learned to compact by itself: docs/agents.md says that it does not"
    summary, last = bench.requests[count:]
    assert (summary.tools, "We spoke of yards." in request_text(last)) == ((), True)


@pytest.mark.steady
def test_an_overflow_error_is_recognised(bench: AgentBench) -> None:
    with bench.serve([rule(text_step("Never said."))], n_ctx=8_000):
        done = bench.run(*EXEC, "hello", target=bench.target(window=200_000))
    assert done.code != 0
    assert "ran out of room" in done.err, done
    assert len(bench.requests) == 1, "it tried again in vain"


@pytest.mark.parametrize("kind", ["rate_limited", "overloaded", "internal", "timeout"])
def test_it_retries_after_an_overloaded_error(bench: AgentBench, kind: str) -> None:
    script = [
        rule({"fail": "not now", "kind": kind}, when="try it", turn=1),
        rule(text_step("Second time lucky."), when="try it"),
    ]
    with bench.serve(script):
        done = bench.run(*EXEC, "try it")
    assert done.out.strip() == "Second time lucky.", done
    assert len(bench.turns) == 2


def test_it_recovers_from_an_engine_that_dies_during_a_reply(bench: AgentBench) -> None:
    with bench.serve([rule(text_step("Half an ans"), {"hang": True}, when="try it")]):
        process = bench.start(*EXEC, "try it")
        bench.wait_for_request()
        bench.kill_engine([rule(text_step("Back again."), when="try it")])
        out, err = process.communicate(timeout=DEADLINE)
    assert out.strip() == "Back again.", (out, err)
