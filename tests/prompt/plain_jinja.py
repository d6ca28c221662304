"""Chat templates in plain Jinja, with the environment that transformers gives them: the reference for our renders."""

from __future__ import annotations

import json
from copy import deepcopy
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

NOW = datetime(2031, 2, 3, 4, 5, 6)
Body = dict[str, Any]  # of a chat completion, as clients send it

# Switches of templates that keep earlier reasoning: the renderer sets them.
_SWITCHES = {
    "preserve_thinking": True,
    "clear_thinking": False,
    "keep_past_thinking": True,
    "truncate_history_thinking": False,
    "drop_thinking": False,
}
_REASONING = ("reasoning_content", "reasoning", "thinking", "thought")  # templates differ in what they call it


class _Generation(Extension):
    tags = {"generation"}  # noqa: RUF012 - Jinja declares it as a plain set

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> Any:
        return caller()


def _raise(message: str) -> None:
    raise TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **layout)


_ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
)
_ENVIRONMENT.filters["tojson"] = _tojson
_ENVIRONMENT.globals |= {
    "raise_exception": _raise,
    "strftime_now": NOW.strftime,
    "date_string": NOW.strftime("%d %b %Y"),
}


def _messages(body: Body, *, typed: bool) -> list[dict[str, Any]]:
    """The messages as templates read them: arguments as objects, content as text or as a list of typed parts."""
    messages: list[dict[str, Any]] = deepcopy(body["messages"])
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        if "reasoning_content" in message:
            message |= dict.fromkeys(_REASONING, message["reasoning_content"])
        if isinstance(content := message["content"], list):
            message["content"] = [part if part["type"] == "text" else {"type": "image"} for part in content]
        elif typed:
            message["content"] = [{"type": "text", "text": content}]
    return messages


class PlainTemplate:
    def __init__(self, source: str) -> None:
        self._template = _ENVIRONMENT.from_string(source)
        self._typed = False
        if not self._shows_text():
            self._typed = True
            self._typed = self._shows_text()

    def _shows_text(self) -> bool:
        return "probe" in (self.render({"messages": [{"role": "user", "content": "probe"}]}) or "")

    def render(self, body: Body) -> str | None:
        """None: the template fails. A reply at the end is continued: the prompt ends with it."""
        reply = body["messages"][-1]["content"] if body["messages"][-1]["role"] == "assistant" else ""
        variables = {"tools": body.get("tools"), "documents": None, "bos_token": "", "eos_token": "", **_SWITCHES}
        variables |= {"add_generation_prompt": not reply, **body.get("chat_template_kwargs", {})}
        try:
            text = self._template.render(messages=_messages(body, typed=self._typed), **variables)
        except Exception:  # whatever a template does wrong
            return None
        head, found, _ = text.rpartition(reply) if reply else (text, "", "")
        return head + found
