"""docs/clients.md: curl, `modelyard chat` and the SDKs are run here unchanged, against a server on another port.

tests/docs/test_recipes.py runs the sections of the frameworks.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator

import httpx
import pytest

from tests import cli_process
from tests.docs.pages import DOCS, Call, blocks, blocks_of, calls, sections
from tests.live_server import LiveServer, demo_config, live_server

DOCUMENTED_URL = "http://localhost:8000"


@pytest.fixture(scope="module")
def served() -> Iterator[LiveServer]:
    with live_server(demo_config()) as running:
        yield running


@pytest.mark.parametrize("call", calls("clients.md"), ids=lambda call: call.path)
def test_curl_commands_work(served: LiveServer, call: Call):
    reply = httpx.request(call.method, served.url + call.path, content=call.body)
    assert reply.status_code == 200
    assert "Hello there." in reply.text


@pytest.mark.parametrize("sdk", ["OpenAI SDK", "Anthropic SDK", "Ollama SDK", "Google GenAI SDK"])
def test_sdk_examples_work(served: LiveServer, sdk: str, capsys: pytest.CaptureFixture[str]):
    (code,) = blocks_of(sections("clients.md")[sdk], "python")
    exec(compile(code.replace(DOCUMENTED_URL, served.url), "clients.md", "exec"), {})
    assert capsys.readouterr().out.count("Hello there.") == code.count("print(")


def test_the_chat_command_works(served: LiveServer):
    (line,) = (text for text in blocks("clients.md", "console") if text.startswith("modelyard"))
    argv = shlex.split(line.replace(DOCUMENTED_URL, served.url))[1:]
    done = subprocess.run(
        [*cli_process.MODELYARD, *argv],
        input="Hi\n",
        env=cli_process.environment(),
        capture_output=True,
        text=True,
        timeout=cli_process.DEADLINE,
        check=True,
    )
    assert "Hello there." in done.stdout


def test_every_client_of_the_table_has_a_section_and_the_other_way_round():
    page = (DOCS / "clients.md").read_text()
    rows = dict(re.findall(r"^\| \[([^]]+)\]\(#([\w-]+)\) \|", page, re.MULTILINE))
    assert list(rows) == [name for name in sections("clients.md") if name not in NOT_CLIENTS]
    assert [name.lower().replace(" ", "-") for name in rows] == list(rows.values())


NOT_CLIENTS = ("What all of them share", "Coding agents")
