"""A turn that a template wrote into a prompt reads back as the same turn: the template is what a model imitates."""

from __future__ import annotations

import json
from typing import Any

import pytest

from modelyard.core.request import Tool
from modelyard.prompt.template import ChatTemplate
from modelyard.prompt.template_source import builtin
from modelyard.scanner.detect import detect
from modelyard.scanner.formats import load
from tests.scanner.reading import Heard, calls_of, pieces, scan, text_of, tokens
from tests.scanner.templates_made import FAMILIES, Family

_PROPERTIES = {
    "path": {"type": "string"},
    "content": {"type": "string"},
    "size": {"type": "integer"},
    "ratio": {"type": "number"},
    "really": {"type": "boolean"},
    "options": {"type": "object"},
    "tags": {"type": "array"},
}
TOOLS = (Tool("write_file", parameters={"type": "object", "properties": _PROPERTIES}), Tool("now"))
CODE = 'def f(x: int) -> str:\n    """Größe «x»."""\n\n    return f"<b>{x}</b>" if x < 3 else \'\\n\'  # 😀'
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("write_file", {"path": "a b/ü.py", "content": CODE, "size": 42, "ratio": 0.5, "really": True}),
    ("write_file", {"options": {"a": [1, None, {"b": "c"}], "d": {}}, "tags": ["x", "<y>", "{z}"]}),
    ("now", {}),
]
USER = {"role": "user", "content": "Please do."}


def turn(reasoning: str, text: str, calls: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    made = [
        {"id": f"abcdefgh{at}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for at, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": text, "reasoning_content": reasoning, "tool_calls": made}


def written(template: str, reply: dict[str, Any]) -> tuple[str, str]:
    """The prompt that asks for the reply, and the reply as the template writes it behind that prompt."""
    compiled = ChatTemplate(template, bos_token="<s>", eos_token="</s>")
    offered = [{"type": "function", "function": {"name": t.name, "parameters": t.parameters}} for t in TOOLS]
    prompt = compiled.render({"messages": [USER], "tools": offered, "add_generation_prompt": True})
    whole = compiled.render({"messages": [USER, reply], "tools": offered, "add_generation_prompt": False})
    assert whole.startswith(prompt)
    return prompt, whole[len(prompt) :]


def read(format: str, prompt: str, raw: str, *, as_tokens: bool) -> list[Heard]:
    form = load(format)
    specials = tokens(form) if as_tokens else []
    return scan(pieces(raw, form, specials), form, tools=TOOLS, prefill=prompt, specials=specials)


def check(blocks: list[Heard], reasoning: str, text: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    assert [(name, json.loads(arguments)) for name, arguments in calls_of(blocks)] == calls
    assert text_of(blocks, "thinking") == reasoning
    assert text_of(blocks).strip() == text
    assert calls_of(blocks, complete=False) == []


@pytest.fixture(params=[False, True], ids=["spellings", "tokens"])
def as_tokens(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.mark.parametrize("one", range(len(CALLS)))
def test_a_call_comes_back(family: Family, one: int, as_tokens: bool) -> None:
    reasoning = "A tool knows." if family.thinks else ""
    prompt, raw = written(family.template, turn(reasoning, "", CALLS[one : one + 1]))
    check(read(family.format, prompt, raw, as_tokens=as_tokens), reasoning, "", CALLS[one : one + 1])


def test_a_whole_turn_comes_back(family: Family, as_tokens: bool) -> None:
    reasoning = "First this,\nthen that." if family.thinks else ""
    text, calls = "Let me look.\n\nNow." if family.talks else "", CALLS[: 3 if family.calls > 1 else 1]
    prompt, raw = written(family.template, turn(reasoning, text, calls))
    check(read(family.format, prompt, raw, as_tokens=as_tokens), reasoning, text, calls)


def test_the_template_tells_its_family(family: Family) -> None:
    assert detect(None, family.template, "").format == family.format


BUILT_IN = {
    "generic": "hermes",
    "qwen3_template": "hermes",
    "llama3_template": "llama3_json",
    "mistral_template": "mistral",
    "gemma4_template": "gemma4",
}


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_built_in_templates_come_back(name: str, as_tokens: bool) -> None:
    thinks, found = name not in ("llama3_template", "mistral_template"), detect(None, builtin(name), "")
    assert found.format == BUILT_IN[name]
    reasoning = "A tool knows." if thinks else ""
    for calls in (CALLS[:1], CALLS[1:2], CALLS):
        prompt, raw = written(builtin(name), turn(reasoning, "Let me look.", calls))
        check(read(found.format, prompt, raw, as_tokens=as_tokens), reasoning, "Let me look.", calls)
