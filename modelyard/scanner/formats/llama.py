"""Llama.

`llama3_json`: Llama 3.1 to 3.3 write bare JSON, one call after another, with `parameters` in place of arguments:

    {"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "now", "parameters": {}}
    <|python_tag|>{"type": "function", "name": "now", "parameters": {}}
    <|python_tag|>brave_search.call(query="weather in Paris")
    <|python_tag|>print(2 + 2)
    <function=get_weather>{"city": "Paris"}</function>

Without the token, JSON is a call only if it names an offered tool and has arguments. After the token also come the
tools that Llama was trained with, and code. Code is a call of `python`, `ipython` or `code_interpreter` if one of
them is offered, else text. The last form is the one that Meta's guide teaches for custom tools. Functionary writes
it, too.

`llama4_pythonic`: Llama 4 writes a list of Python calls, between tokens or alone:

    [get_weather(city="Paris", days=3), now()]
    Let me look.<|python_start|>[get_weather(city="Paris")]<|python_end|>

After the token the brackets may be missing, and some models write JSON there.

`pythonic`: the list alone. ToolACE, Llama 3.2 and others whose prompt asks for it. Text may come before and after. The
list consists of calls only if its first name is an offered tool.
"""

from __future__ import annotations

import re
from functools import partial

from modelyard.core.output_format import OutputFormat, StartReader
from modelyard.scanner.arguments import ArgumentWriter
from modelyard.scanner.formats._common import regions
from modelyard.scanner.formats.qwen import FUNCTION, FUNCTION_END, FunctionTagReader
from modelyard.scanner.grammar import CallGrammar, JsonBody, PythonBody, listed
from modelyard.scanner.json_calls import JsonCallReader, OfferedJsonCallReader, json_calls
from modelyard.scanner.lexer import INSIDE_BRACKET, Incremental, ParseError, TextBuffer
from modelyard.scanner.output import CallBuilder
from modelyard.scanner.pythonic_calls import pythonic_arguments, pythonic_list

# --- Llama 3 ----------------------------------------------------------------------------------------------------------

_TAG, _ENDS = "<|python_tag|>", ("<|eom_id|>", "<|eot_id|>")
_TURN_START = "<|start_header_id|>assistant<|end_header_id|>"
INTERPRETERS = ("python", "ipython", "code_interpreter")
_BUILT_IN = re.compile(r"\s*([\w-]+)\.call\(")
_BUILT_IN_LIMIT = 96  # longer than any built-in name


def _read_object(buffer: TextBuffer, calls: CallBuilder) -> Incremental[str | None]:
    """After `{`."""
    yield from OfferedJsonCallReader(buffer, calls).read_opened()
    return (yield from _read_more(buffer, calls, OfferedJsonCallReader))


def _read_list(buffer: TextBuffer, calls: CallBuilder) -> Incremental[str | None]:
    """After `[`."""
    yield from buffer.skip_space()
    if (yield from buffer.peek()) != "{":
        raise ParseError("expected a call")
    with INSIDE_BRACKET:
        yield from OfferedJsonCallReader(buffer, calls).read()
    return (yield from _read_more(buffer, calls, OfferedJsonCallReader, in_list=True))


def _read_more(
    buffer: TextBuffer, calls: CallBuilder, reader: type[JsonCallReader], *, in_list: bool = False
) -> Incremental[str | None]:
    """Separators between calls belong to them. Before anything else they are shown as text."""
    separators = ",;}" + ("]" if in_list else "")
    buffer.commit()
    while True:
        yield from buffer.skip_space()
        char = yield from buffer.peek()
        if char == "{":
            yield from reader(buffer, calls).read()
            buffer.commit()
        elif not char:
            return None
        elif char in separators:
            buffer.skip(1)
        else:
            raise ParseError("expected another call")


def _read_tagged(buffer: TextBuffer, calls: CallBuilder) -> Incremental[str | None]:
    """After `<|python_tag|>`."""
    yield from buffer.skip_space()
    char = yield from buffer.peek()
    if char in ("{", "["):
        buffer.skip(1 if char == "[" else 0)
        yield from buffer.skip_space()
        yield from JsonCallReader(buffer, calls).read()
        return (yield from _read_more(buffer, calls, JsonCallReader, in_list=char == "["))
    if found := _BUILT_IN.match((yield from buffer.lookahead(_BUILT_IN_LIMIT))):
        buffer.skip(found.end())
        calls.start(found[1])
        yield from pythonic_arguments(buffer, calls)
    else:
        for name in INTERPRETERS:
            calls.start(name)
            if calls.tool is not None:
                break
        else:
            raise ParseError("no interpreter is offered")
        yield from read_code(buffer, calls, name, _ENDS)
    return None


def read_code(buffer: TextBuffer, calls: CallBuilder, name: str, ends: tuple[str, ...]) -> Incremental[None]:
    """Everything up to the end of the turn is the argument of the interpreter with this name."""
    calls.start(name)
    arguments = ArgumentWriter(calls)
    arguments.begin(next(iter(arguments.properties), "code"), ("string",))
    end = yield from buffer.read_verbatim(tuple(map(buffer.encoded, ends)), arguments.write)
    if not end and buffer.truncated:
        raise ParseError("cut off inside code")
    arguments.end()
    arguments.finish()


_LLAMA3_READERS = {
    _TAG: StartReader(_read_tagged, _ENDS),
    FUNCTION: FunctionTagReader(_TAG, _ENDS[0]).readers[FUNCTION],
    "{": StartReader(_read_object, bare=True),
    "[": StartReader(_read_list, bare=True),
}

_LLAMA3 = OutputFormat(
    name="llama3_json",
    regions=regions(_LLAMA3_READERS),
    hidden_markers=("</think>", FUNCTION_END, *_ENDS),
    stop_tokens=_ENDS,
    turn_starts=(_TURN_START,),
    template_hints=tuple(("<|start_header_id|>", hint) for hint in ('"parameters": ', _TAG, FUNCTION)),
    name_hints=("llama-3.1", "llama-3.2", "llama-3.3", "llama3.1", "llama3.2", "llama3.3"),
    grammar=CallGrammar(body=JsonBody('{"name": "', '", "parameters": ', "}"), between="; "),
)

# --- Python calls -----------------------------------------------------------------------------------------------------

_START, _END = "<|python_start|>", "<|python_end|>"
_BARE_LIST = StartReader(partial(pythonic_list, offered_only=True), bare=True)


def _read_between_tokens(buffer: TextBuffer, calls: CallBuilder) -> Incremental[str | None]:
    """After `<|python_start|>`."""
    yield from buffer.skip_space()
    if (yield from buffer.skip_if("[")):
        yield from buffer.skip_space()
    if (yield from buffer.peek()) == "{":
        return (yield from json_calls(buffer, calls))
    return (yield from pythonic_list(buffer, calls))


_LLAMA4 = OutputFormat(
    name="llama4_pythonic",
    regions=regions({_START: StartReader(_read_between_tokens, (_END,)), "[": _BARE_LIST, "{": _LLAMA3_READERS["{"]}),
    hidden_markers=(_END, "</think>", "<|eot|>", "<|eom|>"),
    stop_tokens=("<|eot|>", "<|eom|>"),
    turn_starts=("<|header_start|>assistant<|header_end|>",),
    template_hints=(("<|header_start|>", "<|header_end|>"), (_START,)),
    name_hints=("llama-4", "llama4"),
    calls=listed(_START, _END, PythonBody()),
)

_PYTHONIC = OutputFormat(
    name="pythonic",
    results=("<tool_response>\n", "</tool_response>"),
    regions=regions({"[": _BARE_LIST}),
    hidden_markers=("</think>", "<|eot_id|>", "<|eom_id|>", _TAG, "<|im_end|>", _START, _END),
    stop_tokens=("<|eot_id|>", "<|eom_id|>"),
    turn_starts=(_TURN_START,),
    template_hints=(("[func_name1(params_name1=params_value1",),),
    name_hints=("toolace", "pythonic"),
    calls=listed(body=PythonBody()),
)

FORMATS = (_LLAMA3, _LLAMA4, _PYTHONIC)
