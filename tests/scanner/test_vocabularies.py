"""The gate is reality: a text in the tokens of a real vocabulary comes out as it went in, in every format.

A vocabulary is loaded once, for all tests of this file. Each is scanned in the formats of its own models and in a few
others in turn, so that every format meets several vocabularies; what is cheap runs in all of them. A text is fed token
by token, in random groups, and at once.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any

import msgspec
import pytest

from modelyard import libllama
from modelyard.core.output_format import OutputFormat
from modelyard.core.tokenizer import IdLogprob, Piece
from modelyard.scanner.formats import load, names
from modelyard.tokenizer.gguf import GgufTokenizer
from tests.corpus import CORPUS
from tests.scanner.helpers import text_of
from tests.scanner.test_cases import CASES, _cuts_a_marker, _expected, _options, _quotations, _summary
from tests.scanner.vocabulary_tokens import (
    CUTS,
    SPELLINGS,
    Result,
    Turn,
    VocabularyTokens,
    difference,
    is_call,
    quote_in_arguments,
    quote_in_prose,
    spelled,
    spelling,
    thinks,
    write_call,
)
from tests.scanner.writers import WRITERS, write_turn
from tests.vocabularies import CONVERTED, GGUF, TOKENIZERS, VOCABULARIES, Vocabulary, open_vocabulary

# These vocabularies cannot spell every text. It is what the library itself decodes that must come out of them.
LOSSY = {
    "bert-bge.gguf": "lower case, words",
    "nomic-bert-moe.gguf": "one kind of white space",
    "falcon.gguf": "no token for U+000B",
    "minilm": "lower case, words",
    "aya": "one kind of white space",
    "bge-m3": "one kind of white space",
    "jiutian": "no line breaks",
    "exaone": "compatibility characters (NFKC)",
    "ernie-4.5": "a space after each digit, which is an added token",
    "ernie-4.5.gguf": "a space after each digit, which is an added token",
}
OTHERS = 1  # formats of other families for each vocabulary, with all cuts; the product below has every pair
counts: Counter[str] = Counter()


class Opened(VocabularyTokens):
    """A vocabulary, and the corpus in it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(open_vocabulary(vocabulary.name))
        self.vocabulary = vocabulary
        self.name = vocabulary.name

    @cached_property
    def formats(self) -> tuple[str, ...]:
        """Those of its models, and some others in turn."""
        first = [*VOCABULARIES].index(self.name) * OTHERS
        others = [names()[at % len(names())] for at in range(first, first + OTHERS)]
        return tuple(dict.fromkeys((*self.vocabulary.formats, *others)))

    @cached_property
    def between(self) -> str:
        """What separates the texts of a document."""
        return "\n\n" if self.spells(self.encode("\n\n"), "\n\n") else "-"

    @cached_property
    def parts(self) -> tuple[dict[str, list[Piece]], ...]:
        """The texts in every spelling of arguments, those that the vocabulary can spell so."""
        found: list[dict[str, list[Piece]]] = []
        for spell in SPELLINGS:
            found.append({})
            for text in (self.between, *self.exact):
                written = spell(text)
                is_plain = any(control in written for control in self.control)
                ids = self.encode_plain(written) if is_plain else self.encode(written)
                if self.spells(ids, written):
                    found[-1][text] = self.joined(ids)
        return tuple(found)

    def library_text(self, ids: Sequence[int]) -> str:
        """What llama.cpp or the tokenizers library itself makes of the tokens."""
        if not isinstance(self.tokenizer, GgufTokenizer):
            return str(self.tokenizer._tokenizer.decode(list(ids), skip_special_tokens=False))
        buffer = ctypes.create_string_buffer(16 * len(ids) + 4096)
        given = (ctypes.c_int32 * len(ids))(*ids)
        count = _llama_detokenize()(self.tokenizer._vocab, given, len(ids), buffer, len(buffer), False, True)
        return buffer.raw[:count].decode("utf-8", "replace")

    @cached_property
    def exact(self) -> dict[str, list[int]]:
        """The texts that the vocabulary can spell, with all added tokens that they spell, as a model writes them."""
        found = {}
        for text in CORPUS.values():
            is_plain = any(control in text for control in self.control)
            ids = self.encode_plain(text) if is_plain else self.encode(text)
            if self.spells(ids, text):
                found[text] = ids
        return found


@cache
def _llama_detokenize() -> Any:
    function = libllama.load().raw.llama_detokenize
    function.restype = ctypes.c_int32
    function.argtypes = [
        *(ctypes.c_void_p, ctypes.POINTER(ctypes.c_int32), ctypes.c_int32),
        *(ctypes.c_char_p, ctypes.c_int32, ctypes.c_bool, ctypes.c_bool),
    ]
    return function


@pytest.fixture(scope="module", params=VOCABULARIES)
def opened(request: pytest.FixtureRequest) -> Opened:
    return Opened(VOCABULARIES[request.param])


def test_the_vocabularies_are_of_many_families() -> None:
    assert len(GGUF) == 19
    assert len(TOKENIZERS) >= 40
    assert len(CONVERTED) >= 15
    assert len({vocabulary.family for vocabulary in VOCABULARIES.values()}) >= 25


# --- encode → detokenize ----------------------------------------------------------------------------------------------


def test_a_text_is_detokenized_as_it_was_encoded(opened: Opened) -> None:
    """Unless the vocabulary itself cannot spell it."""
    for name, text in CORPUS.items():
        for encode in (opened.encode, opened.encode_plain):
            ids = encode(text)
            found = "".join(piece.text for piece in opened.pieces(ids))
            if found == text:
                assert opened.tokenizer.decode(ids).removeprefix(" ") == text, name
                continue
            known = opened.name in LOSSY or (name == "struck" and "</s>" in opened.texts)
            assert known, (name, found)
            decoded = opened.library_text(ids)
            assert decoded != text, (name, found)
            assert "".join(found.split()) == "".join(decoded.split()), name  # without what a first token loses


def test_a_vocabulary_that_is_called_lossy_is(opened: Opened) -> None:
    assert (len(opened.exact) < len(CORPUS)) == (opened.name in LOSSY)


# --- encode → detokenize → scan ---------------------------------------------------------------------------------------


def _cuts(opened: Opened, format: str) -> tuple[str, ...]:
    """All of them in the formats of the vocabulary's own models, else one after another."""
    if format in opened.vocabulary.formats:
        return CUTS
    return (CUTS[(names().index(format) + len(opened.name)) % len(CUTS)],)


def _document(opened: Opened, form: OutputFormat) -> tuple[str, list[int]]:
    """The corpus, without what this vocabulary cannot spell and without the markers of this format."""
    markers = (*form.markers, *form.inner_markers)
    texts = {text: ids for text, ids in opened.exact.items() if not any(marker in text for marker in markers)}
    between = opened.encode("\n\n")
    if not opened.spells(between, "\n\n"):
        between = opened.encode("-")
    ids = [id for each in texts.values() for id in (*each, *between)][: -len(between)]
    return "".join(piece.text for piece in opened.pieces(between)).join(texts), ids


def _assert_right(*results: tuple[str, Result]) -> None:
    wrong = []
    for what, result in results:
        counts[what] += result.checked
        counts.update(result.left_out)
        wrong += result.wrong
    assert not wrong


def test_visible_text_is_shown_as_it_was_written(opened: Opened) -> None:
    result = Result()
    for format in opened.formats if opened.exact else ():
        form = load(format)
        text, ids = _document(opened, form)
        pieces = Turn(opened, form, write_turn(format, "", text, []), text).pieces(ids, result)
        for cut in _cuts(opened, format) if pieces else ():
            result.checked += 1
            if (found := text_of(opened.scan(form, pieces, cut))) != text:
                result.wrong.append((format, cut, difference(found, text)))
    _assert_right(("text", result))


def test_reasoning_is_shown_as_it_was_written(opened: Opened) -> None:
    result = Result()
    for format in opened.formats if opened.exact else ():
        form = load(format)
        if not thinks(form):
            continue
        text, ids = _document(opened, form)
        pieces = Turn(opened, form, write_turn(format, text, "So.", []), text).pieces(ids, result)
        for cut in _cuts(opened, format) if pieces else ():
            result.checked += 1
            blocks = opened.scan(form, pieces, cut)
            if (found := text_of(blocks, "thinking")) != text or text_of(blocks) != "So.":
                result.wrong.append((format, cut, difference(found, text), text_of(blocks)[:40]))
    _assert_right(("thinking", result))


def test_reasoning_that_the_prompt_opened_is_shown_as_it_was_written(opened: Opened) -> None:
    result = Result()
    for format in opened.vocabulary.formats if opened.exact else ():
        form = load(format)
        for block in form.reasoning_blocks[:1]:
            text, ids = _document(opened, form)
            pieces = Turn(opened, form, f"{text}{block.ends[0]}", text).pieces(ids, result)
            result.checked += bool(pieces)
            prompt = f"{form.turn_starts[0] if form.turn_starts else ''}{block.start}"
            blocks = opened.scan(form, pieces, "in groups", prefill=prompt)
            if pieces and (found := text_of(blocks, "thinking")) != text:
                result.wrong.append((format, block.start, difference(found, text)))
    _assert_right(("thinking", result))


def test_text_with_log_probabilities_is_the_same(opened: Opened) -> None:
    result = Result()
    for format in opened.vocabulary.formats[:1] if opened.exact else ():
        form = load(format)
        text, ids = _document(opened, form)
        pieces = Turn(opened, form, write_turn(format, "", text, []), text).pieces(ids, result)
        scored = [msgspec.structs.replace(p, logprob=IdLogprob(p.token, -0.5)) if p.token >= 0 else p for p in pieces]
        result.checked += bool(pieces)
        options = {"token_text": lambda id: (str(id), opened.tokenizer.token_bytes(id))}
        if pieces and (found := text_of(opened.scan(form, scored, "in groups", **options))) != text:
            result.wrong.append((format, difference(found, text)))
    _assert_right(("text", result))


def test_an_argument_is_sent_as_it_was_written(opened: Opened) -> None:
    result = Result()
    for format in opened.formats if opened.exact else ():
        form = load(format)
        value, _ = _document(opened, form)
        raw = write_call(format, value) if format in WRITERS else None
        if raw is None:
            continue
        turn = Turn(opened, form, raw, spelled(raw, value))
        for cut in _cuts(opened, format):
            # A value may also be written with every token that it spells, and sent in one piece.
            pieces = turn.pieces_plain(result) if cut == "in groups" else turn.pieces_spelled(result)
            result.checked += bool(pieces)
            blocks = opened.scan(form, pieces, cut, tool_stream=cut != "at once")
            if pieces and not is_call(blocks, value):
                result.wrong.append((format, cut, [difference(block.text, value) for block in blocks]))
    _assert_right(("argument", result))


# --- every vocabulary with every format -------------------------------------------------------------------------------


def _compose(opened: Opened, format: str, kind: str) -> tuple[str, str, list[Piece]] | None:
    """A turn with the corpus as text, reasoning or argument, in pieces: the text, the raw turn and its pieces."""
    form, way = load(format), spelling(format) if kind == "argument" else 0
    markers = (*form.markers, *form.inner_markers)
    texts = [
        text for text in opened.exact if text in opened.parts[way] and not any(marker in text for marker in markers)
    ]
    text = opened.between.join(texts)
    if kind == "argument":
        raw, payload = write_call(format, text) or "", SPELLINGS[way](text)
    else:
        raw, payload = write_turn(format, *((text, "So.") if kind == "thinking" else ("", text)), []), text
    before, _, after = raw.partition(payload)
    pieces = [piece for text in texts for piece in (*opened.parts[way][opened.between], *opened.parts[way][text])]
    pieces = pieces[len(opened.parts[way][opened.between]) :]
    head, tail = (opened.pieces(opened.encode_marked(part, markers)) for part in (before, after))
    made = [*head, *pieces, *tail]
    return (text, raw, made) if raw and "".join(piece.text for piece in made) == raw else None


def test_every_format_keeps_text_reasoning_and_arguments(opened: Opened) -> None:
    """The whole product. Runs of ordinary tokens are one piece here: the scanner sees only their text, and that cuts
    inside of it change nothing is tested above and for each format; a marker, an added token and a control token is a
    piece of its own."""
    result = Result()
    for format in names() if opened.exact else ():
        form = load(format)
        for kind in ("text", *(["thinking"] if thinks(form) else []), *(["argument"] if format in WRITERS else [])):
            made = _compose(opened, format, kind)
            if made is None:
                result.left_out["a turn that the vocabulary cannot spell"] += 1
                continue
            text, _, pieces = made
            blocks = opened.scan(form, pieces, CUTS[(result.checked + len(opened.name)) % len(CUTS)])
            result.checked += 1
            shown = text_of(blocks, kind) if kind != "argument" else ""
            if not (is_call(blocks, text) if kind == "argument" else shown == text):
                result.wrong.append((format, kind, difference(shown, text), blocks[:1]))
    _assert_right(("product", result))


# --- the family's own markup ------------------------------------------------------------------------------------------


def test_markup_that_an_argument_quotes_is_sent(opened: Opened) -> None:
    others = [text for text, _ in _some([(text, 0) for text in sorted(opened.control)], 4)]
    quoted = (*others, "</s>", "<|im_end|>", "</think>", "<b>x</b>")
    results = [quote_in_arguments(opened, format, *quoted) for format in opened.vocabulary.formats]
    _assert_right(*(("markup in arguments", result) for result in results))


def test_markup_that_prose_quotes_is_shown(opened: Opened) -> None:
    results = [quote_in_prose(opened, format) for format in opened.vocabulary.formats]
    _assert_right(*(("markup in prose", result) for result in results))


# --- all tokens, in all formats ---------------------------------------------------------------------------------------


def _some(items: Sequence[tuple[str, int]], count: int) -> Sequence[tuple[str, int]]:
    """Some of them, from everywhere."""
    return items[:: max(1, len(items) // count)]


def test_added_tokens_are_text_unless_the_format_names_them(opened: Opened) -> None:
    """And control tokens are not shown."""
    result = Result()
    added = [(opened.pieces([id])[0].text, id) for id in opened.tokenizer.added.values()]
    words = [
        *_some([each for each in added if each[0].strip()], 40),
        *_some([e for e in added if not e[0].strip()], 20),
    ]
    controls = _some([(text, opened.ids[text]) for text in sorted(opened.control)], 20)
    letter, start = opened.encode_plain("a"), opened.encode_plain("So:")
    for format in names():
        form = load(format)
        markers = (*form.markers, *form.bare_markers, *form.inner_markers)
        shown = [(text, id) for text, id in words if not any(marker in text for marker in markers)]
        hidden = [(t, id) for t, id in controls if not any(marker in t or t in marker for marker in markers)]
        written = "So:" + "".join(f"{text}a" for text, _ in (*shown, *hidden))
        ids = [*start, *(each for _, id in (*shown, *hidden) for each in (id, *letter))]
        pieces = Turn(opened, form, write_turn(format, "", written, []), written).pieces(ids, result)
        text = "So:" + "".join(f"{text}a" for text, _ in shown) + "a" * len(hidden)
        result.checked += bool(pieces)
        if pieces and (found := text_of(opened.scan(form, pieces, "in groups"))) != text:
            result.wrong.append((format, difference(found, text)))
    _assert_right(("added tokens", result))


# --- the cases of each format -----------------------------------------------------------------------------------------


def test_a_case_reads_the_same_in_the_tokens_of_its_family(opened: Opened) -> None:
    """With its markers as the tokens that its vocabulary has, control tokens or not."""
    result = Result()
    for format in opened.vocabulary.formats:
        form = load(format)
        markers = (*form.markers, *form.inner_markers)
        for at, case in enumerate(CASES[format]):
            ids = opened.encode_quoting(case["raw"], _quotations(format, case), markers)
            if _cuts_a_marker(case, opened.texts.intersection(markers)) or not opened.spells(ids, case["raw"]):
                result.left_out["a case that the vocabulary cannot spell, or that cuts a token"] += 1
                continue
            result.checked += 1
            found = _summary(opened.scan(form, opened.pieces(ids), CUTS[at % len(CUTS)], **_options(case)))
            if found != _expected(case):
                result.wrong.append((format, case["name"], found, _expected(case)))
    _assert_right(("cases", result))


def test_the_counts_are_those_of_a_gate() -> None:
    """The last test of the file: what rules leave out is the lesser part."""
    checked = {
        "product",
        "text",
        "thinking",
        "argument",
        "markup in arguments",
        "markup in prose",
        "added tokens",
        "cases",
    }
    done = sum(count for what, count in counts.items() if what in checked)
    assert done > 2 * (counts.total() - done), counts
