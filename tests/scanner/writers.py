"""How each family writes a turn: `WRITERS[format](reasoning, text, calls)` returns the raw output.

The calls are written by the format itself; what is around them is written here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from modelyard.core.request import Tool
from modelyard.scanner.formats import load

Arguments = dict[str, Any]
Calls = Sequence[tuple[Tool, Arguments]]
Writer = Callable[[str, str, Calls], str]


class Unwritable(Exception):
    """These values cannot be written in this format."""


_dumps = partial(json.dumps, ensure_ascii=False)


def written(format: str, calls: Calls) -> str:
    writer = load(format).writer
    assert writer is not None
    return writer.write([(tool.name, arguments) for tool, arguments in calls], _dumps) if calls else ""


class Turn:
    """`think` frames the reasoning and `answer` the text, if there is any. `before` comes before the calls, `after` at
    the end."""

    def __init__(
        self,
        format: str,
        think: str = "<think>\n{}\n</think>\n\n",
        answer: str = "{}",
        before: str = "",
        after: str = "",
        *,
        always_thinks: bool = False,
        always_answers: bool = False,
    ) -> None:
        self._format, self._think, self._answer, self._before, self._after = format, think, answer, before, after
        self._always_thinks, self._always_answers = always_thinks, always_answers

    def __call__(self, reasoning: str, text: str, calls: Calls) -> str:
        thought = self._think.replace("{}", reasoning) if reasoning or self._always_thinks else ""
        answer = self._answer.replace("{}", text) if text or self._always_answers else ""
        given = self._before + written(self._format, calls) if calls else ""
        return thought + answer + given + self._after


def _strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [*value, *(text for one in value.values() for text in _strings(one))]
    if isinstance(value, list):
        return [text for one in value for text in _strings(one)]
    return [value] if isinstance(value, str) else []


def _without(quote: str, write: Writer) -> Writer:
    """Texts with the family's own quote cannot be written."""

    def checked(reasoning: str, text: str, calls: Calls) -> str:
        if any(quote in text for _, arguments in calls for text in _strings(arguments)):
            raise Unwritable(quote)
        return write(reasoning, text, calls)

    return checked


# A tool with such a name looks like the usual shape of a call.
_USUAL_KEYS = {"name", "tool_name", "function", "arguments", "parameters", "args", "id", "type", "tool_call_id"}


def _apertus(reasoning: str, text: str, calls: Calls) -> str:
    if _USUAL_KEYS & {tool.name for tool, _ in calls}:
        raise Unwritable
    turn = Turn("apertus", "<|inner_prefix|>{}<|inner_suffix|>", after="<|assistant_end|>")
    return turn(reasoning, text, calls)


def _functionary(reasoning: str, text: str, calls: Calls) -> str:
    if "all" in {tool.name for tool, _ in calls} or not all(tool.name[0].isalpha() for tool, _ in calls):
        raise Unwritable
    return Turn("functionary_v32", "", ">>>all\n{}", after="<|eot_id|>")("", text, calls)


def _gemma4(reasoning: str, text: str, calls: Calls) -> str:
    after = "<|tool_response>" if calls else "<turn|>"
    return Turn("gemma4", "<|channel>thought\n{}\n<channel|>", after=after)(reasoning, text, calls)


def _raw(value: Any) -> str:
    """A value between tags: text unchanged, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def _longcat(reasoning: str, text: str, calls: Calls) -> str:
    """The first call in the newer shape."""
    pair = "\n<longcat_arg_key>{}</longcat_arg_key>\n<longcat_arg_value>{}</longcat_arg_value>"
    newer = "".join(
        f"<longcat_tool_call>{tool.name}{''.join(pair.format(k, _raw(v)) for k, v in given.items())}\n"
        "</longcat_tool_call>"
        for tool, given in calls[:1]
    )
    head = f"<longcat_think>\n{reasoning}\n</longcat_think>\n" if reasoning else ""
    return head + text + newer + written("longcat", calls[1:])


def _plain(reasoning: str, text: str, calls: Calls) -> str:
    objects = (_dumps({"name": tool.name, "arguments": given}) for tool, given in calls)
    return "\n".join(f"<tool_code>{one}</tool_code>" for one in objects)


_INLINE = "<think>{}</think>"
_always = partial(Turn, always_thinks=True)
_EOS = "<｜end▁of▁sentence｜>"

# These write only calls, without reasoning and text.
CALL_WRITERS: dict[str, Writer] = {
    "harmony": lambda _reasoning, _text, calls: written("harmony", calls),
    "hermes": lambda _reasoning, _text, calls: written("hermes", calls),
    "plain": _plain,
    "qwen3_coder": lambda _reasoning, _text, calls: written("qwen3_coder", calls),
}
TURN_WRITERS: dict[str, Writer] = {
    "apertus": _apertus,
    "apriel": Turn(
        "apriel",
        "Here are my reasoning steps:\n{}\n",
        before="\n",
        answer="[BEGIN FINAL RESPONSE]\n{}",
        after="\n[END FINAL RESPONSE]\n<|end|>",
        always_answers=True,
    ),
    "cohere_command": _always(
        "cohere_command", "<|START_THINKING|>{}<|END_THINKING|>", "<|START_RESPONSE|>{}<|END_RESPONSE|>"
    ),
    "cohere_command4": _always(
        "cohere_command4",
        "<|START_THINKING|>{}<|END_THINKING|>",
        "<|START_TEXT|>{}<|END_TEXT|>",
        after="<|END_OF_TURN_TOKEN|>",
    ),
    "deepseek_r1": _always("deepseek_r1", after=_EOS),
    "deepseek_v3": Turn("deepseek_v3", _INLINE, after=_EOS),
    "deepseek_v31": _always("deepseek_v31", _INLINE, after=_EOS),
    "deepseek_v32": _always("deepseek_v32", _INLINE, before="\n\n", after=_EOS),
    "deepseek_v4": _always("deepseek_v4", _INLINE, before="\n\n", after=_EOS),
    "dots": Turn("dots", _INLINE, before="\n", after="<|endofresponse|>"),
    "ernie45": Turn("ernie45", answer="<response>\n{}\n</response>\n", after="\n"),
    "firefunction_v2": Turn("firefunction_v2", before="\n", after="<|eot_id|>"),
    "functionary_v32": _functionary,
    "functiongemma": _without("<escape>", Turn("functiongemma", "", after="<end_of_turn>")),
    "gemma4": _without('<|"|>', _gemma4),
    "gigachat3": Turn("gigachat3", after="</s>"),
    "glm45": _always("glm45", "\n<think>{}</think>\n", before="\n"),
    "glm47": _always("glm47", _INLINE),
    "granite": Turn("granite", _INLINE),
    "granite4": Turn("granite4", before="\n"),
    "granite_20b_fc": Turn("granite_20b_fc", before="\n", after="<|endoftext|>"),
    "hunyuan": _always("hunyuan", _INLINE, after="<｜hy_eos｜>"),
    "hunyuan_a13b": _always(
        "hunyuan_a13b",
        "<think>\n{}\n</think>\n",
        answer="<answer>\n{}\n",
        after="</answer>",
        always_answers=True,
    ),
    "hy_v3": _always("hy_v3", "<think:opensource>{}</think:opensource>", after="<｜hy_eos:opensource｜>"),
    "inkling": Turn(
        "inkling",
        "<|content_thinking|>{}<|end_message|><|message_model|>",
        "<|content_text|>{}<|end_message|>",
        after="<|content_model_end_sampling|>",
        always_answers=True,
    ),
    "internlm2": Turn("internlm2"),
    "jamba": Turn("jamba"),
    "kimi_k2": _always("kimi_k2", _INLINE, after="<|im_end|>"),
    "kimi_k3": _always(
        "kimi_k3",
        "<|open|>think<|sep|>{}<|close|>think<|sep|>",
        "<|open|>response<|sep|>{}<|close|>response<|sep|>",
        after="<|close|>message<|sep|><|end_of_msg|>",
        always_answers=True,
    ),
    "lfm2": Turn("lfm2", _INLINE),
    "ling3": Turn("ling3", _INLINE, before="\n", after="<|role_end|>"),
    "llama3_json": Turn("llama3_json", before="\n", after="<|eot_id|>"),
    "llama4_pythonic": Turn("llama4_pythonic", after="<|eot|>"),
    "longcat": _longcat,
    "minicpm5": Turn("minicpm5", before="\n"),
    "minimax_m1": Turn("minimax_m1", before="\n", after="<end_of_sentence>"),
    "minimax_m2": _always("minimax_m2", before="\n", after="[e~["),
    "minimax_m3": _always("minimax_m3", "<mm:think>{}</mm:think>", after="[e~["),
    "mistral": Turn("mistral", "[THINK]{}[/THINK]", after="</s>"),
    "muse_glimmer": Turn(
        "muse_glimmer",
        "<|start|>assistant to=self<|message|>{}<|eom|>",
        "<|start|>assistant to=user<|message|>{}<|eom|>",
        after="<|eot|>",
    ),
    "nemotron_v2": Turn("nemotron_v2", before="\n", after="\n<SPECIAL_12>"),
    "nemotron_v3": Turn("nemotron_v3", "<think>\n{}\n</think>\n", before="\n", after="<|im_end|>"),
    "olmo3": Turn("olmo3", before="\n"),
    "phi4mini": Turn("phi4mini", before="\n"),
    "poolside_v1": _always("poolside_v1", _INLINE, after="</assistant>\n"),
    "pythonic": Turn("pythonic", before="\n"),
    "reka": Turn("reka", before="\n", after="\n\n<sep>"),
    "seed_oss": Turn(
        "seed_oss",
        "\n<seed:think>{}</seed:think>",
        "\n{}",
        before="\n\n",
        after="<seed:eos>",
        always_answers=True,
    ),
    "solar_open": Turn("solar_open", "<|begin|>assistant<|think|>{}<|end|>", "<|begin|>assistant<|content|>{}<|end|>"),
    "spark": _always("spark", _INLINE, after=_EOS),
    "step3": Turn("step3", after="<|EOT|>"),
    "step3p5": Turn("step3p5", "<think>\n{}\n</think>\n", before="\n", after="<|im_end|>"),
    "xlam": Turn("xlam", before="\n"),
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
    return (f"<think>\n{reasoning}\n</think>\n\n" if reasoning else "") + text + (f"\n{given}" if given else "")
