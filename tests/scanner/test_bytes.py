"""Every case one byte at a time through the real detokenizer: markers come as tokens, characters in pieces.

A marker that the client is to see, in an argument or in text, is one that the model quoted: it comes byte by byte, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as HfTokenizer

import modelyard.engines.fake
from modelyard.core.engine import Piece
from modelyard.core.tokenizer import Tokenizer
from modelyard.scanner.formats import load, names
from modelyard.tokenizer.huggingface import HuggingFaceTokenizer
from tests.scanner.reading import Heard, calls_of, scan, tokens
from tests.scanner.test_cases import CASES, expected, options_of, read_cases, summary

SHIPPED = Path(modelyard.engines.fake.__file__).parent / "tokenizer"
SPOKEN_BY_THE_FAKE = ("hermes", "harmony", "qwen3_coder", "think")


@cache
def byte_vocabulary(format: str) -> Tokenizer:
    """256 bytes and nothing else, but for the family's markers as special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = HfTokenizer(models.BPE({char: id for id, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    markers = [AddedToken(text, normalized=False, special=True) for text in tokens(load(format))]
    tokenizer.add_special_tokens(markers)
    return HuggingFaceTokenizer.from_text(str(tokenizer.to_str()))


def pieces(vocabulary: Tokenizer, ids: Iterable[int]) -> list[Piece]:
    detokenizer = vocabulary.detokenizer()
    return [piece for id in ids for piece in detokenizer.feed([id])] + detokenizer.finish()


def read(vocabulary: Tokenizer, ids: Iterable[int], format: str, **options: Any) -> list[Heard]:
    return scan(pieces(vocabulary, ids), format, specials=vocabulary.specials, **options)


def _seen(value: Any) -> Iterator[str]:
    """Every string that the client gets to read."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _seen(each)


def quoted(format: str, case: dict[str, Any]) -> list[str]:
    """The stretches of the raw output in which markers are quoted: as they are seen, or as JSON spells them."""
    if not case.get("quotes"):
        return []
    wanted = expected(case)
    values = [
        *_seen([json.loads(arguments) for _, arguments in wanted["calls"]]),
        wanted["reasoning"],
        wanted["content"],
    ]
    held = [v for v in values if any(m in v for m in (*load(format).markers, *load(format).inner))]
    spelled = [[v, json.dumps(v, ensure_ascii=False)[1:-1]] for v in held]
    return [next(s for s in each if s in case["raw"]) for each in spelled]


def encode(vocabulary: Tokenizer, format: str, case: dict[str, Any]) -> list[int]:
    """The case as its model would have written it."""
    quotes = quoted(format, case)
    parts = re.split("(" + "|".join(map(re.escape, quotes)) + ")", case["raw"]) if quotes else [case["raw"]]
    return [id for i, p in enumerate(parts) for id in (vocabulary.encode_plain if i % 2 else vocabulary.encode)(p)]


@pytest.mark.parametrize(("format", "case"), read_cases())
def test_case_reads_the_same_one_byte_at_a_time(format: str, case: dict[str, Any]) -> None:
    vocabulary = byte_vocabulary(format)
    blocks = read(vocabulary, encode(vocabulary, format, case), format, **options_of(case))
    assert summary(blocks) == expected(case)


@pytest.mark.parametrize(("format", "case"), [c for c in read_cases() if c.values[0] in SPOKEN_BY_THE_FAKE])
def test_case_reads_the_same_in_the_shipped_vocabulary(format: str, case: dict[str, Any]) -> None:
    vocabulary = HuggingFaceTokenizer.load(SHIPPED)
    blocks = read(vocabulary, encode(vocabulary, format, case), format, **options_of(case))
    assert summary(blocks) == expected(case)


def test_cases_that_quote_markers_say_which() -> None:
    quoting = [case.values for case in read_cases() if case.values[1].get("quotes")]
    assert quoting
    assert [case["name"] for format, case in quoting if not quoted(format, case)] == []


@pytest.mark.parametrize("format", names())
def test_a_marker_that_is_only_quoted_stays_text(format: str) -> None:
    vocabulary = byte_vocabulary(format)
    for marker in tokens(load(format)):
        said = f"Write «{marker}» here."
        blocks = read(vocabulary, vocabulary.encode_plain(said), format)
        assert "".join(block.text for block in blocks) == said, marker
        assert not calls_of(blocks)


@pytest.mark.parametrize("format", names())
def test_a_token_of_another_family_is_not_shown(format: str) -> None:
    shown = scan([Piece("a"), Piece("<|nobody's|>", special=True), Piece("b")], format, specials={"<|nobody's|>": 1})
    assert "".join(block.text for block in shown) == "ab"


def test_a_character_in_four_pieces_is_whole_again() -> None:
    vocabulary = byte_vocabulary("hermes")
    ids = vocabulary.encode("<think>😀</think>é")
    assert len(ids) == 2 + 4 + 2
    assert read(vocabulary, ids, "hermes") == [Heard("thinking", "😀"), Heard("text", "é")]


def test_every_format_with_markers_is_read_in_bytes() -> None:
    assert {case.values[0] for case in read_cases()} == {path.stem for path in CASES.glob("*.toml")}
