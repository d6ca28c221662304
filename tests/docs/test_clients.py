"""docs/clients.md: everything marked "run" is run here unchanged, against a server on another port."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator

import httpx
import pytest

from tests import cli_process
from tests.docs.pages import DOCS, Call, blocks, calls
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


@pytest.mark.parametrize("code", blocks("clients.md", "python"), ids=["openai", "anthropic"])
def test_sdk_examples_work(served: LiveServer, code: str, capsys: pytest.CaptureFixture[str]):
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


def test_the_table_matches_the_headings():
    page = (DOCS / "clients.md").read_text()
    table = re.findall(r"^\| `?([\w ]+?)`?(?: for Python [\d.]+)? \| .* \| (run|not run yet) \|$", page, re.MULTILINE)
    headings = re.findall(r"^## ([\w ]+) \((run|not run yet)\)$", page, re.MULTILINE)
    assert table
    assert sorted(table) == sorted(headings)
