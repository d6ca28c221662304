"""Streaming detokenization."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from modelyard.core.tokenizer import Detokenizer, IdLogprob
from modelyard.tokenizer import detokenize
from modelyard.tokenizer.huggingface import HuggingFaceTokenizer
from tests.tokenizer import sample_tokenizers

BYTES = HuggingFaceTokenizer.from_text(sample_tokenizers.byte_level())
PIECES = HuggingFaceTokenizer.from_text(sample_tokenizers.metaspace("first"))
WORDS = HuggingFaceTokenizer.from_text(sample_tokenizers.word_piece())


def stream(detokenizer: Detokenizer, ids: list[int]) -> str:
    pieces = [piece for id in ids for piece in detokenizer.feed([id])] + detokenizer.finish()
    return "".join(piece.text for piece in pieces)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, BYTES.size - 1), max_size=40))
def test_streamed_text_equals_the_full_decode_of_any_ids(ids: list[int]) -> None:
    assert stream(BYTES.detokenizer(), ids) == BYTES.decode(ids)
    one_batch = BYTES.detokenizer()
    assert "".join(p.text for p in one_batch.feed(ids) + one_batch.finish()) == BYTES.decode(ids)


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=30))
def test_sentencepiece_text_streams_with_the_space_its_first_token_has(text: str) -> None:
    ids = PIECES.encode(text)
    assert stream(PIECES.detokenizer(), ids) == b"".join(map(PIECES.token_bytes, ids)).decode()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(3, WORDS.size - 1), max_size=100))
def test_decoders_without_a_table_stream_exactly_too(ids: list[int]) -> None:
    assert stream(WORDS.detokenizer(), ids) == WORDS.decode(ids)


def test_an_incomplete_character_waits_for_its_remaining_bytes() -> None:
    ids = BYTES.encode("€")
    assert len(ids) > 1
    pieces = BYTES.detokenizer().feed(ids)
    assert [piece.text for piece in pieces] == [""] * (len(ids) - 1) + ["€"]
    assert [piece.token for piece in pieces] == ids


def test_a_stream_cut_inside_a_character_ends_with_one_replacement_character() -> None:
    detokenizer = BYTES.detokenizer()
    assert [p.text for p in detokenizer.feed(BYTES.encode("€")[:1])] == [""]
    assert [(p.text, p.token) for p in detokenizer.finish()] == [("\ufffd", -1)]
    assert detokenizer.finish() == []


def test_a_control_token_flushes_and_is_separate() -> None:
    end = BYTES.specials["<|im_end|>"]
    pieces = BYTES.detokenizer().feed([BYTES.encode("€")[0], end])
    assert [(p.text, p.special, p.token) for p in pieces[1:]] == [("\ufffd", False, -1), ("<|im_end|>", True, end)]


def test_a_quoted_marker_is_not_special() -> None:
    pieces = BYTES.detokenizer().feed(BYTES.encode_plain("<tool_call>"))
    assert "".join(p.text for p in pieces) == "<tool_call>"
    assert not any(p.special or p.added for p in pieces)
    assert [(p.special, p.added) for p in BYTES.detokenizer().feed(BYTES.encode("<tool_call>"))] == [(False, True)]


def test_logprobs_stay_with_their_tokens() -> None:
    ids = [BYTES.encode("€")[0], BYTES.specials["<|im_end|>"]]
    pieces = BYTES.detokenizer().feed(ids, [IdLogprob(id, -0.5) for id in ids])
    assert [p.logprob.id if p.logprob else None for p in pieces] == [ids[0], None, ids[1]]


def test_streams_do_not_share_state() -> None:
    first, second = BYTES.detokenizer(), BYTES.detokenizer()
    first.feed(BYTES.encode("€")[:1])
    assert second.feed(BYTES.encode("a"))[0].text == "a"


def test_the_slow_path_flags_control_tokens_and_keeps_spaces() -> None:
    ids = [*WORDS.encode("fox"), WORDS.specials["[SEP]"], *WORDS.encode("dog")]
    pieces = WORDS.detokenizer().feed(ids)
    assert [p.text for p in pieces if p.special] == ["[SEP]"]
    assert "".join(p.text for p in pieces if not p.special) == WORDS.decode(ids, specials=False)


def test_the_alphabet_has_a_character_for_each_byte() -> None:
    assert sorted(detokenize.BYTE_OF.values()) == list(range(256))
    assert set(detokenize.BYTE_OF) == set(pre_tokenizers.ByteLevel.alphabet())


def test_token_strings_become_bytes() -> None:
    assert detokenize.byte_level("Ġfox") == b" fox"
    assert detokenize.byte_level("｜x") == "｜x".encode()
    assert detokenize.sentencepiece("▁fox", True) == b" fox"
    assert detokenize.sentencepiece("<0xE2>", True) == b"\xe2"
    assert detokenize.sentencepiece("<0xE2>", False) == b"<0xE2>"


@pytest.mark.parametrize(
    ("decoder", "family"),
    [
        (None, "other"),
        ({"type": "ByteLevel"}, "byte_level"),
        ({"type": "WordPiece"}, "other"),
        ({"type": "Metaspace", "replacement": "▁"}, "sentencepiece"),
        ({"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteFallback"}]}, "sentencepiece"),
        ({"type": "Replace", "pattern": {"String": "_"}, "content": " "}, "other"),
        ({"type": "Sequence", "decoders": []}, "other"),
    ],
)
def test_the_family_is_detected_from_the_decoder(decoder: dict[str, Any] | None, family: str) -> None:
    assert detokenize.family_of(decoder) == family


def test_a_character_that_a_limit_has_cut_is_dropped() -> None:
    detokenizer = BYTES.detokenizer()
    pieces = detokenizer.feed([*BYTES.encode("caf"), *BYTES.encode("€")[:1]])
    assert "".join(piece.text for piece in pieces + detokenizer.finish(truncated=True)) == "caf"
    assert detokenizer.finish() == []

    def decode(ids: Sequence[int]) -> str:
        return b"".join([b"caf", b"s \xc3"][id] for id in ids).decode("utf-8", "replace")

    prefix = detokenize.PrefixDetokenizer(decode, detokenize.AddedTokens({}, {}))
    assert "".join(piece.text for piece in prefix.feed([0, 1]) + prefix.finish(truncated=True)) == "cafs "
