"""docs/fake-engine.md: a test repeats the conversation of every example."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest

from modelyard.core.errors import Kind
from modelyard_fake import Options
from modelyard_fake.script import ScriptStep
from tests.docs.pages import DOCS, blocks
from tests.live_server import live_server

_TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("get_weather", "get_time")
]
_LINE = re.compile(r"^# (you|result|thinks|model|calls|fails) +› (.*)$", re.MULTILINE)
PAGE = (DOCS / "fake-engine.md").read_text()
EXAMPLES = blocks("fake-engine.md", "toml")
TITLES = re.findall(r"^## (.*?)$(?=(?:(?!^## ).)*?^```toml)", PAGE, re.MULTILINE | re.DOTALL)


class Conversation:
    """A Chat conversation in the lines of the page."""

    def __init__(self, url: str) -> None:
        self._url, self._messages = url, list[dict[str, Any]]()

    def send(self, kind: str, text: str) -> list[tuple[str, str]]:
        if kind == "result":
            call = self._messages[-1]["tool_calls"][0]["id"]
            self._messages.append({"role": "tool", "tool_call_id": call, "content": text})
        else:
            self._messages.append({"role": "user", "content": text})
        body = {"model": "demo", "messages": self._messages, "tools": _TOOLS, "prompt_cache_key": "one"}
        reply = httpx.post(self._url + "/v1/chat/completions", json=body, timeout=60)
        if reply.status_code != 200:
            self._messages.pop()
            return [("fails", f"{reply.status_code} {reply.json()['error']['message']}")]
        self._messages.append(message := reply.json()["choices"][0]["message"])
        return list(_reply_lines(message))


def _reply_lines(message: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if message.get("reasoning_content"):
        yield "thinks", message["reasoning_content"].strip()
    if message["content"]:
        yield "model", message["content"].strip()
    for call in message.get("tool_calls") or ():
        yield "calls", f"{call['function']['name']} {json.dumps(json.loads(call['function']['arguments']))}"


def test_every_example_has_a_title_and_a_conversation():
    assert len(TITLES) == len(EXAMPLES)
    assert all(_LINE.search(example) for example in EXAMPLES)


@pytest.mark.parametrize("example", EXAMPLES, ids=TITLES)
def test_example_gives_the_documented_conversation(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "modelyard.toml").write_text(example)
    monkeypatch.chdir(tmp_path)
    lines = _LINE.findall(example)
    actual: list[tuple[str, str]] = []
    with live_server({}) as served:
        conversation = Conversation(served.url)
        for kind, text in lines:
            if kind in ("you", "result"):
                actual += [(kind, text), *conversation.send(kind, text)]
    assert actual == lines


def test_every_step_and_option_is_documented():
    named = set(re.findall(r"\b\w+\b", PAGE))
    assert set(ScriptStep.model_fields) <= named
    assert set(Options.model_fields) - {"tokenizer_path"} <= named


def test_every_kind_of_error_is_documented():
    assert set(get_args(Kind)) - {"cancelled"} <= set(re.findall(r"`(\w+)`", PAGE))
