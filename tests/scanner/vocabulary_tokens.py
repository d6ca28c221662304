"""A text as the tokens that a model would write, with markers as tokens or spelled in ordinary ones, and what a scanner
makes of them."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, cached_property, partial
from itertools import groupby, product, takewhile
from typing import Any

from modelyard.core.events import Event
from modelyard.core.output_format import OutputFormat
from modelyard.core.tokenizer import Piece
from modelyard.scanner import Scanner
from modelyard.scanner.formats import load
from modelyard.tokenizer.gguf import GgufTokenizer
from modelyard.tokenizer.huggingface import HuggingFaceTokenizer
from tests.scanner.helpers import TOOLS, ScannedBlock, blocks_of, calls_of, text_of
from tests.scanner.writers import WRITERS, Unwritable, write_turn

# Vocabularies of sentencepiece put a space before a text. With one of these before it, it is as inside of a text.
_FILLERS = ("\ue000", "\x1f", "\x04", "|", "。")
CUTS = ("one by one", "in groups", "at once")
_WRITE_FILE = next(tool for tool in TOOLS if tool.name == "write_file")


class VocabularyTokens:
    def __init__(self, tokenizer: GgufTokenizer | HuggingFaceTokenizer) -> None:
        self.tokenizer = tokenizer
        self._known: dict[tuple[str, Callable[[str], list[int]]], list[int]] = {}

    @cached_property
    def ids(self) -> dict[str, int]:
        """The tokens that a marker may be: control tokens and added ones."""
        return {**self.tokenizer.added, **self.tokenizer.specials}

    @cached_property
    def texts(self) -> frozenset[str]:
        return frozenset(self.ids)

    @cached_property
    def control(self) -> frozenset[str]:
        return self.texts - self.tokenizer.added.keys()

    def encode(self, text: str) -> list[int]:
        """As it stands inside of a text, with every token that it spells."""
        return self._inside(text, self.tokenizer.encode)

    def encode_plain(self, text: str) -> list[int]:
        """As it stands inside of a text, without control tokens."""
        return self._inside(text, self.tokenizer.encode_plain)

    def encode_marked(self, text: str, markers: Iterable[str]) -> list[int]:
        """These markers are tokens if the vocabulary has them. Everything else is ordinary text."""
        known = sorted(self.texts.intersection(markers), key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, known))})", text) if known else [text]
        return [
            id
            for at, part in enumerate(parts)
            if part
            for id in ([self.ids[part]] if at % 2 else self.encode_plain(part))
        ]

    def encode_quoting(self, text: str, quotations: Sequence[str], markers: Iterable[str]) -> list[int]:
        """Markers are tokens, except in the quotations."""
        parts = re.split(f"({'|'.join(map(re.escape, quotations))})", text) if quotations else [text]
        encode = (partial(self.encode_marked, markers=tuple(markers)), self.encode_plain)
        return [id for at, part in enumerate(parts) for id in encode[at % 2](part)]

    def _inside(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Without the tokens of the filler, and of a space before it. Many formats write a value in the same way."""
        if (text, encode) not in self._known:
            self._known[text, encode] = self._without_filler(text, encode)
        return self._known[text, encode]

    def _without_filler(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        for filler in _FILLERS if text else ():
            ids, before = encode(filler + text), b""
            for at, id in enumerate(ids):
                before += self.tokenizer.token_bytes(id)
                if before.strip(b" ") == filler.encode():
                    return ids[at + 1 :]
                if len(before) > len(filler.encode()):
                    break
        return encode(text)

    def pieces(self, ids: Iterable[int]) -> list[Piece]:
        """One token at a time, as an engine gives them."""
        detokenizer = self.tokenizer.detokenizer()
        return [piece for id in ids for piece in detokenizer.feed([id])] + detokenizer.finish()

    def joined(self, ids: Iterable[int]) -> list[Piece]:
        """Runs of ordinary tokens as one piece: what is left of a token is its flags."""
        found: list[Piece] = []
        for (special, added), run in groupby(self.pieces(ids), key=lambda piece: (piece.special, piece.added)):
            texts = [piece.text for piece in run]
            found += [Piece(t, special, -1, None, added) for t in (texts if special or added else ["".join(texts)])]
        return found

    def spells(self, ids: Sequence[int], text: str) -> bool:
        return "".join(piece.text for piece in self.pieces(ids)) == text

    def scan(self, form: OutputFormat, pieces: Sequence[Piece], cut: str, **options: Any) -> list[ScannedBlock]:
        given: dict[str, Any] = {"tools": TOOLS, "new_id": lambda: "call_0", "specials": self.texts} | options
        truncated = given.pop("truncated", False)
        scanner, events = Scanner(form, **given), list[Event]()
        for some in _feeds(pieces, cut):
            events += scanner.feed(some)
        return blocks_of(events + scanner.finish(truncated))


def _feeds(pieces: Sequence[Piece], cut: str) -> Iterator[Sequence[Piece]]:
    if cut == "at once":
        yield pieces
        return
    rng, at = random.Random(len(pieces)), 0
    while at < len(pieces):
        size = 1 if cut == "one by one" else rng.choice((1, 2, 3, 5, 8, 30))
        yield pieces[at : at + size]
        at += size


class Result:
    """What was read wrong, how much was checked, and how much rules leave out."""

    def __init__(self) -> None:
        self.wrong: list[tuple[Any, ...]] = []
        self.checked = 0
        self.left_out: Counter[str] = Counter()


class Turn:
    """A turn with a `payload`. Around that it is written with the family's tokens."""

    def __init__(self, tokens: VocabularyTokens, form: OutputFormat, raw: str, payload: str) -> None:
        self._tokens, self._raw, self._payload = tokens, raw, payload
        self._markers = (*form.markers, *form.inner_markers)
        before, _, after = raw.partition(payload)
        self._before, self._after = (tokens.encode_marked(part, self._markers) for part in (before, after))

    def pieces(self, payload: Sequence[int], result: Result) -> list[Piece]:
        """None of them: this vocabulary cannot spell the turn. U+2581 is a space in some."""
        pieces = self._tokens.pieces([*self._before, *payload, *self._after])
        if "".join(piece.text for piece in pieces) == self._raw:
            return pieces
        result.left_out["a turn that the vocabulary cannot spell"] += 1
        return []

    def pieces_plain(self, result: Result) -> list[Piece]:
        return self.pieces(self._tokens.encode_plain(self._payload), result)

    def pieces_spelled(self, result: Result) -> list[Piece]:
        """With every token that the payload spells."""
        return self.pieces(self._tokens.encode(self._payload), result)

    def pieces_marked(self, result: Result, *more: str) -> list[Piece]:
        return self.pieces(self._tokens.encode_marked(self._payload, (*self._markers, *more)), result)


def thinks(form: OutputFormat) -> bool:
    return any(region.kind == "thinking" for region in form.regions.values())


def difference(found: str, text: str) -> tuple[str, str]:
    at = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(found, text, strict=False)))
    return found[max(0, at - 20) : at + 40], text[max(0, at - 20) : at + 40]


# --- arguments --------------------------------------------------------------------------------------------------------


def write_call(format: str, value: str) -> str | None:
    """A turn with one call. None: the format cannot write this value."""
    try:
        return write_turn(format, "", "", [(_WRITE_FILE, {"path": "a.txt", "content": value})])
    except Unwritable:
        return None


SPELLINGS: tuple[Callable[[str], str], ...] = (
    str,
    lambda value: json.dumps(value, ensure_ascii=False)[1:-1],
    lambda value: json.dumps(value)[1:-1],
    lambda value: repr(value)[1:-1],
)


def spelled(raw: str, value: str) -> str:
    """The value as the format spells it: unchanged, or as JSON or Python do."""
    return next(spell(value) for spell in SPELLINGS if raw.count(spell(value)) == 1)


@cache
def spelling(format: str) -> int:
    """Which of the spellings a format has for the values of arguments."""
    value = "\nä'\"\\"
    raw = write_call(format, value) or ""
    return next(at for at, spell in enumerate(SPELLINGS) if raw.count(spell(value)) == 1)


def is_call(blocks: list[ScannedBlock], value: str) -> bool:
    calls = [(name, json.loads(arguments)) for name, arguments in calls_of(blocks)]
    return calls == [("write_file", {"path": "a.txt", "content": value})] and not text_of(blocks).strip()


# --- the family's own markup, quoted ----------------------------------------------------------------------------------


@cache
def _ends_of_value(format: str) -> tuple[str, ...]:
    """What ends a value without quotes: it cannot be quoted inside one."""
    form, raw = load(format), write_call(format, "VALUE")
    assert raw is not None
    after = raw.partition("VALUE")[2].strip()
    markers = (*form.markers, *form.inner_markers)
    return () if after[0] in "\"'" else tuple(m for m in markers if after.startswith(m) or m.startswith(after))


def quote_in_arguments(tokens: VocabularyTokens, format: str, *more: str, ways: Sequence[str] = ("a {} c",)) -> Result:
    """Each marker, a whole call, and `more` inside a value: spelled in ordinary tokens, and as the tokens themselves.
    Models write both."""
    result = Result()
    if format not in WRITERS:
        return result
    form, ends = load(format), _ends_of_value(format)
    call = (write_call(format, "b") or "").strip()
    quotations = dict.fromkeys((*form.markers, *form.inner_markers, call, *more))
    for quoted, way in product(quotations, ways):
        value = way.format(quoted)
        raw = write_call(format, value)
        if raw is None or (quoted != call and any(end in quoted for end in ends)):  # a call has each end with its start
            result.left_out["an argument that contains its own end"] += 1
            continue
        turn = Turn(tokens, form, raw, spelled(raw, value))
        for pieces in filter(None, (turn.pieces_plain(result), turn.pieces_marked(result, quoted))):
            cut, result.checked = CUTS[result.checked % len(CUTS)], result.checked + 1
            if not is_call(blocks := tokens.scan(form, pieces, cut), value):
                written = [piece.text for piece in pieces if piece.special or piece.added]
                result.wrong.append((format, value, cut, written, blocks))
    return result


def quote_in_prose(tokens: VocabularyTokens, format: str) -> Result:
    """Each marker in text and reasoning. Only tokens are markers where the vocabulary has them; else a quotation cannot
    be told from the marker."""
    result, form = Result(), load(format)
    for marker in (*form.markers, *form.inner_markers):
        if marker not in tokens.texts:
            result.left_out["a marker that is ordinary text"] += 1
            continue
        if tokens.ids[marker] in tokens.encode_plain(marker):
            result.left_out["a marker that is always a token"] += 1
            continue
        text = f"Write «{marker}», not more: {marker} and so on."
        for kind in ("text", "thinking") if thinks(form) else ("text",):
            raw = write_turn(format, text, "So.", []) if kind == "thinking" else write_turn(format, "", text, [])
            pieces = Turn(tokens, form, raw, text).pieces_plain(result)
            cut, result.checked = CUTS[result.checked % len(CUTS)], result.checked + bool(pieces)
            if pieces and text_of(blocks := tokens.scan(form, pieces, cut), kind) != text:
                result.wrong.append((format, kind, marker, cut, blocks))
    return result
