"""What holds for every format: calls come back as they were written, junk harms nobody, markers are never shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.core.engine import Piece
from modelyard.core.output_format import OutputFormat
from modelyard.core.request import Tool
from modelyard.scanner.formats import load, names
from modelyard.scanner.lexer import alphabet
from tests.scanner.reading import Heard, calls_of, scan, text_of, tokens
from tests.scanner.writers import Unwritable, Write, written

Arguments = dict[str, Any]
Made = list[tuple[Tool, Arguments]]

_quiet = settings(max_examples=60, deadline=None, derandomize=True)
_short = settings(_quiet, max_examples=30)
_long = settings(_quiet, max_examples=100)
_text = st.text(max_size=30)
_numbers = st.integers(-(10**12), 10**12)
_leaves = st.none() | st.booleans() | _numbers | st.floats(allow_nan=False, allow_infinity=False) | _text
_json = st.recursive(
    _leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text, inner, max_size=3), max_leaves=6
)
_value_of = {
    "string": _text,
    "integer": _numbers,
    "number": st.floats(allow_nan=False, allow_infinity=False),
    "boolean": st.booleans(),
    "array": st.lists(_json, max_size=3),
    "object": st.dictionaries(_text, _json, max_size=3),
}
_words = st.lists(st.sampled_from(["Hm.", "ü😀", "so", "a < b", "{x}"]), min_size=1, max_size=4).map(" ".join)
_names = st.from_regex(r"[a-z][a-z0-9_-]{0,11}", fullmatch=True)


@st.composite
def _call(draw: st.DrawFn) -> tuple[Tool, Arguments]:
    kinds = draw(st.dictionaries(_names, st.sampled_from(sorted(_value_of)), max_size=4))
    tool = Tool(draw(_names), parameters={"type": "object", "properties": {k: {"type": t} for k, t in kinds.items()}})
    return tool, {k: draw(_value_of[t]) for k, t in kinds.items()}


_calls = st.lists(_call(), min_size=1, max_size=3, unique_by=lambda c: c[0].name)
_few_calls = st.lists(_call(), max_size=2, unique_by=lambda c: c[0].name)
_TOOL = Tool("search", parameters={"properties": {"query": {"type": "string"}, "limit": {"type": "integer"}}})
_GIVEN = {"query": "Paris", "limit": 3, "tags": ["a", "b"], "options": {"k": "v"}}


def _hermes(tool: Tool, arguments: Arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': tool.name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def _raw(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _qwen3_coder(tool: Tool, arguments: Arguments) -> str:
    given_ = "".join(f"<parameter={k}>\n{_raw(v)}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function={tool.name}>\n{given_}</function>\n</tool_call>"


def _harmony(tool: Tool, arguments: Arguments) -> str:
    head = f"<|start|>assistant<|channel|>commentary to=functions.{tool.name} <|constrain|>json<|message|>"
    return f"{head}{json.dumps(arguments)}<|call|>"


def _plain(tool: Tool, arguments: Arguments) -> str:
    return f"<tool_code>{json.dumps({'name': tool.name, 'arguments': arguments})}</tool_code>"


def _calls_only(one: Callable[[Tool, Arguments], str]) -> Write:
    return lambda reasoning, text, calls: "\n".join(one(tool, arguments) for tool, arguments in calls)


WRITERS: dict[str, Write] = {
    "hermes": _calls_only(_hermes),
    "qwen3_coder": _calls_only(_qwen3_coder),
    "harmony": _calls_only(_harmony),
    "plain": _calls_only(_plain),
} | written()


def test_every_format_with_calls_has_a_writer_here() -> None:
    assert set(WRITERS) == {name for name in names() if load(name).reads_calls}


def _write(format: str, reasoning: str, text: str, made: Made) -> str | None:
    """None: what was made cannot be written in this format."""
    try:
        return WRITERS[format](reasoning, text, made)
    except Unwritable:
        return None


def _cut(raw: str, size: int) -> list[str]:
    return [raw[i : i + size] for i in range(0, len(raw), size)]


# To make up calls takes much longer than to read them: each is written in all formats.


@_long
@given(made=_calls, size=st.integers(1, 9), stream=st.booleans())
def test_calls_come_back_as_they_were_written(made: Made, size: int, stream: bool) -> None:
    for format in sorted(WRITERS):
        if (raw := _write(format, "", "", made)) is None:
            continue
        blocks = scan(_cut(raw, size), format, tools=[tool for tool, _ in made], tool_stream=stream)
        assert [(n, json.loads(a)) for n, a in calls_of(blocks)] == [(tool.name, a) for tool, a in made], format
        assert text_of(blocks).strip() == "", format


@_long
@given(reasoning=_words, text=_words, made=_few_calls, size=st.integers(1, 9))
def test_a_whole_turn_comes_back_as_it_was_written(reasoning: str, text: str, made: Made, size: int) -> None:
    for format in sorted(written()):
        if (raw := _write(format, reasoning, text, made)) is None:
            continue
        blocks = scan(_cut(raw, size), format, tools=[tool for tool, _ in made])
        thinks = any(region.kind == "thinking" for region in load(format).regions.values())
        assert text_of(blocks, "thinking") == (reasoning if thinks else ""), format
        assert text_of(blocks) == text, format
        assert [(n, json.loads(a)) for n, a in calls_of(blocks)] == [(tool.name, a) for tool, a in made], format


@pytest.mark.parametrize("format", sorted(WRITERS))
def test_every_format_can_write_something(format: str) -> None:
    assert _write(format, "Hm.", "So.", [(_TOOL, _GIVEN)])


def _fragments(format: str) -> list[str]:
    form = load(format)
    json_bits = ['{"name": "now"', ', "arguments": {', '"x": 1', "}", "}}", "'", '"', "[", "]", ",", ":", "\\", "\\u12"]
    xml_bits = ["now>", "get_weather>", "city>", "\n", " ", "to=functions.now", "analysis", "final"]
    markers = [*form.markers, *form.inner]
    return [*markers, *json_bits, *xml_bits, *(m[: len(m) // 2] for m in markers), "word", "ü😀"]


@pytest.mark.parametrize("format", names())
@_quiet
@given(data=st.data())
def test_junk_never_raises_and_reads_the_same_in_every_cutting(format: str, data: st.DataObject) -> None:
    raw = "".join(data.draw(st.lists(st.sampled_from(_fragments(format)) | st.text(max_size=4), max_size=14)))
    options: dict[str, Any] = {
        "cut": data.draw(st.booleans()),
        "tool_stream": data.draw(st.booleans()),
        "stop": data.draw(st.lists(st.sampled_from(["\n", "wor", "}}", "ord", "<"]), max_size=2)),
        "tools": data.draw(st.sampled_from([None, (), (Tool("now"), Tool("get_weather"))])),
    }
    whole = scan([raw], format, **options)
    assert scan(list(raw), format, **options) == whole
    at = data.draw(st.integers(0, len(raw)))
    assert scan([raw[:at], raw[at:]], format, **options) == whole


@pytest.mark.parametrize("format", names())
@_quiet
@given(data=st.data())
def test_no_marker_is_ever_shown(format: str, data: st.DataObject) -> None:
    form = load(format)
    parts = [*form.markers, *form.inner, "word", '{"name": "now", "arguments": {', "}}", "now>", "\n"]
    raw = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=14)))
    for block in scan([raw], format, cut=data.draw(st.booleans())):
        assert block.kind == "tool_call" or not any(marker in block.text for marker in form.markers)


def _nested(form: OutputFormat) -> st.SearchStrategy[list[Piece]]:
    """Markers inside markers: each half is ordinary text, what stands at the heart is whole and counts as a token."""
    whole = st.sampled_from(form.markers).map(lambda marker: [Piece(marker, special=True)])

    def around(inner: st.SearchStrategy[list[Piece]]) -> st.SearchStrategy[list[Piece]]:
        halves = st.sampled_from(form.markers).flatmap(
            lambda marker: st.integers(1, len(marker) - 1).map(lambda at: (marker[:at], marker[at:]))
        )
        joined = st.lists(inner, min_size=1, max_size=2).map(lambda each: [piece for one in each for piece in one])
        return st.tuples(halves, joined).map(lambda made: [Piece(made[0][0]), *made[1], Piece(made[0][1])])

    return st.recursive(whole, around, max_leaves=6)


_between = ["word", "\n", " ", '{"name": "now", "arguments": {', "}}", "now>", "{", "[", "to=functions.now"]


def _junk(form: OutputFormat) -> st.SearchStrategy[list[Piece]]:
    other = st.sampled_from(_between).map(lambda text: [Piece(text)])
    return st.lists(_nested(form) | other, max_size=6).map(lambda each: [piece for one in each for piece in one])


def _shows_none(blocks: list[Heard], markers: Any) -> None:
    """Neither a block nor all blocks of a kind together, as clients join them."""
    for kind in ("text", "thinking"):
        shown = text_of(blocks, kind)
        assert not [marker for marker in markers if marker in shown], shown


def _at_will(data: st.DataObject) -> dict[str, Any]:
    return {
        "cut": data.draw(st.booleans()),
        "tool_stream": data.draw(st.booleans()),
        "stop": data.draw(st.lists(st.sampled_from(["wor", "|>", "<", "xyz"]), max_size=2)),
        "tools": data.draw(st.sampled_from([None, (), (Tool("now"),)])),
    }


@pytest.mark.parametrize("format", names())
@_short
@given(data=st.data())
def test_a_marker_that_is_left_when_others_are_dropped_is_not_shown(format: str, data: st.DataObject) -> None:
    form, options = load(format), _at_will(data)
    raw = "".join(piece.text for piece in data.draw(_junk(form)))
    at = data.draw(st.integers(0, len(raw)))
    whole = scan([raw], format, **options)
    _shows_none(whole, form.markers)
    assert scan(list(raw), format, **options) == whole
    assert scan([raw[:at], raw[at:]], format, **options) == whole


@pytest.mark.parametrize("format", names())
@_short
@given(data=st.data())
def test_nor_is_one_that_a_vocabulary_has_as_a_token(format: str, data: st.DataObject) -> None:
    """Some of the markers are tokens, some are text. Only what ordinary text spells in one go is a quotation."""
    form, options = load(format), _at_will(data)
    specials = data.draw(st.sets(st.sampled_from(tokens(form)), min_size=1))
    given_ = [Piece(p.text, special=p.special and p.text in specials) for p in data.draw(_junk(form))]
    whole = scan(given_, format, specials=specials, **options)
    in_one_go = "\0".join("" if piece.special else piece.text for piece in _runs(given_))
    codes = alphabet(form, frozenset(specials)).codes
    _shows_none(whole, [m for m in form.markers if m not in in_one_go or codes[m] == m])
    single = [one for p in given_ for one in ([p] if p.special else map(Piece, p.text))]
    assert scan(single, format, specials=specials, **options) == whole


def _runs(given_: list[Piece]) -> list[Piece]:
    """Ordinary text that no token interrupts as one piece."""
    runs: list[Piece] = []
    for piece in given_:
        if runs and not piece.special and not runs[-1].special:
            runs[-1] = Piece(runs[-1].text + piece.text)
        else:
            runs.append(piece)
    return runs


@pytest.mark.parametrize("format", names())
@_short
@given(data=st.data())
def test_no_marker_is_finished_that_the_prompt_began(format: str, data: st.DataObject) -> None:
    form = load(format)
    raw = "".join(piece.text for piece in data.draw(_junk(form)))
    at = data.draw(st.integers(0, len(raw)))
    blocks = scan(list(raw[at:]), format, prefill=(form.turn[0] if form.turn else "") + raw[:at])
    _shows_none(blocks, form.markers)
    assert scan([raw[at:]], format, prefill=(form.turn[0] if form.turn else "") + raw[:at]) == blocks


@pytest.mark.parametrize("format", sorted(WRITERS))
@_short
@given(data=st.data())
def test_no_word_is_lost_wherever_a_call_breaks(format: str, data: st.DataObject) -> None:
    """Words inside of a tag are protocol as long as the tag can be read."""
    raw = WRITERS[format]("", "", [(_TOOL, _GIVEN)])
    at, word = (
        data.draw(st.integers(0, len(raw))),
        data.draw(st.sampled_from(["w1. ", "}w1.", "'w1.", '"w1."', "<w1."])),
    )
    raw = f"{raw[:at]}{word}{raw[at:]} w2."
    blocks = scan([raw], format, tools=[_TOOL])
    shown = "".join(block.text for block in blocks)
    assert "w2." in shown
    assert "w1." in shown or not calls_of(blocks, complete=False)
    _shows_none(blocks, load(format).markers)
    assert scan(list(raw), format, tools=[_TOOL]) == blocks


@pytest.mark.parametrize("format", names())
@_quiet
@given(data=st.data())
def test_no_word_is_ever_lost(format: str, data: st.DataObject) -> None:
    """Words in a header of harmony are protocol, so none is opened here."""
    markers = [m for m in load(format).markers if m not in ("<|start|>", "<|channel|>")]
    parts = data.draw(st.lists(st.sampled_from(markers) | st.just(None), max_size=14))
    raw = "".join(part or f" w{i}. " for i, part in enumerate(parts))
    shown = "".join(block.text for block in scan([raw], format))
    assert [f"w{i}." for i, part in enumerate(parts) if part is None] == shown.split()
