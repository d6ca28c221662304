"""Qwen Code, headless, against a scripted model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.agent_bench import AgentBench, call_step, called_tools, rule, text_step, tool_results

RUN = ("--yolo", "--prompt")


@pytest.fixture
def bench(tmp_path: Path) -> AgentBench:
    return AgentBench("qwen", tmp_path)


@pytest.mark.steady
def test_it_writes_and_reads_a_file_with_its_tools(bench: AgentBench) -> None:
    note = bench.work / "note.txt"
    script = [
        rule(text_step("The note says: forty-two."), result="forty-two"),
        rule(call_step("read_file", file_path=str(note)), result="(?i)created|wrote|success"),
        rule(call_step("write_file", file_path=str(note), content="forty-two\n"), when="write a note"),
        rule(text_step("ok")),
    ]
    with bench.serve(script):
        done = bench.run(*RUN, "write a note")
    assert done.code == 0, done
    assert "The note says: forty-two." in done.out, done
    assert note.read_text() == "forty-two\n"
    turns = [called_tools(request) for request in bench.turns]
    assert ["write_file", "read_file"] in turns
    assert any("forty-two" in tool_results(request) for request in bench.turns)


def test_a_prompt_that_does_not_fit_is_reported(bench: AgentBench) -> None:
    with bench.serve([rule(text_step("ok"))], n_ctx=4096):
        done = bench.run(*RUN, "hello")
    assert "4096" in done.out + done.err, done
