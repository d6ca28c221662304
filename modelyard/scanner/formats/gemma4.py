"""Gemma 4: reasoning in a channel, calls in a notation of their own, between tokens.

    <|channel>thought
    I need the weather.<channel|>Let me look.<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>

After its calls the model writes `<|tool_response>` and waits. Channels may open twice, and close without need. The
token before a call is at times forgotten (`call:now{}`) or broken (`<call>now{}`).
"""

from __future__ import annotations

from modelyard.core.output_format import OutputFormat, Region, StartReader, SwitchRegion
from modelyard.scanner.calls import Calls
from modelyard.scanner.formats._gemma import Notation
from modelyard.scanner.lexer import Steps, Tape

_CHANNEL, _CHANNEL_END, _THOUGHT = "<|channel>", "<channel|>", "thought"
_CALL, _CALL_END, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_ENDS = ("<turn|>", "<|tool_response>")


def _channel(tape: Tape, _: Calls) -> Steps[str | None]:
    """Every channel that is known is one of thoughts."""
    if here := (yield from tape.stands((_THOUGHT,))):
        tape.skip(len(here))
    return "thinking"


_NOTATION = Notation(_QUOTE, _CALL_END)
_READ = {
    _CHANNEL: StartReader(_channel),
    _CALL: StartReader(_NOTATION.read, (_CALL_END,)),
    **dict.fromkeys(("call:", "<call>"), StartReader(_NOTATION.naked, (_CALL_END,), naked=True)),
}

FORMAT = OutputFormat(
    name="gemma4",
    regions={
        "text": Region("text", {**_READ}),
        "thinking": Region("thinking", {_CHANNEL_END: SwitchRegion("text"), **_READ}),
    },
    hidden=(_CHANNEL_END, _CALL_END, _QUOTE, *_ENDS, "<|turn>", "<tool_response|>", "<|think|>", "<eos>"),
    stops=_ENDS,
    turn=("<|turn>model", "<tool_response|>"),
    template=((_CALL, _QUOTE), (_CHANNEL, "<|turn>")),
    names=("gemma-4", "gemma4"),
)
