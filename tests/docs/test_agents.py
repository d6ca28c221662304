"""docs/agents.md: each agent has its section, with the command that starts it and the version that is tested."""

from __future__ import annotations

import re
import shlex
from typing import get_args

import pytest

from modelyard.core.events import MissCause
from modelyard.launch.agents import AGENTS, CLAUDE_GOOD_WINDOW, CLAUDE_MIN_WINDOW
from tests.docs.pages import DOCS, blocks

PAGE = (DOCS / "agents.md").read_text()


@pytest.mark.parametrize("name", AGENTS)
def test_each_agent_has_a_section_a_command_and_its_tested_version(name: str) -> None:
    agent = AGENTS[name]
    section = re.search(rf"^## {agent.title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert section is not None
    assert f"```console\nmodelyard launch {name}\n" in section[1]
    assert re.search(rf"^\| {agent.title} \| {re.escape(agent.version or 'not run')} \|", PAGE, re.MULTILINE)
    assert ("Not run" in section[1]) == (not agent.version or name == "cline"), "its extension was not"


def test_every_command_names_an_existing_agent() -> None:
    lines = [shlex.split(line) for block in blocks("agents.md", "console") for line in block.splitlines()]
    assert {words[2] for words in lines} == set(AGENTS)
    assert all(words[:2] == ["modelyard", "launch"] and (len(words) == 3 or words[3] == "--") for words in lines)


def test_exactly_the_existing_miss_causes_are_explained() -> None:
    explained = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`[\w`, ]+) \|", PAGE, re.MULTILINE)))
    assert sorted(explained) == sorted(get_args(MissCause))


def test_windows_of_claude_code_are_those_of_the_launcher() -> None:
    assert f"{CLAUDE_MIN_WINDOW:,}, better {CLAUDE_GOOD_WINDOW:,}" in PAGE
