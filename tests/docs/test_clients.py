"""docs/clients.md: what it calls «run» is run here, to the letter, against a server on another port."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator

import httpx
import pytest

from tests import commands
from tests.docs.pages import DOCS, Call, blocks, calls
from tests.serving import Served, demo, serving

HERE = "http://localhost:8000"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(demo()) as running:
        yield running


@pytest.mark.parametrize("call", calls("clients.md"), ids=lambda call: call.path)
def test_curl(served: Served, call: Call):
    reply = httpx.request(call.method, served.url + call.path, content=call.body)
    assert reply.status_code == 200
    assert "Hello there." in reply.text


@pytest.mark.parametrize("code", blocks("clients.md", "python"), ids=["openai", "anthropic"])
def test_the_sdks(served: Served, code: str, capsys: pytest.CaptureFixture[str]):
    exec(compile(code.replace(HERE, served.url), "clients.md", "exec"), {})
    assert capsys.readouterr().out.count("Hello there.") == code.count("print(")


def test_modelyard_chat(served: Served):
    (line,) = (text for text in blocks("clients.md", "console") if text.startswith("modelyard"))
    argv = shlex.split(line.replace(HERE, served.url))[1:]
    ended = subprocess.run(
        [*commands.MODELYARD, *argv],
        input="Hi\n",
        env=commands.environment(),
        capture_output=True,
        text=True,
        timeout=commands.DEADLINE,
        check=True,
    )
    assert "Hello there." in ended.stdout


def test_the_table_and_the_headings_say_the_same():
    page = (DOCS / "clients.md").read_text()
    table = re.findall(r"^\| `?([\w ]+?)`?(?: for Python [\d.]+)? \| .* \| (run|not run yet) \|$", page, re.MULTILINE)
    headings = re.findall(r"^## ([\w ]+) \((run|not run yet)\)$", page, re.MULTILINE)
    assert table
    assert sorted(table) == sorted(headings)
