"""Small chat templates in the structure of each family's own, in our words: what a model was trained to write.

A family is its frame (what stands around a user's turn, what opens a reply) and how a reply is written from there.
"""

from __future__ import annotations

from msgspec import Struct

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
    talks: bool = True  # before it calls
    calls: int = 2  # at a time
    rules: str = ""  # what the template says of calls where tools are on offer

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
        talks=False,
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
