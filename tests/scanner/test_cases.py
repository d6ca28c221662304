"""Every case of every format gives the same blocks, however its text is cut: by characters, tokens or bytes.

Through the real detokenizer each byte is a token, and so is each marker. A marker that the client is to see, in an
argument or in text, is one that the model quotes: its bytes are tokens, too.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import modelyard_fake
from modelyard.core.tokenizer import Piece
from modelyard.scanner.formats import load, names
from modelyard.tokenizer.huggingface import HuggingFaceTokenizer
from tests.scanner.helpers import ScannedBlock, calls_of, marker_tokens, pieces, scan, text_of

Case = dict[str, Any]
CASES: dict[str, list[Case]] = {
    path.stem: tomllib.loads(path.read_text())["case"]
    for path in sorted((Path(__file__).parent / "cases").glob("*.toml"))
}
SHIPPED = Path(modelyard_fake.__file__).parent / "tokenizer"
SPOKEN_BY_THE_FAKE_ENGINE = ("hermes", "harmony", "qwen3_coder", "think")

every_format = pytest.mark.parametrize("format", CASES)


def _options(case: Case) -> dict[str, Any]:
    options = {key: case[key] for key in ("prefill", "truncated", "stop") if key in case}
    return options | ({"tools": None} if case.get("any_tool") else {})


def _summary(blocks: list[ScannedBlock]) -> dict[str, Any]:
    return {
        "reasoning": text_of(blocks, "thinking"),
        "content": text_of(blocks),
        "calls": [list(c) for c in calls_of(blocks)],
        "broken": [list(c) for c in calls_of(blocks, complete=False)],
    }


def _expected(case: Case) -> dict[str, Any]:
    empty: dict[str, Any] = {"reasoning": "", "content": "", "calls": [], "broken": []}
    return {key: case.get(key, value) for key, value in empty.items()}


def _cuts_a_marker(case: Case, tokens: Iterable[str]) -> bool:
    """A limit cuts off the output inside of a marker. That cannot happen where the marker is a token."""
    pieces = tuple(token[:size] for token in tokens for size in range(2, len(token)))
    return bool(case.get("truncated")) and case["raw"].endswith(pieces)


def test_every_format_has_at_least_fifteen_cases() -> None:
    assert set(CASES) == set(names())
    assert [name for name, cases in CASES.items() if len(cases) < 15] == []


@every_format
def test_the_chunks_do_not_change_the_blocks(format: str) -> None:
    """Every fourth cut, each case from another start: a marker occurs in so many cases that each of its cuts does."""
    for index, case in enumerate(CASES[format]):
        raw, options = case["raw"], _options(case)
        blocks = scan([raw], format, **options)
        assert _summary(blocks) == _expected(case), case["name"]
        assert scan(list(raw), format, **options) == blocks, case["name"]
        for cut in range(1 + index % 4, len(raw), 4):
            assert scan([raw[:cut], raw[cut:]], format, **options) == blocks, f"{case['name']}, cut after {raw[:cut]!r}"


@every_format
def test_a_case_reads_the_same_if_markers_are_tokens(format: str) -> None:
    specials = marker_tokens(load(format))
    for case in CASES[format]:
        if specials and not case.get("quotes") and not _cuts_a_marker(case, specials):
            split = pieces(case["raw"], specials)
            blocks = scan(split, format, specials=specials, **_options(case))
            assert _summary(blocks) == _expected(case), case["name"]


# --- through the real detokenizer -------------------------------------------------------------------------------------


@cache
def _byte_vocabulary(format: str) -> HuggingFaceTokenizer:
    """256 bytes, and the markers of the family as special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: id for id, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    markers = [AddedToken(text, normalized=False, special=True) for text in marker_tokens(load(format))]
    tokenizer.add_special_tokens(markers)
    return HuggingFaceTokenizer.from_text(str(tokenizer.to_str()))


def _scan_ids(tokenizer: HuggingFaceTokenizer, ids: Iterable[int], format: str, **options: Any) -> list[ScannedBlock]:
    detokenizer = tokenizer.detokenizer()
    detokenized = [piece for id in ids for piece in detokenizer.feed([id])] + detokenizer.finish()
    return scan(detokenized, format, specials=tokenizer.specials, **options)


def _strings(value: Any) -> Iterator[str]:
    """Every string that the client gets."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _strings(each)


def _quotations(format: str, case: Case) -> list[str]:
    """The parts of the raw output that quote markers: unchanged, or as JSON spells them."""
    if not case.get("quotes"):
        return []
    expected, form = _expected(case), load(format)
    arguments = [json.loads(arguments) for _, arguments in expected["calls"]]
    values = [*_strings(arguments), expected["reasoning"], expected["content"]]
    quoting = [v for v in values if any(m in v for m in (*form.markers, *form.inner_markers))]
    spelled = [[v, json.dumps(v, ensure_ascii=False)[1:-1]] for v in quoting]
    return [next(s for s in each if s in case["raw"]) for each in spelled]


def _encode(tokenizer: HuggingFaceTokenizer, format: str, case: Case) -> list[int]:
    """The case as its model would write it."""
    quotes = _quotations(format, case)
    parts = re.split("(" + "|".join(map(re.escape, quotes)) + ")", case["raw"]) if quotes else [case["raw"]]
    return [id for i, p in enumerate(parts) for id in (tokenizer.encode_plain if i % 2 else tokenizer.encode)(p)]


@every_format
def test_a_case_reads_the_same_byte_by_byte(format: str) -> None:
    tokenizer = _byte_vocabulary(format)
    for case in CASES[format]:
        if _cuts_a_marker(case, tokenizer.specials):
            continue
        blocks = _scan_ids(tokenizer, _encode(tokenizer, format, case), format, **_options(case))
        assert _summary(blocks) == _expected(case), case["name"]


def test_a_case_reads_the_same_in_the_shipped_vocabulary() -> None:
    tokenizer = HuggingFaceTokenizer.load(SHIPPED)
    for format in SPOKEN_BY_THE_FAKE_ENGINE:
        for case in CASES[format]:
            if _cuts_a_marker(case, tokenizer.specials):
                continue
            blocks = _scan_ids(tokenizer, _encode(tokenizer, format, case), format, **_options(case))
            assert _summary(blocks) == _expected(case), (format, case["name"])


def test_cases_that_quote_markers_contain_one() -> None:
    quoting = [(format, case) for format, cases in CASES.items() for case in cases if case.get("quotes")]
    assert quoting
    assert [case["name"] for format, case in quoting if not _quotations(format, case)] == []


@every_format
def test_a_quoted_marker_is_text(format: str) -> None:
    tokenizer = _byte_vocabulary(format)
    for marker in marker_tokens(load(format)):
        text = f"Write «{marker}» here."
        blocks = _scan_ids(tokenizer, tokenizer.encode_plain(text), format)
        assert "".join(block.text for block in blocks) == text, marker
        assert not calls_of(blocks)


def test_a_special_token_of_another_family_is_not_shown() -> None:
    for format in names():
        given = [Piece("a"), Piece("<|unknown|>", special=True), Piece("b")]
        blocks = scan(given, format, specials={"<|unknown|>": 1})
        assert "".join(block.text for block in blocks) == "ab", format


def test_a_character_in_four_pieces_is_joined() -> None:
    tokenizer = _byte_vocabulary("hermes")
    ids = tokenizer.encode("<think>😀</think>é")
    assert len(ids) == 2 + 4 + 2
    assert _scan_ids(tokenizer, ids, "hermes") == [ScannedBlock("thinking", "😀"), ScannedBlock("text", "é")]
