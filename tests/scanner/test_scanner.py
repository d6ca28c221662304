"""The state machine: what is shown when, stop strings, tokens, prefills, and calls that break."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Literal

import pytest

import modelyard.scanner
from modelyard.core.events import BlockDelta, BlockEnd, BlockStart
from modelyard.core.request import Tool
from modelyard.core.tokenizer import IdLogprob, Piece
from modelyard.scanner import Scanner
from modelyard.scanner.formats import load, names
from tests.scanner.helpers import (
    TOOLS,
    ScannedBlock,
    blocks_of,
    calls_of,
    delta_texts,
    marker_tokens,
    pieces,
    scan,
    text_of,
)

CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
TOKENS = {"<think>": 1, "</think>": 2, "<tool_call>": 3, "</tool_call>": 4, "<|im_end|>": 5, "<|pad|>": 6}


def _scanner(format: str = "hermes", **options: object) -> Scanner:
    return Scanner(load(format), **{"tools": TOOLS, "new_id": lambda: "call_0"} | options)  # type: ignore[arg-type]


def test_plain_text_is_shown_at_once() -> None:
    scanner = _scanner()
    assert [delta_texts(scanner.feed([Piece(t)])) for t in ("Hel", "lo", " wor", "ld ")] == [
        ["Hel"],
        ["lo"],
        [" wor"],
        ["ld "],
    ]


def test_only_the_possible_marker_is_held_back() -> None:
    scanner = _scanner()
    assert delta_texts(scanner.feed([Piece("a < b <tool")])) == ["a < b "]
    assert delta_texts(scanner.feed([Piece("box")])) == ["<toolbox"]


def test_a_line_break_waits_for_the_marker_that_may_own_it() -> None:
    scanner = _scanner()
    assert delta_texts(scanner.feed([Piece("a\n")])) == ["a"]
    assert delta_texts(scanner.feed([Piece("b")])) == ["\nb"]


def test_pieces_of_one_feed_make_one_delta() -> None:
    scanner = _scanner()
    assert delta_texts(scanner.feed([Piece("a"), Piece("b"), Piece("c")])) == ["abc"]


def test_many_pieces_in_one_feed_give_the_same_result_as_one_by_one() -> None:
    thought, words = ("<think>|so| many| thoughts|</think>", "and| then| words| < more| and|\n|end")
    pieces = [Piece(word, word in TOKENS) for word in f"{thought}|{words}".split("|")]
    together, apart = _scanner(specials=TOKENS), _scanner(specials=TOKENS)
    all_at_once = blocks_of([*together.feed(pieces), *together.finish()])
    one_by_one = blocks_of([event for piece in pieces for event in apart.feed([piece])] + apart.finish())
    assert all_at_once == one_by_one
    assert text_of(all_at_once) == words.replace("|", "")
    assert together.reasoning_tokens == apart.reasoning_tokens > 2


def test_reasoning_tokens_are_counted_in_large_feeds() -> None:
    scanner = _scanner(specials=TOKENS)
    scanner.feed([Piece("<think>", True), Piece("so")])
    before = scanner.reasoning_tokens
    scanner.feed([Piece(word) for word in (" many", " plain", " thoughts", " here")])
    assert scanner.reasoning_tokens == before + 4


def test_pieces_without_text_make_no_event() -> None:
    scanner = _scanner()
    scanner.feed([Piece("a")])
    assert scanner.feed([Piece(""), Piece("")]) == []


def test_arguments_stream_from_their_first_byte() -> None:
    scanner = _scanner()
    assert scanner.feed([Piece('<tool_call>{"name": "get_weather", "arguments": ')]) == []
    assert scanner.feed([Piece("{")]) == [BlockStart(0, "tool_call", "call_0", "get_weather"), BlockDelta(0, "{")]
    assert delta_texts(scanner.feed([Piece('"city": "Pa')])) == ['"city": "Pa']
    assert scanner.feed([Piece('ris"}')]) == [BlockDelta(0, 'ris"}'), BlockEnd(0)]


def test_text_arguments_between_tags_are_streamed() -> None:
    scanner = _scanner("qwen3_coder")
    scanner.feed([Piece("<tool_call>\n<function=write_file>\n<parameter=content>\n")])
    assert delta_texts(scanner.feed([Piece('say "hi"\n')])) == ['{"content": "say \\"hi\\"']
    assert delta_texts(scanner.feed([Piece("there")])) == ["\\nthere"]


def test_a_call_is_sent_complete_without_tool_streaming() -> None:
    scanner = _scanner(tool_stream=False)
    assert scanner.feed([Piece(CALL[:-15])]) == []
    assert blocks_of(scanner.feed([Piece(CALL[-15:])])) == [
        ScannedBlock("tool_call", '{"city": "Paris"}', "get_weather")
    ]


def test_a_broken_call_is_text_without_tool_streaming() -> None:
    raw = '<tool_call>{"name": "get_weather", "arguments": {"city": oops}}</tool_call>'
    assert text_of(scan([raw], "hermes", tool_stream=False)) == '{"name": "get_weather", "arguments": {"city": oops}}'


def test_quoted_markers_are_text_if_the_vocabulary_has_the_token() -> None:
    blocks = scan([f"Write {CALL} or <think>."], "hermes", specials=TOKENS)
    assert blocks == [ScannedBlock("text", f"Write {CALL} or <think>.")]


def test_marker_tokens_count_if_the_vocabulary_has_them() -> None:
    chunks = [Piece("<think>", True), Piece("a </think> b"), Piece("</think>", True), Piece("c")]
    assert scan(chunks, "hermes", specials=TOKENS) == [
        ScannedBlock("thinking", "a </think> b"),
        ScannedBlock("text", "c"),
    ]


def test_special_tokens_are_never_shown() -> None:
    chunks = [Piece("a"), Piece("<|pad|>", True), Piece("b"), Piece("<|im_end|>", True)]
    assert text_of(scan(chunks, "hermes", specials=TOKENS)) == "ab"
    assert text_of(scan(chunks, "plain", specials=TOKENS)) == "ab"


@pytest.mark.parametrize("after", ["", "\n", "\n<tool_call>"])
def test_the_end_of_a_call_ends_a_broken_string(after: str) -> None:
    chunks = [Piece("<tool_call>", True), Piece('{"name": "get_weather", "arguments": {"city": "Par')]
    blocks = scan([*chunks, Piece("</tool_call>", True), *pieces(after, TOKENS)], "hermes", specials=TOKENS)
    assert calls_of(blocks, complete=False) == [("get_weather", '{"city": "Par')]
    assert text_of(blocks) == ""


def test_a_marker_inside_a_string_is_text_if_the_call_goes_on() -> None:
    chunks = [Piece("<tool_call>", True), Piece('{"name": "get_weather", "arguments": {"city": "Par')]
    blocks = scan([*chunks, Piece("</tool_call>", True), Piece('is"}}')], "hermes", specials=TOKENS)
    assert calls_of(blocks) == [("get_weather", '{"city": "Par</tool_call>is"}')]


def test_hidden_reasoning_is_parsed_and_counted() -> None:
    scanner = _scanner(show_thinking=False)
    events = scanner.feed([Piece(t) for t in ("<think>", "a", "b", "</think>", "c")])
    assert blocks_of(events + scanner.finish()) == [ScannedBlock("text", "c")]
    assert scanner.reasoning_tokens == 3


def test_reasoning_tokens_do_not_count_calls() -> None:
    scanner = _scanner()
    scanner.feed([Piece(t) for t in ("<think>", "a", CALL[:20], CALL[20:60], CALL[60:], "b", "</think>")])
    assert scanner.reasoning_tokens == 4  # the piece that ends the call is back in the reasoning


def test_a_stop_string_ends_everything() -> None:
    scanner = _scanner(stop=["END"])
    assert delta_texts(scanner.feed([Piece("a E")])) == ["a "]
    assert scanner.stop_string is None
    assert scanner.feed([Piece("ND b"), Piece("c")]) == []
    assert (scanner.stop_string, scanner.is_done) == ("END", True)
    assert scanner.feed([Piece(CALL)]) == []
    assert scanner.finish() == [BlockEnd(0)]


def test_a_stop_string_in_the_last_held_text_counts() -> None:
    scanner = _scanner(stop=["\n"])
    scanner.feed([Piece("a\n")])
    scanner.finish()
    assert scanner.stop_string == "\n"


def test_a_stop_string_may_end_in_text_in_which_nothing_begins() -> None:
    scanner = _scanner(stop=["STOP"])
    assert delta_texts(scanner.feed([Piece("a ST")])) == ["a "]
    assert delta_texts(scanner.feed([Piece("O"), Piece("P not shown")])) == []
    assert (scanner.is_done, scanner.stop_string) == (True, "STOP")
    assert scanner.feed([Piece("nor this")]) == []
    assert delta_texts(scanner.finish()) == []


def test_text_that_a_limit_cuts_off_ends_as_it_was_shown() -> None:
    scanner = _scanner()
    assert delta_texts(scanner.feed([Piece("Hello")])) == ["Hello"]
    assert scanner.finish(truncated=True) == [BlockEnd(0)]


def test_a_stop_string_does_not_reach_across_a_call() -> None:
    assert text_of(scan(["a E", CALL, "ND"], "hermes", stop=["END"])) == "a END"


def test_stop_strings_in_the_prompt_have_no_effect() -> None:
    assert text_of(scan(["c"], "hermes", stop=["b"], prefill="<|im_start|>assistant\na b")) == "c"


def test_the_scanner_is_done_after_one_call_without_parallel_calls() -> None:
    scanner = _scanner(parallel=False)
    events = scanner.feed([Piece(CALL + CALL)])
    assert scanner.is_done
    assert scanner.has_complete_call
    assert len(calls_of(blocks_of(events + scanner.finish()))) == 1


def test_an_incomplete_call_does_not_count_as_a_call() -> None:
    scanner = _scanner()
    scanner.feed([Piece(CALL[:60])])
    assert scanner.finish(truncated=True)[-1] == BlockEnd(0, complete=False)
    assert not scanner.has_complete_call


def test_a_call_of_a_tool_that_is_not_offered_causes_a_warning() -> None:
    scanner = _scanner(tools=())
    scanner.feed([Piece(CALL)])
    assert scanner.warnings == ["the model called 'get_weather', which was not offered: passed on as text"]
    assert not scanner.has_complete_call


def test_server_tools_cannot_be_called() -> None:
    assert calls_of(scan([CALL], "hermes", tools=[Tool("get_weather", kind="server")])) == []


def test_custom_tools_get_the_text_inside_the_json() -> None:
    scanner = _scanner(tools=[Tool("patch", kind="custom")])
    raw = '<tool_call>{"name": "patch", "arguments": {"input": "*** Begin\\n+x"}}</tool_call>'
    events = scanner.feed([Piece(raw)])
    assert events[:2] == [BlockStart(0, "tool_call", "call_0", "patch", custom=True), BlockDelta(0, "*** Begin\n+x")]


def test_custom_tools_of_harmony_get_the_body_unchanged() -> None:
    raw = "<|channel|>commentary to=functions.patch<|message|>*** Begin\n{+x<|call|>"
    blocks = scan([raw], "harmony", tools=[Tool("patch", kind="custom")])
    assert calls_of(blocks) == [("patch", "*** Begin\n{+x")]


def test_a_namespaced_tool_is_found_by_its_flat_name() -> None:
    scanner = _scanner(tools=[Tool("read", namespace="fs")])
    events = scanner.feed([Piece('<tool_call>{"name": "fs__read", "arguments": {}}</tool_call>')])
    assert events[0] == BlockStart(0, "tool_call", "call_0", "read", "fs")


def test_logprobs_stay_with_their_text() -> None:
    scanner = _scanner(token_text=lambda i: (f"t{i}", bytes([i])))
    words = ["<think>", "a", "\n", "</think>", "\n", "b", " <", "c", CALL]
    made = [Piece(w, logprob=IdLogprob(i, -float(i), ((i, -1.0),))) for i, w in enumerate(words)]
    events = [e for piece in made for e in scanner.feed([piece])] + scanner.finish()
    shown = [(e.text, [p.token for p in e.logprobs]) for e in events if isinstance(e, BlockDelta)]
    assert shown == [("a", ["t1"]), ("b", ["t5"]), (" ", []), ("<c", ["t6", "t7"]), ('{"city": "Paris"}', [])]
    first = next(e for e in events if isinstance(e, BlockDelta)).logprobs[0]
    assert (first.logprob, first.bytes, first.top[0].token) == (-1.0, b"\x01", "t1")


def test_the_end_of_the_prompt_closes_nothing() -> None:
    assert scan(["b</think>c"], "think", prefill="<|im_start|>assistant\n<think>\na ") == [
        ScannedBlock("thinking", "b"),
        ScannedBlock("text", "c"),
    ]


def test_an_old_turn_of_the_prompt_leaves_nothing_open() -> None:
    prefill = "<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n"
    assert scan(["A tag."], "think", prefill=prefill) == [ScannedBlock("text", "A tag.")]


def test_an_empty_output_has_no_blocks() -> None:
    for format in ("plain", "think", "hermes", "qwen3_coder", "harmony"):
        assert scan([], format) == []


# --- broken calls -----------------------------------------------------------------------------------------------------


def test_a_broken_call_ends_where_it_cannot_be_read_and_the_rest_is_text() -> None:
    raw = '{"name": "get_weather", "parameters": {"city": oops, "days": [{"x": 1}]}} So.\n\nIt rains.<|eom_id|>'
    for chunks in ([raw], list(raw)):
        blocks = scan(chunks, "llama3_json")
        assert calls_of(blocks, complete=False) == [("get_weather", '{"city": ')]
        assert text_of(blocks) == 'oops, "days": [{"x": 1}]}} So.\n\nIt rains.'


def test_a_call_after_the_brackets_of_a_broken_one_counts() -> None:
    inside = '{"name": "search", "parameters": {"options": oops, "x": [{"name": "now", "parameters": {}}]}}'
    blocks = scan(list(inside + '; {"name": "now", "parameters": {}}'), "llama3_json")
    assert calls_of(blocks) == [("now", "{}")]
    assert text_of(blocks) == 'oops, "x": [{"name": "now", "parameters": {}}]}}; '


def test_a_marker_ends_what_is_left_of_a_broken_call() -> None:
    raw = '{"name": "search", "parameters": {"x": [oops<|python_tag|>{"name": "now", "parameters": {}}<|eom_id|>'
    blocks = scan(list(raw), "llama3_json")
    assert (calls_of(blocks), text_of(blocks)) == ([("now", "{}")], "oops")


def test_a_word_that_a_limit_cut_off_is_not_shown() -> None:
    blocks = scan(list('{"name": "search", "parameters": {"exact": tru'), "llama3_json", truncated=True)
    assert (calls_of(blocks, complete=False), text_of(blocks)) == ([("search", '{"exact": ')], "")


def test_a_broken_python_call_ends_where_it_cannot_be_read() -> None:
    raw = "[f(x=1, y=g(2), z=[h(a=1)])] So.\nIt rains. [h(a=2)]"
    for chunks in ([raw], list(raw)):
        blocks = scan(chunks, "pythonic", tools=[Tool("f"), Tool("h")])
        assert calls_of(blocks, complete=False) == [("f", '{"x": 1, "y": ')]
        assert text_of(blocks) == "g(2), z=[h(a=1)])] So.\nIt rains. "
        assert calls_of(blocks) == [("h", '{"a": 2}')]


def test_the_rest_of_a_broken_call_between_markers_is_text() -> None:
    raw = '<tool_call>{"name": "get_weather", "arguments": {"city": oops, "x": {}}}</tool_call> So.'
    for chunks in ([raw], list(raw)):
        blocks = scan(chunks, "hermes")
        assert calls_of(blocks, complete=False) == [("get_weather", '{"city": ')]
        assert text_of(blocks) == 'oops, "x": {}}} So.'


def test_the_rest_of_a_broken_call_without_a_closing_tag_is_text() -> None:
    raw = '<tool_call>{"name": "get_weather", "arguments": {"city": oops}} So. It rains.'
    for chunks in ([raw], list(raw)):
        assert text_of(scan(chunks, "hermes")) == "oops}} So. It rains."


def test_inner_tags_of_a_broken_call_are_not_shown() -> None:
    call = '<function name="now"><param name="x"><![CDATA[1]]></param>oops <param name="y">2</param></function>'
    raw = f"{call} Say </param>."  # nothing opened this one
    for chunks in ([raw], list(raw)):
        blocks = scan(chunks, "minicpm5")
        assert calls_of(blocks, complete=False) == [("now", '{"x": 1')]
        assert text_of(blocks) == "oops 2 Say ."


def test_a_closing_tag_that_is_not_a_marker_ends_the_broken_call() -> None:
    raw = '<invoke name="now">{"x": oops}</invoke> Write <invoke id="1"><x></invoke>.'
    for chunks in ([raw], list(raw)):
        blocks = scan(chunks, "minimax_m2")
        assert calls_of(blocks, complete=False) == [("now", '{"x": ')]
        assert text_of(blocks) == 'oops} Write <invoke id="1"><x></invoke>.'


def test_brackets_without_an_end_hide_no_text() -> None:
    raw = '[{"name": "search", "parameters": {"tags": [oops and so on.\nFor ever {"name": "now", "parameters": {}}'
    blocks = scan(list(raw), "llama3_json")
    assert text_of(blocks) == 'oops and so on.\nFor ever {"name": "now", "parameters": {}}'
    assert calls_of(blocks) == []


@pytest.mark.parametrize("raw", ["[f(x=b'z'), h(a=1)] So.", "[g(x=1), h(a=1)] So.", "[f(x=1, y=z(2)), h(a=1)] So."])
def test_a_broken_member_of_a_list_does_not_affect_the_others(raw: str) -> None:
    for chunks in ([raw], list(raw)):
        blocks = scan(chunks, "pythonic", tools=[Tool("f"), Tool("h")], tool_stream=False)
        assert calls_of(blocks) == [("h", '{"a": 1}')]
        assert text_of(blocks) == raw.replace(", h(a=1)]", "")


def test_a_broken_line_does_not_affect_the_other_lines() -> None:
    blocks = scan(list("<function_calls>\nf(x=b'z')\nnow()\n</function_calls> So."), "olmo3")
    assert calls_of(blocks) == [("now", "{}")]
    assert text_of(blocks).split() == ["f(x=b'z')", "So."]


def test_prose_in_brackets_hides_no_call() -> None:
    raw = "See [f(x [h(a=1)] and [f(x=y), see h] there."
    blocks = scan(list(raw), "pythonic", tools=[Tool("f"), Tool("h")], tool_stream=False)
    assert calls_of(blocks) == [("h", '{"a": 1}')]
    assert text_of(blocks) == "See [f(x  and [f(x=y), see h] there."


TOOL = Tool("get_weather", parameters={"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}})


def test_no_word_is_lost_if_a_call_breaks_after_any_marker() -> None:
    call = '{"name": "get_weather", "arguments": {"city": "Paris", oops'
    for form in map(load, names()):
        specials = marker_tokens(form)
        for marker in specials:
            blocks = scan([Piece(marker, special=True), Piece(call)], form, specials=specials, tools=[TOOL])
            assert "oops" in "".join(block.text for block in blocks), (form.name, marker)


@pytest.mark.parametrize(
    ("format", "raw", "reasoning"),
    [
        (
            "granite",
            'Here is my thought process: Hm <|tool_call|>[{"name": "now", "arguments": {}}] Here is my response: So.',
            'Hm [{"name": "now", "arguments": {}}]',
        ),
        (
            "gemma4",
            "<|channel>thought\nI call<|tool_call>call:now{}<tool_call|><|channel>thought\nmore<channel|>So.",
            None,
        ),
        ("hermes", f"<think>Try\n{CALL}\n\n{CALL} or not.</think>So.", None),
    ],
)
def test_a_draft_is_reasoning_however_the_reasoning_goes_on(format: str, raw: str, reasoning: str | None) -> None:
    blocks = scan([raw], format)
    assert scan(list(raw), format) == blocks
    assert calls_of(blocks) == []
    assert text_of(blocks) == "So."
    assert reasoning is None or text_of(blocks, "thinking").strip() == reasoning


def test_calls_with_which_the_model_ends_its_turn_are_sent_in_their_order() -> None:
    raw = f"<think>Hm.\n{CALL}\n{CALL}<|im_end|>"
    for options in ({}, {"parallel": False}):
        blocks = scan(list(raw), "hermes", **options)
        assert text_of(blocks, "thinking") == "Hm."
        assert len(calls_of(blocks)) == (1 if options else 2)


@pytest.mark.parametrize("name", ["id", "type", "name", "tool_name", "tool_call_id"])
def test_an_apertus_tool_may_have_the_name_of_a_usual_key(name: str) -> None:
    raw = f'<|tools_prefix|>[{{"{name}": {{"a": 1}}}}, {{"now": {{}}}}]<|tools_suffix|><|assistant_end|>'
    found = scan([raw], "apertus", tools=(Tool(name), Tool("now")))
    assert [(block.kind, block.name, block.text) for block in found] == [
        ("tool_call", name, '{"a": 1}'),
        ("tool_call", "now", "{}"),
    ]


@pytest.mark.parametrize("format", ["hermes", "qwen3_coder", "mistral", "harmony"])
def test_a_custom_call_that_a_limit_cuts_off_has_the_beginning_of_its_input(format: str) -> None:
    raw = {
        "hermes": '<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin',
        "qwen3_coder": "<tool_call>\n<function=patch>\n<parameter=input>\n*** Begin",
        "mistral": '[TOOL_CALLS]patch[ARGS]{"input": "*** Begin',
        "harmony": '<|channel|>commentary to=functions.patch <|constrain|>json<|message|>{"input": "*** Begin',
    }[format]
    tool = Tool("patch", kind="custom")
    (cut,) = scan([raw], format, truncated=True, tools=(tool,))
    assert (cut.kind, cut.complete) == ("tool_call", False)
    assert "*** Begin".startswith(cut.text)
    assert cut.text or format in ("qwen3_coder", "harmony")  # these wait for the end of the value


@pytest.mark.parametrize("kind", ["custom", "function"])
@pytest.mark.parametrize("opening", ['<tool_call>\n{"name": "patch", "arguments": ', "[TOOL_CALLS]patch[ARGS]"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_call_that_a_limit_cuts_off_inside_its_text_is_shown_once(
    kind: Literal["custom", "function"], opening: str, stream: bool
) -> None:
    """Also inside an escape: neither the call nor a half escape is shown as text beside the call."""
    text = 'a\n\\ "b" \u00e9 \U0001f600 end'
    arguments = json.dumps({"input": text})
    tool = Tool("patch", parameters={"properties": {"input": {"type": "string"}}}, kind=kind)
    format = "hermes" if opening.startswith("<") else "mistral"
    for end in range(len('{"input": "'), len(arguments) - 2):
        for chunks in ([opening + arguments[:end]], list(opening + arguments[:end])):
            (cut,) = scan(chunks, format, truncated=True, tools=(tool,), tool_stream=stream)
            assert (cut.kind, cut.complete) == ("tool_call", False)
            assert (text if kind == "custom" else arguments).startswith(cut.text), arguments[:end]


# --- state has one owner ----------------------------------------------------------------------------------------------

_CHANGES = {"append", "appendleft", "clear", "extend", "insert", "pop", "popleft", "remove", "setdefault", "update"}


def _is_own(node: ast.expr) -> bool:
    """A local name, or an attribute of `self`."""
    if isinstance(node, ast.Tuple):
        return all(map(_is_own, node.elts))
    while isinstance(node, ast.Subscript | ast.Starred):
        node = node.value
    return isinstance(node, ast.Name) or (
        isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    )


def _changed(node: ast.AST) -> list[ast.expr]:
    """What this statement or call changes in place."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign | ast.Delete):
        targets = list(node.targets)
    elif isinstance(node, ast.AnnAssign | ast.AugAssign):
        targets = [node.target]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES:
        targets = [node.func.value] if isinstance(node.func.value, ast.Attribute) else []
    return targets


def test_the_state_of_every_part_is_changed_by_its_own_methods_only() -> None:
    """The scanner, its buffer, blocks, visible output and calls. Only an exception collects notes on its way up."""
    package = Path(modelyard.scanner.__file__).parent
    found = [
        f"{path.relative_to(package)}:{node.lineno}: {ast.unparse(target)}"
        for path in sorted(package.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        for target in _changed(node)
        if not _is_own(target) and not ast.unparse(target).startswith("error.")
    ]
    assert found == []
