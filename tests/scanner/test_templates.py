"""A turn that a chat template writes is parsed to the same turn: models imitate their templates."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import Struct

from modelyard.core.request import Tool
from modelyard.prompt.template import ChatTemplate
from modelyard.prompt.template_source import builtin
from modelyard.scanner.detect import detect
from modelyard.scanner.formats import load
from tests.scanner.helpers import calls_of, marker_tokens, pieces, scan, text_of

# Small chat templates with the structure of each family: a user turn, the opening of a reply, the reply.
_ARGUMENTS = "c.function.arguments | tojson"
_OBJECT = "{'name': c.function.name, 'arguments': c.function.arguments} | tojson"
_THINK = "{{ '<think>\n' ~ m.reasoning_content ~ '\n</think>\n\n' if m.reasoning_content }}{{ m.content }}"
_GO_ON = "{{ m.reasoning_content }}{{ '\n</think>\n\n' ~ m.content }}"


def _each(call: str) -> str:
    return "{% for c in m.tool_calls or [] %}{{ " + call + " }}{% endfor %}"


def _tagged(head: str, pair: str, tail: str) -> str:
    """Parameters one by one: `k` and `v` are the name and the text of the value."""
    one = "{% set v = p if p is string else p | tojson %}{{ " + pair + " }}"
    inner = "{% for k, p in c.function.arguments | items %}" + one + "{% endfor %}"
    return "{% for c in m.tool_calls or [] %}{{ " + head + " }}" + inner + "{{ " + tail + " }}{% endfor %}"


class Family(Struct, frozen=True):
    format: str
    user: tuple[str, str]
    opening: str
    reply: str  # Jinja; `m` is the message
    thinks: bool = True
    writes_text: bool = True  # before its calls
    calls: int = 2  # at a time
    rules: str = ""  # what the template says about calls if tools are offered

    @property
    def template(self) -> str:
        before, after = self.user
        user = "{{ '" + before + "' ~ m.content ~ '" + after + "' }}"
        reply = "{{ '" + self.opening + "' }}" + self.reply
        turns = (
            "{% for m in messages %}{% if m.role == 'user' %}" + user + "{% else %}" + reply + "{% endif %}{% endfor %}"
        )
        rules = "{% if tools %}{{ '" + self.rules + "' }}{% endif %}"
        return rules + turns + "{% if add_generation_prompt %}{{ '" + self.opening + "' }}{% endif %}"


_CHATML = ("<|im_start|>user\n", "<|im_end|>\n")
_FUNCTION = _tagged(
    "'\n<tool_call>\n<function=' ~ c.function.name ~ '>\n'",
    "'<parameter=' ~ k ~ '>\n' ~ v ~ '\n</parameter>\n'",
    "'</function>\n</tool_call>'",
)

FAMILIES = {
    "hermes": Family(
        "hermes",
        _CHATML,
        "<|im_start|>assistant\n",
        _THINK + _each(f"'\n<tool_call>\n' ~ ({_OBJECT}) ~ '\n</tool_call>'") + "<|im_end|>\n",
    ),
    "hermes, reasoning opened by the prompt": Family(
        "hermes",
        _CHATML,
        "<|im_start|>assistant\n<think>\n",
        _GO_ON + _each(f"'\n<tool_call>\n' ~ ({_OBJECT}) ~ '\n</tool_call>'") + "<|im_end|>\n",
    ),
    "qwen3_coder": Family(
        "qwen3_coder", _CHATML, "<|im_start|>assistant\n", "{{ m.content }}" + _FUNCTION + "<|im_end|>\n", thinks=False
    ),
    "qwen3.5": Family("qwen3_coder", _CHATML, "<|im_start|>assistant\n<think>\n", _GO_ON + _FUNCTION + "<|im_end|>\n"),
    "harmony": Family(
        "harmony",
        ("<|start|>user<|message|>", "<|end|>"),
        "<|start|>assistant",
        "{{ '<|channel|>analysis<|message|>' ~ (m.reasoning_content or '…') ~ '<|end|><|start|>assistant' }}"
        "{{ '<|channel|>commentary<|message|>' ~ m.content ~ '<|end|><|start|>assistant' if m.content }}"
        + _each(
            "' to=functions.' ~ c.function.name ~ '<|channel|>commentary <|constrain|>json<|message|>' "
            f"~ ({_ARGUMENTS}) ~ '<|call|>'"
        ),
        calls=1,
    ),
    "mistral": Family(
        "mistral",
        ("[INST]", "[/INST]"),
        "",
        "{{ '[THINK]' ~ m.reasoning_content ~ '[/THINK]' if m.reasoning_content }}{{ m.content }}"
        + _each(f"'[TOOL_CALLS]' ~ c.function.name ~ '[ARGS]' ~ ({_ARGUMENTS})")
        + "</s>",
    ),
    "mistral, older": Family(
        "mistral",
        ("[INST] ", "[/INST]"),
        "",
        "{{ m.content }}{% if m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{{ {'name': c.function.name, "
        "'arguments': c.function.arguments, 'id': c.id} | tojson }}{{ ', ' if not loop.last }}{% endfor %}]{% endif %}"
        "</s>",
        thinks=False,
    ),
    "llama3_json": Family(
        "llama3_json",
        ("<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>"),
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        _each("{'name': c.function.name, 'parameters': c.function.arguments} | tojson") + "<|eot_id|>",
        thinks=False,
        writes_text=False,
        calls=1,
        rules='Call a function with {"name": its name, "parameters": its arguments}.',
    ),
    "deepseek_v31": Family(
        "deepseek_v31",
        ("<｜User｜>", ""),
        "<｜Assistant｜><think>",
        "{{ m.reasoning_content }}</think>{{ m.content }}<｜tool▁calls▁begin｜>"
        + _each(
            f"'<｜tool▁call▁begin｜>' ~ c.function.name ~ '<｜tool▁sep｜>' ~ ({_ARGUMENTS}) ~ '<｜tool▁call▁end｜>'"
        )
        + "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
    ),
    "deepseek_v3": Family(
        "deepseek_v3",
        ("<｜User｜>", ""),
        "<｜Assistant｜>",
        "{{ m.content }}<｜tool▁calls▁begin｜>"
        + _each(
            "'<｜tool▁call▁begin｜>function<｜tool▁sep｜>' ~ c.function.name ~ '\n```json\n' "
            f"~ ({_ARGUMENTS}) ~ '\n```<｜tool▁call▁end｜>\n'"
        )
        + "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
        thinks=False,
    ),
    "glm45": Family(
        "glm45",
        ("<|user|>\n", ""),
        "<|assistant|>",
        "{{ '\n<think>' ~ m.reasoning_content ~ '</think>\n' ~ m.content }}"
        + _tagged(
            "'\n<tool_call>' ~ c.function.name ~ '\n'",
            "'<arg_key>' ~ k ~ '</arg_key>\n<arg_value>' ~ v ~ '</arg_value>\n'",
            "'</tool_call>'",
        ),
    ),
    "glm47": Family(
        "glm47",
        ("<|user|>", ""),
        "<|assistant|><think>",
        "{{ m.reasoning_content ~ '</think>' ~ m.content }}"
        + _tagged(
            "'<tool_call>' ~ c.function.name",
            "'<arg_key>' ~ k ~ '</arg_key><arg_value>' ~ v ~ '</arg_value>'",
            "'</tool_call>'",
        ),
        rules="Call as <tool_call>{function-name}<arg_key>{name}</arg_key><arg_value>{value}</arg_value></tool_call>",
    ),
    "kimi_k2": Family(
        "kimi_k2",
        ("<|im_user|>user<|im_middle|>", "<|im_end|>"),
        "<|im_assistant|>assistant<|im_middle|>",
        "{{ '<think>' ~ m.reasoning_content ~ '</think>' ~ m.content }}<|tool_calls_section_begin|>"
        + _each(
            "'<|tool_call_begin|>functions.' ~ c.function.name ~ ':' ~ loop.index0 ~ '<|tool_call_argument_begin|>' "
            f"~ ({_ARGUMENTS}) ~ '<|tool_call_end|>'"
        )
        + "<|tool_calls_section_end|><|im_end|>",
    ),
    "minimax_m2": Family(
        "minimax_m2",
        ("]~b]user\n", "[e~[\n"),
        "]~b]ai\n<think>\n",
        _GO_ON
        + "\n<minimax:tool_call>\n"
        + _tagged(
            """'<invoke name="' ~ c.function.name ~ '">\n'""",
            """'<parameter name="' ~ k ~ '">' ~ v ~ '</parameter>\n'""",
            "'</invoke>\n'",
        )
        + "</minimax:tool_call>[e~[\n",
    ),
    "seed_oss": Family(
        "seed_oss",
        ("<seed:bos>user\n", "<seed:eos>"),
        "<seed:bos>assistant\n",
        "{{ '<seed:think>' ~ m.reasoning_content ~ '</seed:think>\n' ~ m.content ~ '\n' }}"
        + _tagged(
            "'\n<seed:tool_call>\n<function=' ~ c.function.name ~ '>\n'",
            "'<parameter=' ~ k ~ '>' ~ v ~ '</parameter>\n'",
            "'</function>\n</seed:tool_call>'",
        )
        + "<seed:eos>",
    ),
    "granite": Family(
        "granite",
        ("<|start_of_role|>user<|end_of_role|>", "<|end_of_text|>\n"),
        "<|start_of_role|>assistant<|end_of_role|>",
        "{{ '<think>' ~ m.reasoning_content ~ '</think>' if m.reasoning_content }}{{ m.content }}<|tool_call|>"
        "[{% for c in m.tool_calls %}{{ " + _OBJECT + " }}{{ ', ' if not loop.last }}{% endfor %}]<|end_of_text|>\n",
    ),
    "granite4": Family(
        "granite4",
        ("<|start_of_role|>user<|end_of_role|>", "<|end_of_text|>\n"),
        "<|start_of_role|>assistant<|end_of_role|>",
        "{{ m.content }}" + _each(f"'\n<tool_call>\n' ~ ({_OBJECT}) ~ '\n</tool_call>'") + "<|end_of_text|>\n",
        thinks=False,
    ),
}

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


def render(template: str, reply: dict[str, Any]) -> tuple[str, str]:
    """The prompt, and the reply as the template writes it after the prompt."""
    compiled = ChatTemplate(template, bos_token="<s>", eos_token="</s>")
    offered = [{"type": "function", "function": {"name": t.name, "parameters": t.parameters}} for t in TOOLS]
    common = {"tools": offered, "enable_thinking": True}
    prompt = compiled.render({**common, "messages": [USER], "add_generation_prompt": True})
    whole = compiled.render({**common, "messages": [USER, reply], "add_generation_prompt": False})
    assert whole.startswith(prompt)
    return prompt, whole[len(prompt) :]


def check(format: str, template: str, reasoning: str, text: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    """The turn that the template writes is read back, with markers as text and as tokens."""
    form = load(format)
    prompt, raw = render(template, turn(reasoning, text, calls))
    for specials in ([], marker_tokens(form)):
        blocks = scan(pieces(raw, specials), form, tools=TOOLS, prefill=prompt, specials=specials)
        assert [(name, json.loads(arguments)) for name, arguments in calls_of(blocks)] == calls
        assert text_of(blocks, "thinking") == reasoning
        assert text_of(blocks).strip() == text
        assert calls_of(blocks, complete=False) == []


@pytest.mark.parametrize("name", FAMILIES)
def test_turns_of_a_family_are_detected_and_read_back(name: str) -> None:
    family = FAMILIES[name]
    assert detect(None, family.template, "").format == family.format
    for call in CALLS:
        check(family.format, family.template, "A tool knows." if family.thinks else "", "", [call])
    reasoning = "First this,\nthen that." if family.thinks else ""
    text = "Let me look.\n\nNow." if family.writes_text else ""
    check(family.format, family.template, reasoning, text, CALLS[: 3 if family.calls > 1 else 1])


BUILT_IN = {
    "generic": "hermes",
    "qwen3_template": "hermes",
    "llama3_template": "llama3_json",
    "mistral_template": "mistral",
    "gemma4_template": "gemma4",
}


@pytest.mark.parametrize("name", BUILT_IN)
def test_turns_of_the_built_in_templates_are_detected_and_read_back(name: str) -> None:
    assert detect(None, builtin(name), "").format == BUILT_IN[name]
    reasoning = "" if name in ("llama3_template", "mistral_template") else "A tool knows."
    for calls in (CALLS[:1], CALLS[1:2], CALLS):
        check(BUILT_IN[name], builtin(name), reasoning, "Let me look.", calls)
