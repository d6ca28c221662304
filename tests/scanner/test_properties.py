"""What holds for every format: calls are read as they were written, junk is harmless, and no marker is ever shown.

Random inputs come from a generator with a fixed seed, one per format: a failure is reproducible.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.core.output_format import OutputFormat, SwitchRegion
from modelyard.core.request import Tool
from modelyard.core.tokenizer import Piece
from modelyard.scanner.formats import load, names
from modelyard.scanner.lexer import marker_table
from tests.scanner.helpers import ScannedBlock, calls_of, marker_tokens, pieces, scan, text_of
from tests.scanner.writers import TURN_WRITERS, WRITERS, Arguments, Unwritable

Written = list[tuple[Tool, Arguments]]

every_format = pytest.mark.parametrize("format", names())

_SEARCH = Tool("search", parameters={"properties": {"query": {"type": "string"}, "limit": {"type": "integer"}}})
_NOW = Tool("now", parameters={"type": "object", "properties": {}})
_ARGUMENTS = {"query": "Paris", "limit": 3, "tags": ["a", "b"], "options": {"k": "v"}}


def test_every_format_with_calls_has_a_writer() -> None:
    assert set(WRITERS) == {name for name in names() if load(name).reads_calls}
    assert all(write("Hm.", "So.", [(_SEARCH, _ARGUMENTS)]) for write in WRITERS.values())


# --- what is written is read ------------------------------------------------------------------------------------------

_deterministic = settings(max_examples=30, deadline=None, derandomize=True)
_text = st.text(max_size=30)
_integers = st.integers(-(10**12), 10**12)
_floats = st.floats(allow_nan=False, allow_infinity=False)
_json = st.recursive(
    st.none() | st.booleans() | _integers | _floats | _text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text, inner, max_size=3),
    max_leaves=6,
)
_values = {
    "string": _text,
    "integer": _integers,
    "number": _floats,
    "boolean": st.booleans(),
    "array": st.lists(_json, max_size=3),
    "object": st.dictionaries(_text, _json, max_size=3),
}
_words = st.lists(st.sampled_from(["Hm.", "ü😀", "so", "a < b", "{x}"]), min_size=1, max_size=4).map(" ".join)
_names = st.from_regex(r"[a-z][a-z0-9_-]{0,11}", fullmatch=True)


@st.composite
def _call(draw: st.DrawFn) -> tuple[Tool, Arguments]:
    types = draw(st.dictionaries(_names, st.sampled_from(sorted(_values)), max_size=4))
    tool = Tool(draw(_names), parameters={"type": "object", "properties": {k: {"type": t} for k, t in types.items()}})
    return tool, {k: draw(_values[t]) for k, t in types.items()}


def _calls(min_size: int, max_size: int) -> st.SearchStrategy[Written]:
    return st.lists(_call(), min_size=min_size, max_size=max_size, unique_by=lambda c: c[0].name)


def _scan_written(
    format: str, reasoning: str, text: str, written: Written, size: int, **options: Any
) -> list[ScannedBlock] | None:
    """None: these values cannot be written in this format."""
    try:
        raw = WRITERS[format](reasoning, text, written)
    except Unwritable:
        return None
    chunks = [raw[start : start + size] for start in range(0, len(raw), size)]
    blocks = scan(chunks, format, tools=[tool for tool, _ in written], **options)
    assert [(n, json.loads(a)) for n, a in calls_of(blocks)] == [(tool.name, a) for tool, a in written], format
    return blocks


# Generating calls takes much longer than reading them, so each example is written in all formats.


@_deterministic
@given(written=_calls(1, 3), size=st.integers(1, 9), stream=st.booleans())
def test_calls_are_read_as_they_were_written(written: Written, size: int, stream: bool) -> None:
    for format in WRITERS:
        blocks = _scan_written(format, "", "", written, size, tool_stream=stream)
        assert blocks is None or text_of(blocks).strip() == "", format


@_deterministic
@given(reasoning=_words, text=_words, written=_calls(0, 2), size=st.integers(1, 9))
def test_a_complete_turn_is_read_as_it_was_written(reasoning: str, text: str, written: Written, size: int) -> None:
    for format in TURN_WRITERS:
        blocks = _scan_written(format, reasoning, text, written, size)
        if blocks is not None:
            thinks = any(region.kind == "thinking" for region in load(format).regions.values())
            assert text_of(blocks, "thinking") == (reasoning if thinks else ""), format
            assert text_of(blocks) == text, format


_WRITE = Tool("write", parameters={"properties": {"path": {"type": "string"}, "content": {"type": "string"}}})
_OTHER_TOKENS = ("<|im_end|>", "</s>", "<|other|>")  # control tokens that most families do not know


def _values_with_markers(format: str) -> Iterable[str]:
    """Every marker of the family at the start, in the middle and at the end of a text, and calls of the family."""
    form = load(format)
    for marker in dict.fromkeys((*form.markers, *form.inner_markers, *_OTHER_TOKENS)):
        yield from (f"a {marker} b", marker, f"{marker} b", f"a {marker}", f"a{marker}b\n{marker}\nc")
    calls = [WRITERS[format]("", "", [call]) for call in ((_NOW, {}), (_WRITE, {"path": "x", "content": "y"}))]
    yield from (f"see {calls[0]} there", f"see {calls[1]} there", calls[1], "\n".join(calls))


@pytest.mark.parametrize("as_tokens", [False, True], ids=["spelled", "tokens"])
@pytest.mark.parametrize("format", WRITERS)
def test_an_argument_keeps_the_markup_of_the_family_and_all_control_tokens(format: str, as_tokens: bool) -> None:
    form = load(format)
    known = (*marker_tokens(form), *_OTHER_TOKENS, *(m for m in form.inner_markers if not m.endswith("=")))
    tokens = sorted(set(known), key=len, reverse=True) if as_tokens else []
    for value in _values_with_markers(format):
        written: Written = [(_WRITE, {"path": "p", "content": value}), (_NOW, {})]
        try:
            raw = WRITERS[format]("", "So.", written)
        except Unwritable:
            continue
        given = pieces(raw, tokens)
        blocks = scan(given, format, tools=[_WRITE, _NOW], specials=tokens)
        assert [(n, json.loads(a)) for n, a in calls_of(blocks)] == [(tool.name, a) for tool, a in written], value
        assert text_of(blocks).strip() == ("So." if "So." in raw else ""), value
        single = [one for p in given for one in ([p] if p.special else map(Piece, p.text))]
        assert scan(single, format, tools=[_WRITE, _NOW], specials=tokens) == blocks, value


# --- junk -------------------------------------------------------------------------------------------------------------

_ALPHABET = (
    "abcXYZ019 _-.,;:!?<>[]{}()|/\\\"'`=*+#&%$~^@\t\n\r\x00\x0b\x1f\x7f\xa0äßéΩжא中の한▁｜😀👩\u200d\u0301\ufeff\ufffd"
)
_JSON_PARTS = ['{"name": "now"', ', "arguments": {', '"x": 1', "}", "}}", "'", '"', "[", "]", ",", ":", "\\", "\\u12"]
_TAG_PARTS = ["now>", "get_weather>", "city>", "\n", " ", "to=functions.now", "analysis", "final", "word", "ü😀"]
_BETWEEN = ["word", "\n", " ", '{"name": "now", "arguments": {', "}}", "now>", "{", "[", "to=functions.now"]


def _examples(format: str, property_name: str, count: int) -> Iterable[random.Random]:
    for index in range(count):
        yield random.Random(f"{format} {property_name} {index}")


def _random_text(rng: random.Random) -> str:
    return "".join(rng.choice(_ALPHABET) for _ in range(rng.randrange(5)))


def _random_options(rng: random.Random, stops: list[str]) -> dict[str, Any]:
    return {
        "truncated": rng.random() < 0.5,
        "tool_stream": rng.random() < 0.5,
        "stop": rng.sample(stops, rng.choice([0, 0, 1, 2])),
        "tools": rng.choice([None, (), (Tool("now"), Tool("get_weather"))]),
    }


def _in_two(rng: random.Random, raw: str) -> list[str]:
    cut = rng.randrange(len(raw) + 1)
    return [raw[:cut], raw[cut:]]


@every_format
def test_junk_reads_the_same_in_all_chunks_and_no_marker_is_shown(format: str) -> None:
    form = load(format)
    markers = [*form.markers, *form.inner_markers]
    parts = [*markers, *_JSON_PARTS, *_TAG_PARTS, *(m[: len(m) // 2] for m in markers)]
    for rng in _examples(format, "junk", 30):
        chosen = [rng.choice(parts) if rng.random() < 0.75 else _random_text(rng) for _ in range(rng.randrange(15))]
        raw, options = "".join(chosen), _random_options(rng, ["\n", "wor", "}}", "ord", "<"])
        blocks = scan([raw], format, **options)
        assert scan(list(raw), format, **options) == blocks, raw
        assert scan(_in_two(rng, raw), format, **options) == blocks, raw
        _assert_no_marker(blocks, form.markers)


def _assert_no_marker(blocks: list[ScannedBlock], markers: Iterable[str]) -> None:
    """Neither in a block nor in all blocks of a kind together, as clients join them. Between quotes it is text."""
    markers = tuple(markers)
    quoted = re.compile(rf"""(["'`])(?:{"|".join(map(re.escape, markers)) or "(?!)"})(?=\1)""")
    for kind in ("text", "thinking"):
        shown = quoted.sub("", text_of(blocks, kind))
        assert not [marker for marker in markers if marker in shown], shown


def _nested(rng: random.Random, form: OutputFormat, depth: int = 0) -> list[Piece]:
    """Markers inside markers: each half is ordinary text, and the innermost marker is complete and a token."""
    marker = rng.choice(form.markers)
    if depth == 3 or rng.random() < 0.4:
        return [Piece(marker, special=True)]
    cut = rng.randrange(1, len(marker))
    inner = [piece for _ in range(rng.choice([1, 1, 2])) for piece in _nested(rng, form, depth + 1)]
    return [Piece(marker[:cut]), *inner, Piece(marker[cut:])]


def _nested_junk(rng: random.Random, form: OutputFormat) -> list[Piece]:
    return [
        piece
        for _ in range(rng.randrange(7))
        for piece in (_nested(rng, form) if rng.random() < 0.6 else [Piece(rng.choice(_BETWEEN))])
    ]


@every_format
def test_a_marker_that_remains_when_others_are_dropped_is_not_shown(format: str) -> None:
    form = load(format)
    for rng in _examples(format, "nested", 20):
        raw = "".join(piece.text for piece in _nested_junk(rng, form))
        options = _random_options(rng, ["wor", "|>", "<", "xyz"])
        blocks = scan([raw], format, **options)
        _assert_no_marker(blocks, form.markers)
        assert scan(list(raw), format, **options) == blocks, raw
        assert scan(_in_two(rng, raw), format, **options) == blocks, raw


@every_format
def test_a_remaining_marker_is_not_shown_if_some_markers_are_tokens(format: str) -> None:
    """Only what ordinary text spells without an interruption is a quotation."""
    form = load(format)
    tokens = marker_tokens(form)
    for rng in _examples(format, "tokens", 20):
        options = _random_options(rng, ["wor", "|>", "<", "xyz"])
        specials = set(rng.sample(tokens, rng.randint(1, len(tokens))))
        given = [Piece(p.text, special=p.special and p.text in specials) for p in _nested_junk(rng, form)]
        blocks = scan(given, format, specials=specials, **options)
        uninterrupted = "".join("\0" if piece.special else piece.text for piece in given)
        codes = marker_table(form, frozenset(specials)).codes
        _assert_no_marker(blocks, [m for m in form.markers if m not in uninterrupted or codes[m] == m])
        single = [one for p in given for one in ([p] if p.special else map(Piece, p.text))]
        assert scan(single, format, specials=specials, **options) == blocks, given


@every_format
def test_a_marker_that_the_prompt_began_is_not_completed_visibly(format: str) -> None:
    form = load(format)
    for rng in _examples(format, "prompt", 20):
        begun, raw = _in_two(rng, "".join(piece.text for piece in _nested_junk(rng, form)))
        prefill = (form.turn_starts[0] if form.turn_starts else "") + begun
        blocks = scan(list(raw), format, prefill=prefill)
        _assert_no_marker(blocks, form.markers)
        assert scan([raw], format, prefill=prefill) == blocks, (begun, raw)


# --- broken calls -----------------------------------------------------------------------------------------------------

_OF_XML = "<![CDATA["  # not only of a family


def _broken_calls(rng: random.Random, form: OutputFormat, raw: str) -> str:
    """The turn with one to three of its markers dropped, doubled, moved, inserted or cut."""
    markers = sorted((*form.markers, *form.inner_markers), key=len, reverse=True)
    parts = [part for part in re.split(f"({'|'.join(map(re.escape, markers))})", raw) if part]
    for _ in range(rng.choice([1, 1, 2, 3])):
        at = rng.choice([i for i, part in enumerate(parts) if part in markers] or [0])
        change = rng.randrange(5)
        if change == 0:
            parts[at] = ""
        elif change == 1:
            parts.insert(at, parts[at])
        elif change == 2:
            parts.insert(rng.randrange(len(parts)), parts.pop(at))
        elif change == 3:
            parts.insert(at, rng.choice(markers))
        else:
            parts[at] = parts[at][: len(parts[at]) // 2]
    return "".join(parts)


@pytest.mark.parametrize("format", WRITERS)
def test_no_tag_of_a_broken_call_is_shown_whatever_its_markers(format: str) -> None:
    form = load(format)
    turn = WRITERS[format]("Hm.", "So.", [(_SEARCH, {"query": "Paris", "limit": 3}), (_NOW, {})])
    for rng in _examples(format, "markers", 15):
        raw = f"{_broken_calls(rng, form, turn)} end."
        options: dict[str, Any] = {"tools": rng.choice([None, [_SEARCH, _NOW]]), "truncated": rng.random() < 0.3}
        blocks = scan([raw], format, **options)
        # Where calls have messages of their own, their tags are text in all other messages.
        inner = () if form.has_messages else form.inner_markers
        _assert_no_marker(blocks, [m for m in (*form.markers, *inner) if m != _OF_XML])
        assert scan(list(raw), format, **options) == blocks, raw


@pytest.mark.parametrize("format", TURN_WRITERS)
def test_what_a_limit_cuts_off_is_never_a_complete_call(format: str) -> None:
    """Wherever it cuts, streamed or not: only calls that are complete count, and all of them do."""
    written: Written = [(_NOW, {}), (_SEARCH, {"query": "Paris", "limit": 3})]
    raw = WRITERS[format]("Hm.", "So.", written)
    counts = []
    for cut in range(len(raw) % 7, len(raw), 7):
        found = []
        for stream in (True, False):
            blocks = scan([raw[:cut]], format, tools=[_SEARCH, _NOW], truncated=True, tool_stream=stream)
            found.append([(name, json.loads(arguments)) for name, arguments in calls_of(blocks)])
        assert found[0] == found[1], raw[:cut]
        assert found[0] == [(tool.name, given) for tool, given in written[: len(found[0])]], raw[:cut]
        counts.append(len(found[0]))
    assert counts == sorted(counts)


@pytest.mark.parametrize("format", WRITERS)
def test_no_piece_of_a_marker_is_shown_where_a_limit_cuts_the_output(format: str) -> None:
    """With tools and without. A bare marker is text until it is a call."""
    form = load(format)
    raw = WRITERS[format]("Hm.", "So.", [(_SEARCH, {"query": "Paris", "limit": 3}), (_NOW, {})]) + " end."
    begun = tuple({m[:size] for m in (*form.markers, *form.inner_markers) if m != _OF_XML for size in range(2, len(m))})
    for cut in range(1 + len(raw) % 7, len(raw), 7):
        for tools in ([_SEARCH, _NOW], None):
            blocks = scan([raw[:cut]], format, tools=tools, truncated=True)
            shown = [block.text for block in blocks[-1:] if block.kind != "tool_call"]
            assert not any(text.endswith(begun) for text in shown), raw[:cut]
            assert scan(list(raw[:cut]), format, tools=tools, truncated=True) == blocks, raw[:cut]


@every_format
def test_a_marker_between_quotes_is_text(format: str) -> None:
    form = load(format)
    tokens = marker_tokens(form)
    ends = {*form.stop_tokens, *form.bare_markers}
    inner = (m for m in form.inner_markers if not m.startswith(form.call_markers))
    for marker in (m for m in (*form.markers, *inner) if m not in ends and not m.endswith("=")):
        for text in (f"Use `{marker}` here.", f'The tag "{marker}".', f"(«{marker}»)"):
            for cut, known in (([Piece(text)], []), (pieces(text, tokens), tokens), (list(map(Piece, text)), [])):
                blocks = scan(cut, format, specials=known)
                assert [block.text for block in blocks] == [text], marker


@pytest.mark.parametrize("as_tokens", [False, True], ids=["spelled", "tokens"])
@pytest.mark.parametrize("format", WRITERS)
def test_what_is_left_of_a_call_is_not_text_wherever_it_ends(format: str, as_tokens: bool) -> None:
    """The first or the second call, at every truncation point, whether a limit or the model ends it, streamed or not:
    no word of it is text, and only complete calls are sent as such. Two beginnings are text: half of the first marker,
    if the model ended there, and what comes before the name behind a bare marker, which is text by definition."""
    form = load(format)
    tokens = marker_tokens(form) if as_tokens else []
    search = Tool("search", parameters={**_SEARCH.parameters, "required": ["query", "limit"]})
    written: Written = [(_NOW, {}), (search, {"query": "Paris", "limit": 3})]
    for calls in (written, written[1:]):
        raw, alone = WRITERS[format]("", "", calls), WRITERS[format]("", "", calls[:-1]) if calls[1:] else ""
        start = next(at for at, (one, other) in enumerate(zip(raw, alone + "\0", strict=False)) if one != other)
        ends = list(accumulate(len(p.text) for p in pieces(raw, tokens)))
        inside = {
            at
            for p, end in zip(pieces(raw, tokens), ends, strict=True)
            if p.special
            for at in range(end - len(p.text) + 1, end)
        }
        for cut in range(start + 1, len(raw)):
            shown = raw[:cut]
            for truncated in (False, True) if cut not in inside else ():
                found = []
                for stream in (True, False):
                    options: dict[str, Any] = {"truncated": truncated, "tool_stream": stream, "specials": tokens}
                    blocks = scan(pieces(shown, tokens), format, tools=[search, _NOW], **options)
                    found.append(([(n, json.loads(a)) for n, a in calls_of(blocks)], text_of(blocks).strip()))
                complete, text = found[0]
                assert found[1] == found[0], shown[start:]
                assert complete == [(tool.name, one) for tool, one in calls[: len(complete)]], shown[start:]
                is_first = not calls[1:]
                begins_marker = is_first and not truncated and any(m.startswith(text) for m in form.markers)
                before_name = is_first and bool(form.bare_markers) and len(shown) <= raw.index("search")
                assert len(text) <= 1 or begins_marker or before_name, shown[start:]  # one character may be anything


# --- calls inside reasoning -------------------------------------------------------------------------------------------


def _inside_reasoning(format: str) -> tuple[str, str] | None:
    """A turn that opens its reasoning and calls there, and what closes the reasoning. None: it has no such tags."""
    form = load(format)
    kinds = {name: region.kind for name, region in form.regions.items()}
    switches = [(m, a) for r in form.regions.values() for m, a in r.markers.items() if isinstance(a, SwitchRegion)]
    opening = next(((m, a.region) for m, a in switches if kinds[a.region] == "thinking"), None)
    if opening is None:
        return None
    marker, region = opening
    closing = next(m for m, a in switches if kinds[a.region] == "text" and m in form.regions[region].markers)
    call = WRITERS[format]("", "", [(_NOW, {})])
    for switch, _ in switches:
        call = call.replace(switch, "")
    return f"{marker}Hm. {call}", closing


@pytest.mark.parametrize("format", WRITERS)
def test_a_call_inside_reasoning_counts_only_where_the_family_places_it(format: str) -> None:
    form, inside = load(format), _inside_reasoning(format)
    if inside is None or form.has_messages:
        return
    opened, closing = inside
    drafted = scan([f"{opened} More.{closing}So."], format, tools=[_NOW])
    assert [name for name, _ in calls_of(drafted)] == (["now"] if form.calls_in_reasoning else []), format
    assert text_of(drafted, "thinking").startswith("Hm.")
    assert "More." in text_of(drafted, "thinking") + text_of(drafted)
    last = scan([opened], format, tools=[_NOW])
    assert [name for name, _ in calls_of(last)] == ["now"], format
    cut_off = scan([opened], format, tools=[_NOW], truncated=True)
    assert bool(calls_of(cut_off)) == form.calls_in_reasoning, format


@pytest.mark.parametrize("format", WRITERS)
def test_a_call_that_reasoning_quotes_shows_no_tag_whatever_follows_it(format: str) -> None:
    """A bracket or an element that is no call of an offered tool follows, as ordinary text."""
    form, inside = load(format), _inside_reasoning(format)
    if inside is None or form.has_messages:
        return
    opened, closing = inside
    markers = [m for m in (*form.markers, *form.inner_markers) if m != _OF_XML]
    for after in ('<parameter name="other">', '<param name="other">', '<invoke name="other">', "{x}", "[x]", "```x```"):
        raw = f"{opened}\n{after} More.{closing}So."
        blocks = scan([raw], format, tools=[_NOW])
        quoted = [m for m in markers if m not in after and m in text_of(blocks, "thinking")]
        assert not quoted, raw
        assert scan(list(raw), format, tools=[_NOW]) == blocks, raw


# --- no word is lost --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", WRITERS)
def test_no_word_is_lost_wherever_a_call_breaks(format: str) -> None:
    """Words inside of a tag are not shown as long as the tag can be read."""
    call = WRITERS[format]("", "", [(_SEARCH, _ARGUMENTS)])
    for rng in _examples(format, "broken", 20):
        before, after = _in_two(rng, call)
        word = rng.choice(["w1. ", "}w1.", "'w1.", '"w1."', "<w1."])
        raw = f"{before}{word}{after} w2."
        blocks = scan([raw], format, tools=[_SEARCH])
        shown = "".join(block.text for block in blocks)
        assert "w2." in shown, raw
        assert "w1." in shown or not calls_of(blocks, complete=False), raw
        _assert_no_marker(blocks, load(format).markers)
        assert scan(list(raw), format, tools=[_SEARCH]) == blocks, raw


@every_format
def test_no_word_between_markers_is_lost(format: str) -> None:
    """Words in a header of harmony are not shown, so none is opened here."""
    markers = [m for m in load(format).markers if m not in ("<|start|>", "<|channel|>")]
    for rng in _examples(format, "words", 20):
        parts = [rng.choice(markers) if rng.random() < 0.5 else None for _ in range(rng.randrange(15))]
        raw = "".join(part or f" w{i}. " for i, part in enumerate(parts))
        shown = "".join(block.text for block in scan([raw], format))
        assert shown.split() == [f"w{i}." for i, part in enumerate(parts) if part is None], raw
