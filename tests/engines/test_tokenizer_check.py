"""A tokenizer whose pattern blows up is refused by a child process, before the server uses it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modelyard.core.errors import InvalidRequest
from modelyard.engines import tokenizer_check
from modelyard.engines.tokenizer_check import check_tokenizer
from modelyard.tokenizer.huggingface import HuggingFaceTokenizer
from tests.tokenizer import sample_tokenizers
from tests.tokenizer.test_word_cache import LLAMA3, split

EVIL = "(a+)+$|(a|aa)+$|x"


def folder(tmp_path: Path, pattern: str) -> Path:
    text = json.loads(sample_tokenizers.byte_level()) | {"pre_tokenizer": split(pattern)}
    (tmp_path / "tokenizer.json").write_text(json.dumps(text))
    return tmp_path


@pytest.mark.parametrize("pattern", [EVIL, "([b-y]+)*z|.", "(?:qr|qrqr)+$|.", "a*a*a*$|x"])
def test_a_pattern_that_blows_up_is_refused(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(InvalidRequest, match="a prompt could stop the server") as refused:
        check_tokenizer(folder(tmp_path, pattern))
    assert refused.value.code == "tokenizer_too_slow"
    assert str(tmp_path) in refused.value.message


def test_an_unusual_pattern_that_is_fast_is_used_but_not_on_the_event_loop(tmp_path: Path) -> None:
    check_tokenizer(folder(tmp_path, r"\d(?=\d)|\w+|\s|."))
    tokenizer = HuggingFaceTokenizer.load(tmp_path)
    assert not tokenizer.is_linear
    assert tokenizer.words is None
    assert tokenizer.decode(tokenizer.encode("abc 12 def")) == "abc 12 def"


def test_a_common_pattern_needs_no_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_check, "pool", None)
    check_tokenizer(folder(tmp_path, LLAMA3))
    assert HuggingFaceTokenizer.load(tmp_path).is_linear


@pytest.mark.parametrize("encode", ["encode", "encode_plain"])
def test_a_text_on_which_the_library_panics_is_the_requests_fault(tmp_path: Path, encode: str) -> None:
    tokenizer = HuggingFaceTokenizer.load(folder(tmp_path, EVIL))
    with pytest.raises(InvalidRequest, match="takes too many steps") as failed:
        getattr(tokenizer, encode)("a" * 40 + "b")
    assert failed.value.code == "tokenizer_failed"
