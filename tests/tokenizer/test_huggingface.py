"""Tokenizers of Hugging Face: special tokens, files, and safe split points."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from modelyard.core.errors import InvalidRequest
from modelyard.core.tokenizer import FimTokens, Tokenizer
from modelyard.tokenizer.huggingface import (
    HuggingFaceTokenizer,
    SpecialTokens,
    TokenizerFile,
    exact_split_points,
    read_special_tokens,
    tokenizer_file,
)
from tests.tokenizer import sample_tokenizers

SPELLED = st.lists(
    st.sampled_from([*sample_tokenizers.CONTROLS, *sample_tokenizers.MARKERS, "</s>", " ", "a", "é", "\n", "👋"]),
    max_size=8,
)


def folder(path: Path, **files: object) -> Path:
    (path / "tokenizer.json").write_text(sample_tokenizers.byte_level())
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_special_tokens_are_recognised_and_no_bos_is_added(byte_vocab: HuggingFaceTokenizer) -> None:
    vocab: Tokenizer = byte_vocab
    ids = vocab.encode("<|im_start|>a<|im_end|>")
    assert [ids[0], ids[-1]] == [vocab.specials["<|im_start|>"], vocab.specials["<|im_end|>"]]


def test_markers_without_the_special_flag_are_control_tokens_and_html_is_not() -> None:
    text = json.loads(sample_tokenizers.byte_level())
    text["added_tokens"].append(
        text["added_tokens"][-1] | {"id": 999, "content": "<table>"},
    )
    vocab = HuggingFaceTokenizer.from_text(json.dumps(text))
    assert "<tool_call>" in vocab.specials
    assert "<table>" not in vocab.specials
    assert vocab.size == 1000


@pytest.mark.parametrize(
    "make",
    [
        sample_tokenizers.byte_level,
        sample_tokenizers.unigram,
        lambda: sample_tokenizers.metaspace("first"),
        sample_tokenizers.word_piece,
    ],
)
def test_plain_text_never_becomes_a_control_token(make: object) -> None:
    vocab = HuggingFaceTokenizer.from_text(make())  # type: ignore[operator]
    controls = {id for text, id in vocab.specials.items() if text not in ("<unk>", "[UNK]")}

    @settings(max_examples=50, deadline=None)
    @given(SPELLED)
    def holds(parts: list[str]) -> None:
        assert controls.isdisjoint(vocab.encode_plain("".join(parts)))
        assert controls.isdisjoint(vocab.encode_plain_inside("".join(parts)))

    holds()


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=40))
def test_plain_text_without_control_tokens_is_encoded_as_usual(text: str) -> None:
    for vocab in (BYTES, FIRST):
        assert vocab.encode_plain(text) == vocab.encode(text)


BYTES = HuggingFaceTokenizer.from_text(sample_tokenizers.byte_level())
FIRST = HuggingFaceTokenizer.from_text(sample_tokenizers.metaspace("first"))


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60))
def test_byte_level_text_survives_encode_and_decode(text: str) -> None:
    ids = BYTES.encode(text)
    assert BYTES.decode(ids) == text
    assert b"".join(map(BYTES.token_bytes, ids)) == text.encode()


def test_token_bytes_of_sentencepiece_are_exact(piece_vocab: HuggingFaceTokenizer) -> None:
    ids = piece_vocab.encode("fox 𝄞é")
    assert b"".join(map(piece_vocab.token_bytes, ids)) == " fox 𝄞é".encode()


def test_an_id_without_a_token_has_no_bytes(byte_vocab: HuggingFaceTokenizer) -> None:
    assert byte_vocab.token_bytes(10**6) == b""
    assert byte_vocab.token_bytes(-1) == b""


def test_control_tokens_can_be_left_out_of_the_text(byte_vocab: HuggingFaceTokenizer) -> None:
    ids = byte_vocab.encode("<|im_start|>a<tool_call>b")
    assert byte_vocab.decode(ids) == "<|im_start|>a<tool_call>b"
    assert byte_vocab.decode(ids, specials=False) == "ab"


def test_lone_surrogates_do_not_fail(byte_vocab: HuggingFaceTokenizer) -> None:
    assert byte_vocab.decode(byte_vocab.encode("a\ud800b")) == "a\ufffdb"
    assert byte_vocab.decode(byte_vocab.encode_plain("\ud83d\udc4b")) == "👋"


def test_bos_and_every_eos_come_from_the_folder(tmp_path: Path) -> None:
    path = folder(
        tmp_path,
        tokenizer_config={
            "bos_token": {"content": "<|im_start|>"},
            "eos_token": "<|endoftext|>",
            "add_bos_token": True,
        },
        generation_config={"eos_token_id": [2, 77]},
    )
    vocab = HuggingFaceTokenizer.load(path)
    assert (vocab.bos, vocab.bos_token, vocab.eos_token) == (1, "<|im_start|>", "<|endoftext|>")
    assert vocab.eos == {0, 2, 77}
    assert HuggingFaceTokenizer.load(path / "tokenizer.json").eos == vocab.eos


def test_a_tokenizer_that_adds_no_bos_has_none_for_raw_prompts(tmp_path: Path) -> None:
    path = folder(tmp_path, special_tokens_map={"bos_token": "<|im_start|>"})
    assert HuggingFaceTokenizer.load(path).bos is None
    assert (
        HuggingFaceTokenizer.from_text(
            sample_tokenizers.byte_level(), special=SpecialTokens("<|im_start|>", adds_bos=True)
        ).bos
        == 1
    )


def test_a_missing_tokenizer_names_the_path_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"tokenizer\.json.*tokenizer_path"):
        HuggingFaceTokenizer.load(tmp_path)


@pytest.mark.parametrize("broken", ["{", "{}", '{"added_tokens": 3}'])
def test_a_broken_tokenizer_is_named(tmp_path: Path, broken: str) -> None:
    (tmp_path / "tokenizer.json").write_text(broken)
    with pytest.raises(InvalidRequest, match=r"tokenizer\.json is not a valid"):
        HuggingFaceTokenizer.load(tmp_path)


def test_a_broken_file_beside_the_tokenizer_is_named(tmp_path: Path) -> None:
    folder(tmp_path)
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(InvalidRequest, match=r"generation_config\.json"):
        HuggingFaceTokenizer.load(tmp_path)


def test_truncation_and_padding_of_the_file_are_switched_off() -> None:
    text = json.loads(sample_tokenizers.byte_level())
    text["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    assert len(HuggingFaceTokenizer.from_text(json.dumps(text)).encode("a b c d e f g h")) > 2


@pytest.mark.parametrize(("extra", "ends"), [([], True), (["<|channel|>"], False)])
def test_the_end_of_a_message_ends_a_turn_only_where_there_are_no_channels(extra: list[str], ends: bool) -> None:
    text = json.loads(sample_tokenizers.byte_level())
    last = text["added_tokens"][-1]
    free = HuggingFaceTokenizer.from_text(json.dumps(text)).size
    for number, token in enumerate(["<|end|>", "<|return|>", *extra], start=free):
        text["added_tokens"].append(last | {"id": number, "content": token, "special": True})
    vocab = HuggingFaceTokenizer.from_text(json.dumps(text))
    assert (vocab.specials["<|end|>"] in vocab.eos) is ends
    assert vocab.specials["<|return|>"] in vocab.eos


@pytest.mark.parametrize(("set_before", "expected"), [({}, "false"), ({"TOKENIZERS_PARALLELISM": "true"}, "true")])
def test_the_library_starts_no_threads_by_default(set_before: dict[str, str], expected: str) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"} | set_before
    program = "import os, modelyard.tokenizer.huggingface; print(os.environ['TOKENIZERS_PARALLELISM'])"
    output = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True).stdout
    assert output.strip() == expected


def cuts(text: str) -> frozenset[str]:
    return exact_split_points(msgspec.json.decode(text, type=TokenizerFile))


def with_tokens(*contents: str) -> str:
    tokenizer_json = json.loads(sample_tokenizers.byte_level())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer_json["added_tokens"] = [{"id": n, "content": content} | flags for n, content in enumerate(contents)]
    return json.dumps(tokenizer_json)


def test_text_can_be_split_at_plain_control_tokens() -> None:
    assert cuts(sample_tokenizers.byte_level()) == {*sample_tokenizers.CONTROLS, *sample_tokenizers.MARKERS}


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "normalized", "single_word"])
def test_text_is_not_split_at_tokens_that_strip_their_neighbours(flag: str) -> None:
    assert cuts(sample_tokenizers.edited(sample_tokenizers.byte_level(), **{flag: True})) == frozenset()


def test_text_is_not_split_at_a_token_inside_another_one() -> None:
    assert cuts(with_tokens("<a>", "<<a>>")) == {"<<a>>"}


def test_text_is_not_split_at_overlapping_tokens() -> None:
    assert cuts(with_tokens("ab<x", "<xyz>")) == {"ab<x"}


def test_an_unknown_normalizer_prevents_all_splits() -> None:
    text = json.loads(sample_tokenizers.byte_level())
    text["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [text["pre_tokenizer"], {"type": "LooksAround"}]}
    assert cuts(json.dumps(text)) == frozenset()


def test_dropout_prevents_all_splits() -> None:
    text = json.loads(sample_tokenizers.byte_level())
    text["model"]["dropout"] = 0.1
    assert cuts(json.dumps(text)) == frozenset()


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_text_in_the_middle_is_encoded_as_after_a_control_token(scheme: str) -> None:
    vocab = HuggingFaceTokenizer.from_text(sample_tokenizers.metaspace(scheme))
    for text in ("fox", " fox", "  fox dog", "é👋"):
        assert vocab.encode_plain_inside(text) == vocab.encode("<|im_end|>" + text)[1:]


def test_control_tokens_that_are_words_are_encoded_in_pieces() -> None:
    vocab = HuggingFaceTokenizer.from_text(sample_tokenizers.unigram())
    ids = vocab.encode_plain("abc</s></s>")
    assert vocab.specials["</s>"] not in ids
    assert vocab.decode(ids).replace(" ", "") == "abc</s></s>"


def test_empty_text_has_no_tokens() -> None:
    vocab = HuggingFaceTokenizer.from_text(sample_tokenizers.metaspace("always"))
    assert vocab.encode_plain("") == vocab.encode_plain_inside("") == []


class MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="only glibc counts what is allocated")
def test_tokenizers_that_are_no_longer_used_leave_no_memory_behind() -> None:
    count = ctypes.CDLL(None).mallinfo2
    count.restype = MallocInfo
    words = " ".join(f"é{number:x}word" for number in range(10_000))  # not ASCII: past our own cache

    def allocated_after_use() -> int:
        HuggingFaceTokenizer.from_text(sample_tokenizers.byte_level()).encode(words)
        gc.collect()
        return int(count().uordblks)

    allocated = [allocated_after_use() for _ in range(11)]
    assert allocated[-1] - allocated[0] < 2 << 20, "the library's cache has 1.2 MiB for each"


def test_a_tokenizer_is_freed_without_the_garbage_collector() -> None:
    """A server collects rarely, and a vocabulary takes megabytes."""
    gc.disable()
    try:
        tokenizer = HuggingFaceTokenizer.from_text(sample_tokenizers.byte_level())
        tokenizer.decode(tokenizer.encode("hi"))
        reference = weakref.ref(tokenizer)
        del tokenizer
        assert reference() is None
    finally:
        gc.enable()


def test_a_text_and_a_pair_get_what_the_post_processor_adds() -> None:
    raw = HfTokenizer(WordLevel({"[CLS]": 0, "[SEP]": 1, "a": 2, "b": 3}, unk_token="a"))
    raw.pre_tokenizer = Whitespace()
    raw.add_special_tokens(["[CLS]", "[SEP]"])
    bare = HuggingFaceTokenizer.from_text(raw.to_str())
    assert (bare.wrapping, bare.encode_pair("a", "b")) == (([], []), [2, 3])
    raw.post_processor = TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]", [("[CLS]", 0), ("[SEP]", 1)])
    wrapped = HuggingFaceTokenizer.from_text(raw.to_str())
    assert (wrapped.wrapping, wrapped.encode_pair("a", "b")) == (([0], [1]), [0, 2, 1, 3, 1])


def test_tokens_for_gaps_are_found_by_their_spelling() -> None:
    raw = HfTokenizer(WordLevel({"a": 0}, unk_token="a"))
    assert HuggingFaceTokenizer.from_text(raw.to_str()).fim is None
    raw.add_special_tokens(["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>"])
    assert HuggingFaceTokenizer.from_text(raw.to_str()).fim == FimTokens(1, 2, 3, None, 4)


def test_an_empty_folder_has_no_settings(tmp_path: Path) -> None:
    assert read_special_tokens(tmp_path) == SpecialTokens()


def test_tokenizer_config_overrides_special_tokens_map(tmp_path: Path) -> None:
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "<old>"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<new>"}}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert read_special_tokens(tmp_path) == SpecialTokens("<s>", "<new>", (7,), None)


def test_a_folder_and_its_file_are_the_same_tokenizer(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    assert tokenizer_file(tmp_path) == tokenizer_file(file) == file
