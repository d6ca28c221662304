"""A tokenizer whose pattern blows up is refused by a child process, before the server uses it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modelyard.core.errors import InvalidRequest
from modelyard.engines import tokenizer_check
from modelyard.engines.tokenizer_check import check_tokenizer
from modelyard.processes.sandbox import Limits
from modelyard.tokenizer.huggingface import HuggingFaceTokenizer
from tests.tokenizer import sample_tokenizers
from tests.tokenizer.test_word_cache import LLAMA3, split

EVIL = "(a+)+$|(a|aa)+$|x"
UNFORESEEN = r"(?:kvw|kvwkvw)+\d|\w+|\s|."


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
    tokenizer = HuggingFaceTokenizer.load(tmp_path, check_tokenizer(folder(tmp_path, r"\d(?=\d)|\w+|\s|.")))
    assert not tokenizer.is_linear
    assert tokenizer.words is None
    assert tokenizer.decode(tokenizer.encode("abc 12 def")) == "abc 12 def"


@pytest.mark.parametrize("encode", ["encode", "encode_plain"])
def test_a_text_that_no_probe_has_foreseen_ends_in_a_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encode: str
) -> None:
    monkeypatch.setattr(tokenizer_check.try_text, "limits", Limits(cpu_s=1))
    tokenizer = HuggingFaceTokenizer.load(tmp_path, check_tokenizer(folder(tmp_path, UNFORESEEN)))
    with pytest.raises(InvalidRequest, match="the model's tokenizer cannot split this text") as refused:
        getattr(tokenizer, encode)("kvw" * 60 + "!")
    assert refused.value.code == "tokenizer_too_slow"
    assert tokenizer.decode(getattr(tokenizer, encode)("kvw other words")) == "kvw other words"


def test_a_pair_of_texts_is_split_in_a_child_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_check.try_text, "limits", Limits(cpu_s=1))
    tokenizer = HuggingFaceTokenizer.load(tmp_path, check_tokenizer(folder(tmp_path, UNFORESEEN)))
    with pytest.raises(InvalidRequest, match="cannot split this text"):
        tokenizer.encode_pair("a question", "kvw" * 60 + "!")


def test_a_decoder_with_an_unknown_pattern_is_refused(tmp_path: Path) -> None:
    text = json.loads(sample_tokenizers.byte_level())
    text["decoder"] = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(text))
    with pytest.raises(InvalidRequest, match="the decoder's pattern"):
        check_tokenizer(tmp_path)


def test_a_common_pattern_needs_no_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_check, "pool", None)
    assert check_tokenizer(folder(tmp_path, LLAMA3)) is None
    assert HuggingFaceTokenizer.load(tmp_path).is_linear


@pytest.mark.parametrize("encode", ["encode", "encode_plain"])
def test_a_text_on_which_the_library_panics_is_the_requests_fault(tmp_path: Path, encode: str) -> None:
    tokenizer = HuggingFaceTokenizer.load(folder(tmp_path, EVIL))
    with pytest.raises(InvalidRequest, match="takes too many steps") as failed:
        getattr(tokenizer, encode)("a" * 40 + "b")
    assert failed.value.code == "tokenizer_failed"
