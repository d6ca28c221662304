"""Cline's command line, headless, against a scripted model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.agent_bench import AgentBench, call_step, called_tools, rule, text_step, tool_results
from tests.e2e.helpers import wait_until_idle


@pytest.fixture
def bench(tmp_path: Path) -> AgentBench:
    return AgentBench("cline", tmp_path)


@pytest.mark.steady
def test_it_writes_and_reads_a_file_with_its_tools(bench: AgentBench) -> None:
    note = bench.work / "note.txt"
    write = f"printf 'forty-%s' two > {note}; echo written"
    script = [
        rule({"think": "It is there."}, text_step("The note says: forty-two."), result="forty-two"),
        rule(call_step("read_files", files=[{"path": str(note)}]), result="written"),
        rule(call_step("run_commands", commands=[write]), when="write a note"),
        rule(text_step("ok")),
    ]
    with bench.serve(script):
        done = bench.run("write a note")
    assert done.code == 0, done
    assert "The note says: forty-two." in done.out, done
    assert note.read_text() == "forty-two"
    assert called_tools(bench.turns[-1]) == ["run_commands", "read_files"]
    assert "forty-two" in tool_results(bench.turns[-1])
    assert not (bench.folder / "home" / ".cline").exists(), "the user's own folder"


def test_an_interrupted_reply_frees_its_slot(bench: AgentBench) -> None:
    script = [rule(text_step("So far "), {"hang": True}, when="wait for ever"), rule(text_step("ok"))]
    with bench.serve(script) as server:
        process = bench.start("wait for ever")
        bench.wait_for_request()
        bench.interrupt(process)
        wait_until_idle(server)


def test_a_prompt_that_does_not_fit_is_reported(bench: AgentBench) -> None:
    with bench.serve([rule(text_step("ok"))], n_ctx=2048):
        done = bench.run("say hello")
    assert "2048" in done.out + done.err, done
