"""How each family writes a turn: `WRITERS[format](reasoning, text, calls)` returns the raw output."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from modelyard.core.request import Tool

Arguments = dict[str, Any]
Calls = Sequence[tuple[Tool, Arguments]]
Writer = Callable[[str, str, Calls], str]


class Unwritable(Exception):
    """These values cannot be written in this format."""


# --- shared by several families ---------------------------------------------------------------------------------------


def _raw(value: Any) -> str:
    """A value between tags: text unchanged, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def _think(reasoning: str) -> str:
    return f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""


def _think_inline(reasoning: str) -> str:
    return f"<think>{reasoning}</think>" if reasoning else ""


def _objects(calls: Calls, name: str = "name", arguments: str = "arguments") -> list[str]:
    return [json.dumps({name: tool.name, arguments: given}, ensure_ascii=False) for tool, given in calls]


def _list(calls: Calls, name: str = "name", arguments: str = "arguments") -> str:
    return f"[{', '.join(_objects(calls, name, arguments))}]"


def _tagged_objects(calls: Calls) -> list[str]:
    return [f"<tool_call>\n{one}\n</tool_call>" for one in _objects(calls)]


def _functions(calls: Calls, outer: str = "tool_call", newline: str = "\n") -> list[str]:
    """`<function=name>` with one `<parameter=name>` per value."""
    return [
        f"<{outer}>\n<function={tool.name}>\n"
        + "".join(f"<parameter={k}>{newline}{_raw(v)}{newline}</parameter>\n" for k, v in given.items())
        + f"</function>\n</{outer}>"
        for tool, given in calls
    ]


def _invokes(calls: Calls, prefix: str = "") -> list[str]:
    """`<invoke name=…>` with one `<parameter name=…>` per value."""
    return [
        f'<{prefix}invoke name="{tool.name}">\n'
        + "".join(f'<{prefix}parameter name="{k}">{_raw(v)}</{prefix}parameter>\n' for k, v in given.items())
        + f"</{prefix}invoke>"
        for tool, given in calls
    ]


def _key_values(calls: Calls, newline: str = "", prefix: str = "") -> list[str]:
    """A name, then keys and values between tags."""
    pair = f"{newline}<{prefix}arg_key>{{}}</{prefix}arg_key>{newline}<{prefix}arg_value>{{}}</{prefix}arg_value>"
    return [tool.name + "".join(pair.format(k, _raw(v)) for k, v in given.items()) + newline for tool, given in calls]


def _python_calls(calls: Calls, *, json_objects: bool = False) -> list[str]:
    def value(v: Any) -> str:
        return json.dumps(v) if json_objects and isinstance(v, dict) else repr(v)

    return [f"{tool.name}({', '.join(f'{k}={value(v)}' for k, v in given.items())})" for tool, given in calls]


# --- one family after another -----------------------------------------------------------------------------------------


# A tool with such a name looks like the usual shape of a call.
_USUAL_KEYS = {"name", "tool_name", "function", "arguments", "parameters", "args", "id", "type", "tool_call_id"}


def _apertus(reasoning: str, text: str, calls: Calls) -> str:
    if _USUAL_KEYS & {tool.name for tool, _ in calls}:
        raise Unwritable
    thought = f"<|inner_prefix|>{reasoning}<|inner_suffix|>" if reasoning else ""
    given = ", ".join(json.dumps({tool.name: arguments}, ensure_ascii=False) for tool, arguments in calls)
    return f"{thought}{text}" + (f"<|tools_prefix|>[{given}]<|tools_suffix|>" if calls else "") + "<|assistant_end|>"


def _apriel(reasoning: str, text: str, calls: Calls) -> str:
    thought = f"Here are my reasoning steps:\n{reasoning}\n" if reasoning else ""
    given = f"\n<tool_calls>{_list(calls)}</tool_calls>" if calls else ""
    return f"{thought}[BEGIN FINAL RESPONSE]\n{text}{given}\n[END FINAL RESPONSE]\n<|end|>"


def _cohere_command(reasoning: str, text: str, calls: Calls) -> str:
    answer = f"<|START_RESPONSE|>{text}<|END_RESPONSE|>" if text else ""
    listed = ",\n    ".join(_objects(calls, "tool_name", "parameters"))
    given = f"<|START_ACTION|>[\n    {listed}\n]<|END_ACTION|>" if calls else ""
    return f"<|START_THINKING|>{reasoning}<|END_THINKING|>{answer}{given}"


def _cohere_command4(reasoning: str, text: str, calls: Calls) -> str:
    answer = f"<|START_TEXT|>{text}<|END_TEXT|>" if text else ""
    given = f"<|START_ACTION|>{_list(calls, 'tool_name', 'parameters')}<|END_ACTION|>" if calls else ""
    return f"<|START_THINKING|>{reasoning}<|END_THINKING|>{answer}{given}<|END_OF_TURN_TOKEN|>"


def _deepseek(think: Callable[[str], str], one: Callable[[Tool, Arguments], str], between: str = "") -> Writer:
    def write(reasoning: str, text: str, calls: Calls) -> str:
        given = between.join(
            f"<｜tool▁call▁begin｜>{one(tool, arguments)}<｜tool▁call▁end｜>" for tool, arguments in calls
        )
        block = f"<｜tool▁calls▁begin｜>{given}<｜tool▁calls▁end｜>" if given else ""
        return f"{think(reasoning)}{text}{block}<｜end▁of▁sentence｜>"

    return write


def _deepseek_fenced(tool: Tool, arguments: Arguments) -> str:
    return f"function<｜tool▁sep｜>{tool.name}\n```json\n{json.dumps(arguments)}\n```"


def _deepseek_bare(tool: Tool, arguments: Arguments) -> str:
    return f"{tool.name}<｜tool▁sep｜>{json.dumps(arguments)}"


def _deepseek_dsml(block: str, reasoning: str, text: str, calls: Calls) -> str:
    def parameter(name: str, value: Any) -> str:
        is_text = json.dumps(isinstance(value, str))
        return f'<｜DSML｜parameter name="{name}" string="{is_text}">{_raw(value)}</｜DSML｜parameter>\n'

    given = "".join(
        f'<｜DSML｜invoke name="{tool.name}">\n'
        + "".join(parameter(k, v) for k, v in arguments.items())
        + "</｜DSML｜invoke>\n"
        for tool, arguments in calls
    )
    wrapped = f"\n\n<｜DSML｜{block}>\n{given}</｜DSML｜{block}>" if given else ""
    return f"<think>{reasoning}</think>{text}{wrapped}<｜end▁of▁sentence｜>"


def _dots(reasoning: str, text: str, calls: Calls) -> str:
    given = "\n".join(_invokes(calls))
    block = f"\n<dots_function_call>\n{given}\n</dots_function_call>" if calls else ""
    return f"{_think_inline(reasoning)}{text}{block}<|endofresponse|>"


def _ernie45(reasoning: str, text: str, calls: Calls) -> str:
    answer = f"<response>\n{text}\n</response>\n" if text else ""
    return _think(reasoning) + answer + "".join(f"{one}\n" for one in _tagged_objects(calls))


def _gemma_value(value: Any, quote: str) -> str:
    if isinstance(value, str):
        if quote in value:
            raise Unwritable(quote)
        return quote + value + quote
    if isinstance(value, dict):
        return f"{{{','.join(f'{_gemma_value(k, quote)}:{_gemma_value(v, quote)}' for k, v in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(_gemma_value(v, quote) for v in value)}]"
    return json.dumps(value)


def _gemma_calls(calls: Calls, opening: str, closing: str, quote: str) -> str:
    return "".join(
        f"{opening}call:{tool.name}{{{','.join(f'{k}:{_gemma_value(v, quote)}' for k, v in given.items())}}}{closing}"
        for tool, given in calls
    )


def _functiongemma(reasoning: str, text: str, calls: Calls) -> str:
    return text + _gemma_calls(calls, "<start_function_call>", "<end_function_call>", "<escape>") + "<end_of_turn>"


def _gemma4(reasoning: str, text: str, calls: Calls) -> str:
    thought = f"<|channel>thought\n{reasoning}\n<channel|>" if reasoning else ""
    given = _gemma_calls(calls, "<|tool_call>", "<tool_call|>", '<|"|>')
    return f"{thought}{text}{given}{'<|tool_response>' if calls else '<turn|>'}"


def _gigachat3(reasoning: str, text: str, calls: Calls) -> str:
    given = "".join(f"<|message_sep|>\n\nfunction call<|role_sep|>\n{one}" for one in _objects(calls))
    return f"{_think(reasoning)}{text}{given}</s>"


def _glm45(reasoning: str, text: str, calls: Calls) -> str:
    given = "".join(f"\n<tool_call>{one}</tool_call>" for one in _key_values(calls, "\n"))
    return f"\n<think>{reasoning}</think>\n{text}{given}"


def _glm47(reasoning: str, text: str, calls: Calls, end: str = "") -> str:
    given = "".join(f"<tool_call>{one}</tool_call>" for one in _key_values(calls))
    return f"<think>{reasoning}</think>{text}{given}{end}"


def _ling3(reasoning: str, text: str, calls: Calls) -> str:
    given = "".join(f"\n<tool_call>{one}</tool_call>" for one in _key_values(calls, "\n"))
    return f"{_think_inline(reasoning)}{text}{given}<|role_end|>"


def _granite(reasoning: str, text: str, calls: Calls) -> str:
    return f"{_think_inline(reasoning)}{text}" + (f"<|tool_call|>{_list(calls)}" if calls else "")


def _functionary(reasoning: str, text: str, calls: Calls) -> str:
    if "all" in {tool.name for tool, _ in calls} or not all(tool.name[0].isalpha() for tool, _ in calls):
        raise Unwritable
    parts = [f"all\n{text}"] if text else []
    parts += [f"{tool.name}\n{json.dumps(given, ensure_ascii=False)}" for tool, given in calls]
    return "".join(f">>>{part}" for part in parts) + "<|eot_id|>"


def _firefunction(reasoning: str, text: str, calls: Calls) -> str:
    return _think(reasoning) + text + (f"\nfunctools{_list(calls)}" if calls else "") + "<|eot_id|>"


def _granite_20b(reasoning: str, text: str, calls: Calls) -> str:
    given = "\n".join(f"<function_call> {one}" for one in _objects(calls))
    return f"{_think(reasoning)}{text}\n{given}<|endoftext|>" if calls else f"{_think(reasoning)}{text}<|endoftext|>"


def _minimax_m1(reasoning: str, text: str, calls: Calls) -> str:
    given = "".join(f"{one}\n" for one in _objects(calls))
    return (
        f"{_think(reasoning)}{text}" + (f"\n<tool_calls>\n{given}</tool_calls>" if calls else "") + "<end_of_sentence>"
    )


def _solar_open(reasoning: str, text: str, calls: Calls) -> str:
    parts = [f"<|begin|>assistant<|think|>{reasoning}<|end|>"] if reasoning else []
    parts += [f"<|begin|>assistant<|content|>{text}<|end|>"] if text else []
    given = "".join(
        f"<|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>{tool.name}<|tool_call:args|>"
        f"{json.dumps(arguments, ensure_ascii=False)}<|tool_call:end|>"
        for tool, arguments in calls
    )
    return "".join(parts) + (f"<|begin|>assistant<|tool_calls|>{given}<|calls|>" if calls else "")


def _step3(reasoning: str, text: str, calls: Calls) -> str:
    given = "".join(
        f"<｜tool_call_begin｜>function<｜tool_sep｜>{one}<｜tool_call_end｜>\n" for one in _invokes(calls, "steptml:")
    )
    block = f"<｜tool_calls_begin｜>\n{given}<｜tool_calls_end｜>" if calls else ""
    return f"{_think(reasoning)}{text}{block}<|EOT|>"


def _granite4(reasoning: str, text: str, calls: Calls) -> str:
    return "\n".join([_think(reasoning) + text, *_tagged_objects(calls)]).rstrip()


def _harmony(reasoning: str, text: str, calls: Calls) -> str:
    head = "<|start|>assistant<|channel|>commentary to=functions."
    return "\n".join(f"{head}{t.name} <|constrain|>json<|message|>{json.dumps(given)}<|call|>" for t, given in calls)


def _hermes(reasoning: str, text: str, calls: Calls) -> str:
    return "\n".join(_tagged_objects(calls))


def _hunyuan(suffix: str, reasoning: str, text: str, calls: Calls) -> str:
    def call(tool: Tool, arguments: Arguments) -> str:
        given = "".join(
            f"<arg_key{suffix}>{k}</arg_key{suffix}>\n<arg_value{suffix}>{_raw(v)}</arg_value{suffix}>\n"
            for k, v in arguments.items()
        )
        return f"<tool_call{suffix}>{tool.name}<tool_sep{suffix}>\n{given}</tool_call{suffix}>\n"

    given = "".join(call(tool, arguments) for tool, arguments in calls)
    block = f"<tool_calls{suffix}>\n{given}</tool_calls{suffix}>" if calls else ""
    return f"<think{suffix}>{reasoning}</think{suffix}>{text}{block}<｜hy_eos{suffix}｜>"


def _hunyuan_a13b(reasoning: str, text: str, calls: Calls) -> str:
    given = f"<tool_calls>{_list(calls)}</tool_calls>\n" if calls else ""
    return f"<think>\n{reasoning}\n</think>\n<answer>\n{text}\n{given}</answer>"


def _inkling(reasoning: str, text: str, calls: Calls) -> str:
    thought = f"<|content_thinking|>{reasoning}<|end_message|><|message_model|>" if reasoning else ""
    given = "".join(
        f"<|message_model|>{tool.name}<|content_invoke_tool_json|>{one}<|end_message|>"
        for (tool, _), one in zip(calls, _objects(calls, arguments="args"), strict=True)
    )
    return f"{thought}<|content_text|>{text}<|end_message|>{given}<|content_model_end_sampling|>"


def _internlm2(reasoning: str, text: str, calls: Calls) -> str:
    actions = (f"<|action_start|><|plugin|>\n{one}<|action_end|>" for one in _objects(calls, arguments="parameters"))
    return _think(reasoning) + text + "\n".join(actions)


def _jamba(reasoning: str, text: str, calls: Calls) -> str:
    given = ",\n    ".join(_objects(calls))
    return _think(reasoning) + text + (f"<tool_calls>[\n    {given}\n]</tool_calls>" if calls else "")


def _kimi_k2(reasoning: str, text: str, calls: Calls) -> str:
    given = "".join(
        f"<|tool_call_begin|>functions.{tool.name}:{i}<|tool_call_argument_begin|>"
        f"{json.dumps(arguments, ensure_ascii=False)}<|tool_call_end|>"
        for i, (tool, arguments) in enumerate(calls)
    )
    section = f"<|tool_calls_section_begin|>{given}<|tool_calls_section_end|>" if given else ""
    return f"<think>{reasoning}</think>{text}{section}<|im_end|>"


_KIMI_TYPES = {str: "string", bool: "boolean", int: "number", float: "number", dict: "object", list: "array"}


def _kimi_k3(reasoning: str, text: str, calls: Calls) -> str:
    def tag(name: str, inside: str, attributes: str = "") -> str:
        return f"<|open|>{name}{attributes}<|sep|>{inside}<|close|>{name}<|sep|>"

    def argument(key: str, value: Any) -> str:
        return tag("argument", _raw(value), f' key="{key}" type="{_KIMI_TYPES[type(value)]}"')

    given = "".join(
        tag("call", "".join(argument(k, v) for k, v in arguments.items()), f' tool="{tool.name}" index="{i}"')
        for i, (tool, arguments) in enumerate(calls, 1)
    )
    tools = tag("tools", given) if given else ""
    return f"{tag('think', reasoning)}{tag('response', text)}{tools}<|close|>message<|sep|><|end_of_msg|>"


def _lfm2(reasoning: str, text: str, calls: Calls) -> str:
    given = ", ".join(_python_calls(calls, json_objects=True))
    block = f"<|tool_call_start|>[{given}]<|tool_call_end|>" if calls else ""
    return _think_inline(reasoning) + text + block


def _llama3_json(reasoning: str, text: str, calls: Calls) -> str:
    given = "; ".join(json.dumps({"name": tool.name, "parameters": arguments}) for tool, arguments in calls)
    return f"{_think(reasoning)}{text}\n{given}<|eot_id|>" if given else f"{_think(reasoning)}{text}<|eot_id|>"


def _llama4_pythonic(reasoning: str, text: str, calls: Calls) -> str:
    given = f"<|python_start|>[{', '.join(_python_calls(calls))}]<|python_end|>" if calls else ""
    return f"{_think(reasoning)}{text}{given}<|eot|>"


def _longcat(reasoning: str, text: str, calls: Calls) -> str:
    """The first call in the newer shape, the others as JSON."""
    head = f"<longcat_think>\n{reasoning}\n</longcat_think>\n" if reasoning else ""
    bodies = [*_key_values(calls[:1], "\n", "longcat_"), *(f"\n{one}\n" for one in _objects(calls[1:]))]
    return head + text + "".join(f"<longcat_tool_call>{body}</longcat_tool_call>" for body in bodies)


def _minicpm5(reasoning: str, text: str, calls: Calls) -> str:
    def param(name: str, value: Any) -> str:
        is_cdata = isinstance(value, str) and any(c in value for c in "<&\n")
        return f'<param name="{name}">{f"<![CDATA[{value}]]>" if is_cdata else _raw(value)}</param>'

    given = [
        f'<function name="{tool.name}">{"".join(param(k, v) for k, v in arguments.items())}</function>'
        for tool, arguments in calls
    ]
    return "\n".join([_think(reasoning) + text, *given]).rstrip()


def _minimax_m2(reasoning: str, text: str, calls: Calls) -> str:
    given = "".join(f"{one}\n" for one in _invokes(calls))
    block = f"\n<minimax:tool_call>\n{given}</minimax:tool_call>" if given else ""
    return f"<think>\n{reasoning}\n</think>\n\n{text}{block}[e~["


def _minimax_m3(reasoning: str, text: str, calls: Calls) -> str:
    """The elements of nested values do not tell unknown types, so these are written as JSON here."""
    ns = "]<]minimax[>["
    given = ""
    for tool, arguments in calls:
        inner = "".join(f"{ns}<{k}>{_raw(v)}{ns}</{k}>" for k, v in arguments.items())
        given += f'{ns}<invoke name="{tool.name}">{inner}{ns}</invoke>\n'
    block = f"{ns}<tool_call>\n{given}{ns}</tool_call>" if given else ""
    return f"<mm:think>{reasoning}</mm:think>{text}{block}[e~["


def _mistral(reasoning: str, text: str, calls: Calls) -> str:
    thought = f"[THINK]{reasoning}[/THINK]" if reasoning else ""
    given = "".join(f"[TOOL_CALLS]{tool.name}[ARGS]{json.dumps(arguments)}" for tool, arguments in calls)
    return f"{thought}{text}{given}</s>"


def _muse_glimmer(reasoning: str, text: str, calls: Calls) -> str:
    messages = [("self", reasoning)] if reasoning else []
    messages += [("user", text)] if text or not calls else []
    for (tool, _), invoke in zip(calls, _invokes(calls, "atem:"), strict=True):
        messages.append((tool.name, f"<atem:function_calls>\n{invoke}\n</atem:function_calls>"))
    return "<|eom|>".join(f"<|start|>assistant to={to}<|message|>{body}" for to, body in messages) + "<|eot|>"


def _nemotron_v2(reasoning: str, text: str, calls: Calls) -> str:
    given = f"\n<TOOLCALL>{_list(calls)}</TOOLCALL>" if calls else ""
    return f"{_think(reasoning)}{text}{given}\n<SPECIAL_12>"


def _olmo3(reasoning: str, text: str, calls: Calls) -> str:
    lines = "\n".join(_python_calls(calls, json_objects=True))
    return _think(reasoning) + text + (f"\n<function_calls>\n{lines}\n</function_calls>" if calls else "")


def _phi4mini(reasoning: str, text: str, calls: Calls) -> str:
    return _think(reasoning) + text + (f"\nfunctools{_list(calls)}" if calls else "")


def _plain(reasoning: str, text: str, calls: Calls) -> str:
    return "\n".join(f"<tool_code>{one}</tool_code>" for one in _objects(calls))


def _pythonic(reasoning: str, text: str, calls: Calls) -> str:
    return _think(reasoning) + text + (f"\n[{', '.join(_python_calls(calls))}]" if calls else "")


def _qwen3_coder(reasoning: str, text: str, calls: Calls) -> str:
    return "\n".join(_functions(calls))


def _qwen3_coder_turn(reasoning: str, text: str, calls: Calls) -> str:
    thought = f"<think>\n{reasoning}\n</think>\n" if reasoning else ""
    given = "".join(f"{one}\n" for one in _functions(calls))
    return f"{thought}{text}\n{given}<|im_end|>" if calls else f"{thought}{text}<|im_end|>"


def _reka(reasoning: str, text: str, calls: Calls) -> str:
    return f"{_think(reasoning)}{text}\n{''.join(_tagged_objects(calls))}\n\n<sep>"


def _seed_oss(reasoning: str, text: str, calls: Calls) -> str:
    thought = f"\n<seed:think>{reasoning}</seed:think>" if reasoning else ""
    given = "".join(f"\n{one}" for one in _functions(calls, "seed:tool_call", ""))
    newline = "\n" if calls else ""
    return f"{thought}\n{text}{newline}{given}<seed:eos>"


def _xlam(reasoning: str, text: str, calls: Calls) -> str:
    return _think(reasoning) + text + (f"\n{_list(calls)}" if calls else "")


# These write only calls, without reasoning and text.
CALL_WRITERS: dict[str, Writer] = {"harmony": _harmony, "hermes": _hermes, "plain": _plain, "qwen3_coder": _qwen3_coder}
TURN_WRITERS: dict[str, Writer] = {
    "apertus": _apertus,
    "apriel": _apriel,
    "cohere_command": _cohere_command,
    "cohere_command4": _cohere_command4,
    "deepseek_r1": _deepseek(lambda r: f"<think>\n{r}\n</think>\n\n", _deepseek_fenced, "\n"),
    "deepseek_v3": _deepseek(_think_inline, _deepseek_fenced, "\n"),
    "deepseek_v31": _deepseek(lambda r: f"<think>{r}</think>", _deepseek_bare),
    "deepseek_v32": partial(_deepseek_dsml, "function_calls"),
    "deepseek_v4": partial(_deepseek_dsml, "tool_calls"),
    "dots": _dots,
    "ernie45": _ernie45,
    "firefunction_v2": _firefunction,
    "functionary_v32": _functionary,
    "functiongemma": _functiongemma,
    "gemma4": _gemma4,
    "gigachat3": _gigachat3,
    "glm45": _glm45,
    "glm47": _glm47,
    "granite": _granite,
    "granite4": _granite4,
    "granite_20b_fc": _granite_20b,
    "hunyuan": partial(_hunyuan, ""),
    "hunyuan_a13b": _hunyuan_a13b,
    "hy_v3": partial(_hunyuan, ":opensource"),
    "inkling": _inkling,
    "internlm2": _internlm2,
    "jamba": _jamba,
    "kimi_k2": _kimi_k2,
    "kimi_k3": _kimi_k3,
    "lfm2": _lfm2,
    "ling3": _ling3,
    "llama3_json": _llama3_json,
    "llama4_pythonic": _llama4_pythonic,
    "longcat": _longcat,
    "minicpm5": _minicpm5,
    "minimax_m1": _minimax_m1,
    "minimax_m2": _minimax_m2,
    "minimax_m3": _minimax_m3,
    "mistral": _mistral,
    "muse_glimmer": _muse_glimmer,
    "nemotron_v2": _nemotron_v2,
    "nemotron_v3": _qwen3_coder_turn,
    "olmo3": _olmo3,
    "phi4mini": _phi4mini,
    "poolside_v1": partial(_glm47, end="</assistant>\n"),
    "pythonic": _pythonic,
    "reka": _reka,
    "seed_oss": _seed_oss,
    "solar_open": _solar_open,
    "spark": partial(_glm47, end="<｜end▁of▁sentence｜>"),
    "step3": _step3,
    "step3p5": _qwen3_coder_turn,
    "xlam": _xlam,
}
WRITERS = CALL_WRITERS | TURN_WRITERS


# --- any turn of any format -------------------------------------------------------------------------------------------


def _write_harmony_turn(reasoning: str, text: str) -> str:
    thought = f"<|channel|>analysis<|message|>{reasoning}<|end|><|start|>assistant" if reasoning else ""
    return f"{thought}<|channel|>final<|message|>{text}<|end|>" if text or reasoning else ""


def write_turn(format: str, reasoning: str, text: str, calls: Calls) -> str:
    """Also of the formats whose writers write only calls, or that have none. A line break that no marker precedes would
    be text."""
    if format in TURN_WRITERS:
        return TURN_WRITERS[format](reasoning, text, calls).lstrip("\n")
    given = CALL_WRITERS[format](reasoning, text, calls) if calls else ""
    if format == "harmony":
        return _write_harmony_turn(reasoning, text) + given
    if format == "plain":
        return (f"<thinking>{reasoning}</thinking>" if reasoning else "") + text + given
    return f"{_think(reasoning)}{text}" + (f"\n{given}" if given else "")
