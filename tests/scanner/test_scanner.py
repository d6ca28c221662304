from __future__ import annotations

from modelyard.core.engine import IdLogprob, Piece
from modelyard.core.events import BlockDelta, BlockEnd, BlockStart, Event
from modelyard.core.request import Tool
from modelyard.scanner import Scanner
from modelyard.scanner.formats import load
from tests.scanner.reading import TOOLS, Heard, calls_of, heard, scan, text_of

CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
TOKENS = {"<think>": 1, "</think>": 2, "<tool_call>": 3, "</tool_call>": 4, "<|im_end|>": 5, "<|pad|>": 6}


def _scanner(format: str = "hermes", **options: object) -> Scanner:
    return Scanner(load(format), **{"tools": TOOLS, "new_id": lambda: "call_0"} | options)  # type: ignore[arg-type]


def _texts(events: list[Event]) -> list[str]:
    return [e.text for e in events if isinstance(e, BlockDelta)]


def test_plain_text_flows_at_once() -> None:
    scanner = _scanner()
    assert [_texts(scanner.feed([Piece(t)])) for t in ("Hel", "lo", " wor", "ld ")] == [
        ["Hel"],
        ["lo"],
        [" wor"],
        ["ld "],
    ]


def test_only_the_possible_marker_is_held_back() -> None:
    scanner = _scanner()
    assert _texts(scanner.feed([Piece("a < b <tool")])) == ["a < b "]
    assert _texts(scanner.feed([Piece("box")])) == ["<toolbox"]


def test_a_line_break_waits_for_the_marker_that_may_own_it() -> None:
    scanner = _scanner()
    assert _texts(scanner.feed([Piece("a\n")])) == ["a"]
    assert _texts(scanner.feed([Piece("b")])) == ["\nb"]


def test_pieces_of_one_feed_make_one_delta() -> None:
    scanner = _scanner()
    assert _texts(scanner.feed([Piece("a"), Piece("b"), Piece("c")])) == ["abc"]


def test_many_pieces_at_once_are_read_as_one_by_one() -> None:
    thought, words = "<think>|so| many| thoughts|</think>", "and| then| words| < more| and|\n|end"
    pieces = [Piece(word, word in TOKENS) for word in f"{thought}|{words}".split("|")]
    together, apart = _scanner(specials=TOKENS), _scanner(specials=TOKENS)
    all_at_once = heard([*together.feed(pieces), *together.finish()])
    one_by_one = heard([event for piece in pieces for event in apart.feed([piece])] + apart.finish())
    assert all_at_once == one_by_one
    assert text_of(all_at_once) == words.replace("|", "")
    assert together.reasoning_tokens == apart.reasoning_tokens > 2


def test_reasoning_that_comes_in_many_pieces_is_counted() -> None:
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
    assert _texts(scanner.feed([Piece('"city": "Pa')])) == ['"city": "Pa']
    assert scanner.feed([Piece('ris"}')]) == [BlockDelta(0, 'ris"}'), BlockEnd(0)]


def test_text_arguments_of_an_xml_format_stream_too() -> None:
    scanner = _scanner("qwen3_coder")
    scanner.feed([Piece("<tool_call>\n<function=write_file>\n<parameter=content>\n")])
    assert _texts(scanner.feed([Piece('say "hi"\n')])) == ['say \\"hi\\"']
    assert _texts(scanner.feed([Piece("there")])) == ["\\nthere"]


def test_held_calls_come_whole() -> None:
    scanner = _scanner(tool_stream=False)
    assert scanner.feed([Piece(CALL[:-15])]) == []
    assert heard(scanner.feed([Piece(CALL[-15:])])) == [Heard("tool_call", '{"city": "Paris"}', "get_weather")]


def test_a_held_call_that_breaks_is_text() -> None:
    raw = '<tool_call>{"name": "get_weather", "arguments": {"city": oops}}</tool_call>'
    assert text_of(scan([raw], "hermes", tool_stream=False)) == '{"name": "get_weather", "arguments": {"city": oops}}'


def test_quoted_markers_are_text_where_the_vocabulary_has_the_token() -> None:
    blocks = scan([f"Write {CALL} or <think>."], "hermes", specials=TOKENS)
    assert blocks == [Heard("text", f"Write {CALL} or <think>.")]


def test_marker_tokens_count_where_the_vocabulary_has_them() -> None:
    chunks = [Piece("<think>", True), Piece("a </think> b"), Piece("</think>", True), Piece("c")]
    assert scan(chunks, "hermes", specials=TOKENS) == [Heard("thinking", "a </think> b"), Heard("text", "c")]


def test_control_tokens_are_never_shown() -> None:
    chunks = [Piece("a"), Piece("<|pad|>", True), Piece("b"), Piece("<|im_end|>", True)]
    assert text_of(scan(chunks, "hermes", specials=TOKENS)) == "ab"
    assert text_of(scan(chunks, "plain", specials=TOKENS)) == "ab"


def test_a_marker_token_ends_a_broken_string() -> None:
    chunks = [Piece("<tool_call>", True), Piece('{"name": "get_weather", "arguments": {"city": "Par')]
    blocks = scan([*chunks, Piece("</tool_call>", True), Piece("ok")], "hermes", specials=TOKENS)
    assert calls_of(blocks, complete=False) == [("get_weather", '{"city": "Par')]
    assert text_of(blocks) == "ok"


def test_hidden_reasoning_is_parsed_and_counted() -> None:
    scanner = _scanner(show_thinking=False)
    events = scanner.feed([Piece(t) for t in ("<think>", "a", "b", "</think>", "c")])
    assert heard(events + scanner.finish()) == [Heard("text", "c")]
    assert scanner.reasoning_tokens == 3


def test_reasoning_tokens_do_not_count_calls() -> None:
    scanner = _scanner()
    scanner.feed([Piece(t) for t in ("<think>", "a", CALL[:20], CALL[20:60], CALL[60:], "b", "</think>")])
    assert scanner.reasoning_tokens == 4  # the piece that ends the call is back in the reasoning


def test_a_stop_string_ends_everything() -> None:
    scanner = _scanner(stop=["END"])
    assert _texts(scanner.feed([Piece("a E")])) == ["a "]
    assert scanner.stopped is None
    assert scanner.feed([Piece("ND b"), Piece("c")]) == []
    assert (scanner.stopped, scanner.done) == ("END", True)
    assert scanner.feed([Piece(CALL)]) == []
    assert scanner.finish() == [BlockEnd(0)]


def test_a_stop_string_in_the_last_held_text_counts() -> None:
    scanner = _scanner(stop=["\n"])
    scanner.feed([Piece("a\n")])
    scanner.finish()
    assert scanner.stopped == "\n"


def test_a_stop_string_does_not_reach_across_a_call() -> None:
    assert text_of(scan(["a E", CALL, "ND"], "hermes", stop=["END"])) == "a END"


def test_stop_strings_in_the_prompt_stop_nothing() -> None:
    assert text_of(scan(["c"], "hermes", stop=["b"], prefill="<|im_start|>assistant\na b")) == "c"


def test_one_call_is_enough_where_parallel_ones_are_unwanted() -> None:
    scanner = _scanner(parallel=False)
    events = scanner.feed([Piece(CALL + CALL)])
    assert scanner.done
    assert scanner.called
    assert len(calls_of(heard(events + scanner.finish()))) == 1


def test_an_incomplete_call_is_not_called() -> None:
    scanner = _scanner()
    scanner.feed([Piece(CALL[:60])])
    assert scanner.finish(cut=True)[-1] == BlockEnd(0, complete=False)
    assert not scanner.called


def test_tools_that_were_not_offered_leave_a_warning() -> None:
    scanner = _scanner(tools=())
    scanner.feed([Piece(CALL)])
    assert scanner.warnings == ["the model called 'get_weather', which was not offered: passed on as text"]
    assert not scanner.called


def test_server_tools_are_not_ours_to_call() -> None:
    assert calls_of(scan([CALL], "hermes", tools=[Tool("get_weather", kind="server")])) == []


def test_custom_tools_get_free_text() -> None:
    scanner = _scanner(tools=[Tool("patch", kind="custom")])
    raw = '<tool_call>{"name": "patch", "arguments": {"input": "*** Begin\\n+x"}}</tool_call>'
    events = scanner.feed([Piece(raw)])
    assert events[:2] == [BlockStart(0, "tool_call", "call_0", "patch", custom=True), BlockDelta(0, "*** Begin\n+x")]


def test_custom_tools_of_harmony_get_their_body_as_it_is() -> None:
    raw = "<|channel|>commentary to=functions.patch<|message|>*** Begin\n{+x<|call|>"
    blocks = scan([raw], "harmony", tools=[Tool("patch", kind="custom")])
    assert calls_of(blocks) == [("patch", "*** Begin\n{+x")]


def test_a_namespaced_tool_is_found_by_its_flat_name() -> None:
    scanner = _scanner(tools=[Tool("read", namespace="fs")])
    events = scanner.feed([Piece('<tool_call>{"name": "fs__read", "arguments": {}}</tool_call>')])
    assert events[0] == BlockStart(0, "tool_call", "call_0", "read", "fs")


def test_logprobs_stay_with_their_text() -> None:
    scanner = _scanner(spell=lambda i: (f"t{i}", bytes([i])))
    words = ["<think>", "a", "\n", "</think>", "\n", "b", " <", "c", CALL]
    made = [Piece(w, logprob=IdLogprob(i, -float(i), ((i, -1.0),))) for i, w in enumerate(words)]
    events = [e for piece in made for e in scanner.feed([piece])] + scanner.finish()
    told = [(e.text, [p.token for p in e.logprobs]) for e in events if isinstance(e, BlockDelta)]
    assert told == [("a", ["t1"]), ("b", ["t5"]), (" ", []), ("<c", ["t6", "t7"]), ('{"city": "Paris"}', [])]
    first = next(e for e in events if isinstance(e, BlockDelta)).logprobs[0]
    assert (first.logprob, first.bytes, first.top[0].token) == (-1.0, b"\x01", "t1")


def test_the_end_of_the_prompt_closes_nothing() -> None:
    assert scan(["b</think>c"], "think", prefill="<|im_start|>assistant\n<think>\na ") == [
        Heard("thinking", "b"),
        Heard("text", "c"),
    ]


def test_an_old_turn_of_the_prompt_leaves_nothing_open() -> None:
    prefill = "<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n"
    assert scan(["A tag."], "think", prefill=prefill) == [Heard("text", "A tag.")]


def test_an_empty_output_has_no_blocks() -> None:
    for format in ("plain", "think", "hermes", "qwen3_coder", "harmony"):
        assert scan([], format) == []
