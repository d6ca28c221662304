"""The chat templates of real models: our renders equal those of plain Jinja, and where a template would fail or lose a
part of the conversation, ours do not.

`differences.toml` lists the renders that differ although plain Jinja loses nothing, and those that are incomplete.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from modelyard.core.errors import ModelyardError
from modelyard.core.output_format import OutputFormat
from modelyard.core.request import Tool
from modelyard.prompt.render import Renderer
from modelyard.prompt.template import ChatTemplate, hermes_calls
from modelyard.protocols import openai_chat
from modelyard.scanner.detect import detect, with_hermes_calls
from modelyard.scanner.formats import load
from modelyard.tokenizer.huggingface import HuggingFaceTokenizer
from modelyard.tokenizer.shield import unshield
from tests.prompt.conversations import CONVERSATIONS, TOOLS, Body
from tests.prompt.plain_jinja import NOW, PlainTemplate
from tests.public_templates import SOURCES, public_templates
from tests.scanner.helpers import calls_of, scan
from tests.tokenizer import sample_tokenizers

_WORD = re.compile(r"WORD-\w+(?: and)?")
_PART = re.compile(r"""['"]type['"]: ?['"](?:text|image)['"]""")


def _listed(kind: str) -> set[tuple[str, str]]:
    found = tomllib.loads((Path(__file__).parent / "differences.toml").read_text("utf-8"))[kind]
    return {
        (template, conversation)
        for entry in found
        for template, conversations in entry["renders"].items()
        for conversation in conversations or CONVERSATIONS
    }


def loss(text: str | None, body: Body, without_image: str | None) -> str:
    """What the prompt lacks of the conversation."""
    if text is None:
        return "it fails"
    if _PART.search(text):
        return "it shows a list of parts"
    words = _WORD.findall(json.dumps(body["messages"]))
    if lost := [word for word in words if word not in text]:
        return f"without {lost}"
    # A leading system prompt may be anywhere, a text after its calls, and a call after the result of another.
    places = [text.rindex(word) for word in words if word not in (words[0], "WORD-LOOK", "WORD-ZONE")]
    if places != sorted(places):
        return "in another order"
    offered = [text for tool in body.get("tools", ()) for text in _of_tool(tool["function"])]
    if lost := [each for each in offered if each not in text]:
        return f"without {lost} of the tools"
    return "without the image" if text == without_image else ""


def _of_tool(function: dict[str, Any]) -> tuple[str, str]:
    return function["name"], function["description"]


def _without_image(body: Body) -> Body:
    messages = [message | {"content": message["content"][1]["text"]} for message in body["messages"]]
    return body | {"messages": messages}


class Compared(Struct):
    template: str
    conversation: str
    ours: str | None
    plain: str | None
    lost: str
    plain_lost: str


def _format(source: str) -> OutputFormat:
    return load(detect(None, source, "").format)


@cache
def _vocab() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer.from_text(sample_tokenizers.byte_level())


def _renderer(source: str) -> Renderer:
    writer = _format(source).writer
    template = ChatTemplate(source, now=lambda: NOW)
    return Renderer(template, _vocab(), write_calls=hermes_calls if writer is None else writer.write)


def _render(renderer: Renderer, body: Body) -> str | None:
    try:
        return unshield(renderer.text(openai_chat.read_request(json.dumps({"model": "m", **body}).encode(), {})))
    except ModelyardError:
        return None


@cache
def compared(source: str) -> list[Compared]:
    return [
        one for name, text in public_templates().items() if name.startswith(f"{source}/") for one in _of(name, text)
    ]


def _of(name: str, source: str) -> Iterator[Compared]:
    renderer, plain = _renderer(source), PlainTemplate(source)
    for conversation, body in CONVERSATIONS.items():
        ours, theirs = _render(renderer, body), plain.render(body)
        bare = _without_image(body) if conversation == "an image" else None
        lost = loss(ours, body, _render(renderer, bare) if bare else None)
        plain_lost = loss(theirs, body, plain.render(bare) if bare else None)
        yield Compared(name, conversation, ours, theirs, lost, plain_lost)


every_source = pytest.mark.parametrize("source", SOURCES)


@every_source
def test_renders_equal_those_of_plain_jinja_unless_it_loses_something(source: str) -> None:
    differing = {(c.template, c.conversation) for c in compared(source) if not c.plain_lost and c.ours != c.plain}
    assert differing == {one for one in _listed("different") if one[0].startswith(f"{source}/")}


@every_source
def test_no_render_loses_a_part_of_the_conversation(source: str) -> None:
    lost = {(c.template, c.conversation): c.lost for c in compared(source) if c.lost}
    listed = {one for one in _listed("incomplete") if one[0].startswith(f"{source}/")}
    assert {one: reason for one, reason in lost.items() if one not in listed} == {}
    assert listed <= lost.keys()


@every_source
def test_calls_in_a_prompt_are_what_the_model_would_write(source: str) -> None:
    """Whether the template writes them or we do: the format that was detected reads them."""
    tools = [Tool(each["function"]["name"], parameters=each["function"]["parameters"]) for each in TOOLS]
    expected = [("find_city", {"place": "WORD-ARGUMENT", "limit": 3})]
    unread = set()
    for one in compared(source):
        if one.conversation != "a result":
            continue
        form = _format(public_templates()[one.template])
        reply = (one.ours or "").rpartition("WORD-ONE")[2].rpartition("WORD-RESULT")[0]
        found = calls_of(scan([reply], form if form.writer else with_hermes_calls(form), tools=tools))
        if [(name, json.loads(arguments)) for name, arguments in found] != expected:
            unread.add((one.template, one.conversation))
    assert unread == {one for one in _listed("unreadable") if one[0].startswith(f"{source}/")}


def test_the_count_of_renders() -> None:
    assert len(public_templates()) * len(CONVERSATIONS) >= 8_300
