"""The tokenizer of a GGUF file: its ids match llama.cpp, also through the token cache of the gateway."""

from __future__ import annotations

import ctypes
import gc
import weakref
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from modelyard import libllama
from modelyard.core.errors import InvalidRequest
from modelyard.library.default_model import fetch
from modelyard.library.gguf import read_metadata
from modelyard.plugins import MissingLibrary
from modelyard.tokenizer import llama_log, open_tokenizer
from modelyard.tokenizer.gguf import GgufTokenizer, WordPieces
from modelyard.tokenizer.prefix_cache import TokenCache
from modelyard.tokenizer.shield import shield, unshield
from modelyard_convert.writers import tokenizer_files
from tests.engines.llama_cpp import tiny_models
from tests.real_models import minilm, minilm_folder


@cache
def vocabulary() -> GgufTokenizer:
    vocab = open_tokenizer(fetch())
    assert isinstance(vocab, GgufTokenizer)
    return vocab


@cache
def metadata() -> dict[str, Any]:
    with fetch().open("rb") as file:
        return read_metadata(file)


@cache
def hugging_face() -> Tokenizer:
    return Tokenizer.from_buffer(dict(tokenizer_files(metadata(), 8192))["tokenizer.json"])


SAMPLES = [
    "Hello, world!",
    "  two  spaces and\ttabs\n\n\nlines ",
    "def f(x):\n    return x ** 2  # 12345",
    "It's what we'll say, isn't it? IT'S",
    "你好，世界。こんにちは 안녕하세요",
    "🎉 👩‍👩‍👧‍👦 👋🏽 e\u0301 ﬁ",
    "3.14159 2024-01-01 ½ ²",
    "Ünïcödé Straße ΑΒΓ привет",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|><|im_end|><|im_start|>",
    "<|im_start <|im_end|",
    "",
]
PIECES = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", "|>", " ", "  ", "\n", "fox", " fox", "'s", "42", "é"]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=6).map(unshield), max_size=14).map("".join)


@cache
def missing() -> frozenset[int]:
    """Bytes without a token in this vocabulary: some control characters, and first bytes of unassigned characters."""
    known = {vocabulary().token_bytes(id) for id in range(vocabulary().size)}
    return frozenset(byte for byte in range(256) if bytes([byte]) not in known)


def known(text: str) -> str:
    """Without characters that the vocabulary lacks. Both tokenizers drop them, but llama.cpp after merging and the
    other one before: the neighbours `{` and `\\` of a dropped character become one token there."""
    return "".join(character for character in text if not missing() & set(character.encode()))


@pytest.mark.parametrize("text", SAMPLES)
def test_ids_equal_those_of_llama_cpp(text: str) -> None:
    assert vocabulary().encode(text) == hugging_face().encode(text, add_special_tokens=False).ids


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(max_codepoint=0x24F, exclude_categories=["Cs"]), max_size=40).map(known))
def test_ids_of_latin_text_equal_those_of_llama_cpp(text: str) -> None:
    assert vocabulary().encode(text) == hugging_face().encode(text, add_special_tokens=False).ids


@settings(max_examples=200, deadline=None)
@given(TEXTS, TEXTS)
def test_the_token_cache_gives_the_ids_of_a_full_tokenization(prefix: str, more: str) -> None:
    vocab = vocabulary()
    tokens = TokenCache(vocab, vocab.cuts, limit_bytes=20_000)
    assert tokens.encode(prefix) == vocab.encode(prefix)
    assert tokens.encode(prefix + more) == vocab.encode(prefix + more)


@settings(max_examples=200, deadline=None)
@given(TEXTS)
def test_plain_text_never_becomes_a_control_token(text: str) -> None:
    vocab = vocabulary()
    assert not set(vocab.encode_plain(text)) & set(vocab.specials.values())


def test_a_control_token_in_user_text_stays_text() -> None:
    vocab = vocabulary()
    tokens = TokenCache(vocab, vocab.cuts)
    ids = tokens.encode(f"<|im_start|>user\n{shield('say <|im_end|> now', vocab.specials)}<|im_end|>")
    assert ids.count(vocab.specials["<|im_end|>"]) == 1
    assert vocab.decode(ids) == "<|im_start|>user\nsay <|im_end|> now<|im_end|>"


def test_a_character_without_a_token_is_dropped_by_both_tokenizers() -> None:
    assert 0x1D in missing()
    assert not any(bytes([byte]).isalnum() or byte in b" \n\t" for byte in missing())
    assert vocabulary().encode("\x1d") == hugging_face().encode("\x1d", add_special_tokens=False).ids == []


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=30).map(known))
def test_text_is_decoded_completely_token_by_token(text: str) -> None:
    vocab = vocabulary()
    ids = vocab.encode_plain(text)
    detokenizer = vocab.detokenizer()
    pieces = [piece for id in ids for piece in detokenizer.feed([id])] + detokenizer.finish()
    assert "".join(piece.text for piece in pieces) == vocab.decode(ids) == text


def test_a_lone_surrogate_does_not_fail() -> None:
    assert vocabulary().decode(vocabulary().encode("a\ud83d")).startswith("a")


def test_special_tokens_are_those_of_the_file() -> None:
    vocab, facts = vocabulary(), metadata()
    tokens = facts["tokenizer.ggml.tokens"]
    assert vocab.size == len(tokens)
    assert vocab.template == facts["tokenizer.chat_template"]
    assert vocab.named_template("tool_use") is None
    assert vocab.bos_token == tokens[facts["tokenizer.ggml.bos_token_id"]]
    assert vocab.eos_token == tokens[facts["tokenizer.ggml.eos_token_id"]]
    assert facts["tokenizer.ggml.eos_token_id"] in vocab.eos
    assert {"<|im_start|>", "<|im_end|>", "<|endoftext|>"} <= vocab.cuts
    control = [token for token, kind in zip(tokens, facts["tokenizer.ggml.token_type"], strict=True) if kind == 3]
    assert set(control) == set(vocab.specials)
    assert all(tokens[id] == text for text, id in vocab.specials.items())


def test_decoding_can_omit_special_tokens() -> None:
    ids = vocabulary().encode("<|im_start|>user\nhi<|im_end|>")
    assert vocabulary().decode(ids, specials=False) == "user\nhi"


def test_ids_outside_the_vocabulary_have_no_bytes() -> None:
    assert vocabulary().token_bytes(-1) == vocabulary().token_bytes(10**6) == b""


@pytest.mark.parametrize(
    ("data", "reason"),
    [(b"", "failed to read magic"), (b"no such thing" * 100, "invalid magic characters"), (b"GGUF", "failed to read")],
)
def test_a_broken_file_is_reported_with_the_message_of_llama_cpp(
    data: bytes, reason: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(data)
    with pytest.raises(InvalidRequest, match=reason) as caught:
        open_tokenizer(file)
    assert str(file) in caught.value.message
    assert capfd.readouterr() == ("", "")


def test_reading_a_vocabulary_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    GgufTokenizer(fetch())
    assert capfd.readouterr() == ("", "")


def test_reading_a_vocabulary_initialises_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    lib = libllama.load()
    plain, lists = lib.llama_model_load_from_file, []

    def load(path: bytes, params: Any) -> Any:
        lists.append(ctypes.cast(params.devices, ctypes.POINTER(ctypes.c_void_p))[0])
        return plain(path, params)

    monkeypatch.setattr(lib, "llama_model_load_from_file", load)
    GgufTokenizer(fetch())
    assert lists == [None], "a list with no device in it, not the absence of a list, which means all"


# --- log messages of llama.cpp reach only the calling thread ----------------------------------------------------------

ERROR, INFO, CONTINUED = 4, 2, 5


def test_the_first_error_is_the_reason_without_its_function_name() -> None:
    llama_log.clear()
    llama_log._on_log(INFO, b"load: all fine\n", None)
    llama_log._on_log(ERROR, b"llama_model_load: error loading model: unknown model architecture: 'x'\n", None)
    llama_log._on_log(CONTINUED, b" more", None)
    llama_log._on_log(ERROR, b"llama_model_load_from_file_impl: failed to load model\n", None)
    assert llama_log.first_error() == "unknown model architecture: 'x'"


def test_cleared_errors_are_not_reported() -> None:
    llama_log._on_log(ERROR, b"old: bad\n", None)
    llama_log.clear()
    assert llama_log.first_error() == "llama.cpp gave no reason"


def test_errors_are_kept_per_thread() -> None:
    llama_log.clear()
    other = Thread(target=lambda: llama_log._on_log(ERROR, b"other: bad \xff\n", None))
    other.start()
    other.join()
    assert llama_log.first_error() == "llama.cpp gave no reason"


def test_a_null_message_is_accepted() -> None:
    llama_log.clear()
    llama_log._on_log(ERROR, None, None)
    assert llama_log.first_error() == "llama.cpp gave no reason"


# Which library reads which file, and the error if it is missing.


def test_a_gguf_file_without_a_library_says_what_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(libllama, "_loaded", None)
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))
    with pytest.raises(MissingLibrary, match=r"no llama.cpp library in .*: `modelyard setup` fetches one"):
        open_tokenizer(Path("x.GGUF"))


def test_a_vocabulary_is_freed_without_the_garbage_collector() -> None:
    """A server collects rarely, and every reload opens the vocabulary again."""
    gc.disable()
    try:
        tokenizer = GgufTokenizer(fetch())
        tokenizer.decode(tokenizer.encode("hi"))
        stream, reference = tokenizer.detokenizer(), weakref.ref(tokenizer)
        owner = weakref.ref(tokenizer._owner)
        del tokenizer
        assert reference() is None
        assert owner() is not None, "a stream still uses it"
        del stream
        assert owner() is None
    finally:
        gc.enable()


# --- inputs that are not conversations --------------------------------------------------------------------------------


def test_a_text_of_its_own_gets_the_tokens_of_its_kind_of_vocabulary() -> None:
    assert GgufTokenizer(tiny_models.bert("cls")).wrapping == ([2], [3])
    ender = GgufTokenizer(tiny_models.last_token_embedder())
    assert ender.wrapping == ([], [ender.specials[ender.eos_token]])
    assert GgufTokenizer(fetch()).wrapping == ([], [])


def test_a_pair_is_joined_by_separators_and_its_control_tokens_are_text() -> None:
    tokenizer = GgufTokenizer(tiny_models.bert("rank"))
    cat, dog = tokenizer.encode("cat"), tokenizer.encode("dog")
    assert tokenizer.encode_pair("cat", "dog") == [2, *cat, 3, *dog]  # as llama-server: this file adds no end token
    ender = GgufTokenizer(tiny_models.last_token_embedder())
    end = ender.specials[ender.eos_token]
    assert ender.encode_pair("a", "b") == [*ender.encode("a"), end, *ender.encode("b"), end]
    assert tokenizer.encode_pair("[MASK]", "dog").count(4) == 0


def test_tokens_for_gaps_are_found_by_the_files_metadata() -> None:
    tokenizer = GgufTokenizer(tiny_models.coder())
    assert tokenizer.fim is not None
    texts = [tokenizer.decode([id]) for id in (tokenizer.fim.prefix, tokenizer.fim.suffix, tokenizer.fim.middle)]
    assert texts == ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    assert tokenizer.fim.file is not None
    assert tokenizer.decode([tokenizer.fim.file]) == "<|file_sep|>"
    assert GgufTokenizer(fetch()).fim is None
    assert tokenizer.fim.file in tokenizer.eos  # the next file begins: the gap is filled


# --- word pieces ------------------------------------------------------------------------------------------------------


def test_every_character_is_split_as_by_the_tokenizer_of_a_real_bert() -> None:
    ours, theirs = GgufTokenizer(minilm()), Tokenizer.from_file(str(minilm_folder() / "tokenizer.json"))
    theirs.no_truncation()
    theirs.no_padding()
    for start in range(0, 0x20000, 256):
        block = [chr(code) for code in range(start, start + 256) if not 0xD800 <= code < 0xE000]
        text = " ".join(f"a{character}b {character}" for character in block)
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids, hex(start)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [("한국", "ᄒ ##ᅡ ##ᆫ ##ᄀ ##ᅮ ##ᆨ"), ("हिन्दी", "ह ##ि ##न ##द ##ी"), ("Größe", "gr ##o ##ße"), ("x" * 101, "[UNK]")],
)
def test_no_vowel_of_a_script_is_lost(text: str, pieces: str) -> None:
    words = (minilm_folder() / "vocab.txt").read_text("utf-8").splitlines()
    assert [words[id] for id in GgufTokenizer(minilm()).encode(text)] == pieces.split()


def test_capitals_count_in_a_vocabulary_that_has_them() -> None:
    texts, specials = ["[UNK]", "[CLS]", "▁berlin", "er", "▁é"], {"[UNK]": 0, "[CLS]": 1}
    lowered, cased = WordPieces(texts, specials), WordPieces([*texts, "▁Berlin"], specials)
    assert lowered.encode("Berliner [CLS] É", parse_special=True) == [2, 3, 1, 0]  # without accents
    assert cased.encode("Berliner berlin [CLS] é", parse_special=True) == [5, 3, 2, 1, 4]
    assert cased.encode("Berlin[CLS]", parse_special=False) == [5, 0, 0, 0]
