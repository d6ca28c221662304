"""Every command of README.md, recipes.md, cli.md, models.md and agents.md is one that the program takes, with these
options and arguments; the requests of the README are answered."""

from __future__ import annotations

import re
import shlex

import httpx
import pytest
import typer

from modelyard.cli.app import app
from tests.docs.pages import DOCS, blocks_of, calls
from tests.live_server import demo_config, live_server

PAGES = ("../README.md", "recipes.md", "cli.md", "models.md", "agents.md")
_PROMPT = re.compile(r"^(\$ )?((?:[A-Z_]+=\S+ )*|echo .* \| )modelyard ")


def commands(page: str) -> list[list[str]]:
    """The words of each command after `modelyard`."""
    text = "".join(blocks_of((DOCS / page).read_text(), "sh", "bash", "console")).replace("\\\n", " ")
    lines = [line for line in text.splitlines() if _PROMPT.match(line)]
    return [shlex.split(_PROMPT.sub("", line), comments=True) for line in lines]


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_taken_with_its_options_and_arguments(page: str) -> None:
    found = commands(page)
    assert found
    for words in found:
        command = typer.main.get_command(app)
        while words and (subcommand := getattr(command, "commands", {}).get(words[0])):
            command, words = subcommand, words[1:]
        assert not getattr(command, "commands", None) or command.name == "models", words
        command.make_context(command.name, words)  # raises what the program would say


def test_the_requests_of_the_readme_are_answered() -> None:
    config = demo_config()
    config["models"] = {"smollm2": config["models"]["demo"]}
    del config["caches"], config["routes"]
    requests = calls("../README.md", "curl ")
    assert len(requests) == 3
    with live_server(config) as running:
        for request in requests:
            url = running.url + request.path
            reply = httpx.request(request.method, url, content=request.body, headers=request.headers)
            assert reply.status_code == 200, reply.text
            assert "Hello there." in reply.text
