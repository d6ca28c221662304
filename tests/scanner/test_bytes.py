"""Every case one byte at a time through the real detokenizer: markers come as tokens, characters in pieces."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import modelyard.engines.fake
from modelyard.core.engine import Piece
from modelyard.core.vocab import Vocabulary
from modelyard.scanner.formats import load, names
from modelyard.vocab.hf import HfVocabulary
from tests.scanner.reading import Heard, calls_of, scan, tokens
from tests.scanner.test_cases import CASES, expected, options_of, read_cases, summary

SHIPPED = Path(modelyard.engines.fake.__file__).parent / "tokenizer"
SPOKEN_BY_THE_FAKE = ("hermes", "harmony", "qwen3_coder", "think")


@cache
def byte_vocabulary(format: str) -> Vocabulary:
    """256 bytes and nothing else, but for the family's markers as special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: id for id, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    markers = [AddedToken(text, normalized=False, special=True) for text in tokens(load(format))]
    tokenizer.add_special_tokens(markers)
    return HfVocabulary.from_text(str(tokenizer.to_str()))


def pieces(vocabulary: Vocabulary, ids: Iterable[int]) -> list[Piece]:
    detokenizer = vocabulary.detokenizer()
    return [piece for id in ids for piece in detokenizer.feed([id])] + detokenizer.finish()


def read(vocabulary: Vocabulary, ids: Iterable[int], format: str, **options: Any) -> list[Heard]:
    return scan(pieces(vocabulary, ids), format, specials=vocabulary.specials, **options)


_tokens_only = [c for c in read_cases() if not c.values[1].get("quotes")]


@pytest.mark.parametrize(("format", "case"), _tokens_only)
def test_case_reads_the_same_one_byte_at_a_time(format: str, case: dict[str, Any]) -> None:
    vocabulary = byte_vocabulary(format)
    blocks = read(vocabulary, vocabulary.encode(case["raw"]), format, **options_of(case))
    assert summary(blocks) == expected(case)


@pytest.mark.parametrize(("format", "case"), [c for c in _tokens_only if c.values[0] in SPOKEN_BY_THE_FAKE])
def test_case_reads_the_same_in_the_shipped_vocabulary(format: str, case: dict[str, Any]) -> None:
    vocabulary = HfVocabulary.load(SHIPPED)
    blocks = read(vocabulary, vocabulary.encode(case["raw"]), format, **options_of(case))
    assert summary(blocks) == expected(case)


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
    assert {case.values[0] for case in _tokens_only} == {path.stem for path in CASES.glob("*.toml")}
