"""docs/bench.md: every option is told of, every command is one, and the table of workloads is true."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from modelyard.cli.app import app
from modelyard_bench.workload import WORKLOADS, Workload

PAGE = (Path(__file__).parent.parent.parent / "docs" / "bench.md").read_text(encoding="utf-8")
COMMAND = typer.main.get_command(app).commands["bench"]  # type: ignore[attr-defined]
COMMANDS = re.findall(r"^(?:modelyard bench.*?)(?=\s+#|$)", PAGE.replace("\\\n", " "), re.MULTILINE)


def test_every_option_is_told_of() -> None:
    options = [max(parameter.opts, key=len) for parameter in COMMAND.params]
    assert [option for option in options if option not in PAGE and option != "--help"] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_can_be_given(command: str) -> None:
    COMMAND.make_context("bench", shlex.split(command)[2:])


def test_there_are_commands() -> None:
    assert len(COMMANDS) >= 7


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=lambda workload: workload.name)
def test_the_table_of_workloads_is_true(workload: Workload) -> None:
    (row,) = (line for line in PAGE.splitlines() if line.startswith(f"| `{workload.name}` |"))
    prompt = f"{workload.prompt_tokens}" + (f", then {workload.turn_tokens} more a turn" if workload.turns > 1 else "")
    cells = [cell.strip().removesuffix(" tokens") for cell in row.strip("|").split("|")][1:]
    assert cells == [prompt, str(workload.output_tokens), str(workload.turns), str(workload.streams)]
