"""The token cache: unchanged prefixes are not tokenized again."""

from __future__ import annotations

import json
from threading import Thread

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.tokenizer.huggingface import HuggingFaceTokenizer
from modelyard.tokenizer.prefix_cache import TokenCache, TwoGenerationCache
from modelyard.tokenizer.shield import shield, unshield
from tests.tokenizer import sample_tokenizers


def stripping() -> str:
    text = json.loads(sample_tokenizers.byte_level())
    text["normalizer"] = {
        "type": "Sequence",
        "normalizers": [{"type": "Strip", "strip_left": True, "strip_right": True}],
    }
    return json.dumps(text)


VOCABS = {
    "byte level": HuggingFaceTokenizer.from_text(sample_tokenizers.byte_level()),
    "byte level, prefix space": HuggingFaceTokenizer.from_text(sample_tokenizers.byte_level(prefix_space=True)),
    "metaspace first": HuggingFaceTokenizer.from_text(sample_tokenizers.metaspace("first")),
    "metaspace always": HuggingFaceTokenizer.from_text(sample_tokenizers.metaspace("always")),
    "metaspace never": HuggingFaceTokenizer.from_text(sample_tokenizers.metaspace("never")),
    "legacy llama": HuggingFaceTokenizer.from_text(sample_tokenizers.legacy_llama()),
    "word piece": HuggingFaceTokenizer.from_text(sample_tokenizers.word_piece()),
    "stripping normalizer": HuggingFaceTokenizer.from_text(stripping()),
    "greedy neighbours": HuggingFaceTokenizer.from_text(
        sample_tokenizers.edited(sample_tokenizers.byte_level(), lstrip=True, rstrip=True)
    ),
}
TEXTS = st.lists(
    st.sampled_from(
        [
            *sample_tokenizers.CONTROLS,
            *sample_tokenizers.MARKERS,
            "[SEP]",
            "[CLS]",
            " ",
            "  ",
            "\n",
            "fox",
            " fox",
            "ﬁ",
            "é",
            "e\u0301",
            "👋🏽",
            "<|im_",
            "|>",
            "<",
        ]
    )
    | st.text(max_size=5).map(unshield),
    max_size=14,
).map("".join)


@pytest.mark.parametrize("name", VOCABS)
def test_the_cache_gives_the_ids_of_a_full_tokenization(name: str) -> None:
    vocab = VOCABS[name]
    tokens = TokenCache(vocab, vocab.cuts, limit_bytes=20_000)

    @settings(max_examples=100, deadline=None)
    @given(TEXTS, TEXTS)
    def holds(prefix: str, more: str) -> None:
        assert tokens.encode(prefix) == vocab.encode(prefix)
        assert tokens.encode(prefix + more) == vocab.encode(prefix + more)
        assert tokens.encode(prefix) == vocab.encode(prefix)

    holds()


def test_an_unchanged_prefix_is_never_tokenized_again() -> None:
    vocab = CountingTokenizer(sample_tokenizers.byte_level())
    tokens = TokenCache(vocab, vocab.cuts)
    turn = "<|im_start|>user\nThe quick brown fox<|im_end|>\n"
    tokens.encode(turn)
    vocab.seen.clear()
    tokens.encode(turn + "<|im_start|>assistant\nnew words")
    assert vocab.seen == ["<|im_start|>assistant\nnew words"]


def test_fresh_counts_the_characters_still_to_tokenize() -> None:
    vocab = VOCABS["byte level"]
    tokens = TokenCache(vocab, vocab.cuts)
    text = "start<|im_start|>abc<|im_end|>\n"
    assert tokens.fresh(text) == len("start") + len("abc") + len("\n")
    tokens.encode(text)
    assert tokens.fresh(text) == 0
    assert tokens.fresh(text + "<|im_start|>abcd") == 4


def test_old_segments_are_evicted_when_the_cache_is_full() -> None:
    vocab = VOCABS["byte level"]
    tokens = TokenCache(vocab, vocab.cuts, limit_bytes=4_000)
    tokens.encode("<|im_start|>the first one")
    for number in range(50):
        tokens.encode(f"<|im_start|>another one, number {number}")
    assert tokens.fresh("<|im_start|>the first one") == len("the first one")


def test_a_segment_in_use_is_not_evicted() -> None:
    vocab = VOCABS["byte level"]
    tokens = TokenCache(vocab, vocab.cuts, limit_bytes=8_000)
    for number in range(100):
        tokens.encode(f"<|im_start|>the system prompt<|im_end|>number {number}")
    assert tokens.fresh("<|im_start|>the system prompt") == 0


@pytest.mark.parametrize("name", VOCABS)
def test_shielded_text_stays_text_and_control_tokens_stay_tokens(name: str) -> None:
    vocab = VOCABS[name]
    tokens = TokenCache(vocab, vocab.cuts)
    start, end = ("[CLS]", "[SEP]") if name == "word piece" else ("<|im_start|>", "<|im_end|>")
    ids = tokens.encode(f"{start}user {shield(f'quoted {end} fox', vocab.specials)}{end}")
    assert ids.count(vocab.specials[end]) == 1
    assert ids[-1] == vocab.specials[end]
    assert ids[0] == vocab.specials[start]


def test_a_shielded_segment_gets_no_extra_space() -> None:
    vocab = VOCABS["metaspace first"]
    tokens = TokenCache(vocab, vocab.cuts)
    ids = tokens.encode("<|im_start|>" + shield("fox<|im_end|>", vocab.specials))
    assert vocab.token_bytes(ids[1]).startswith(b"f")


def test_two_threads_and_a_small_cache_agree_with_the_tokenizer() -> None:
    vocab = VOCABS["byte level"]
    tokens = TokenCache(vocab, vocab.cuts, limit_bytes=3_000)
    texts = [f"<|im_start|>turn {n}<|im_end|>\n" * 3 for n in range(40)]
    wrong: list[str] = []

    def work() -> None:
        wrong.extend(text for text in texts * 3 if tokens.encode(text) != vocab.encode(text))

    threads = [Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


class CountingTokenizer(HuggingFaceTokenizer):
    def __new__(cls, text: str) -> CountingTokenizer:
        tokenizer_json = HuggingFaceTokenizer.from_text(text)
        tokenizer_json.__class__ = cls
        return tokenizer_json  # type: ignore[return-value]

    def __init__(self, text: str) -> None:
        self.seen: list[str] = []
        self.words = None  # every segment goes through `encode` and is counted

    def encode(self, text: str) -> list[int]:
        self.seen.append(text)
        return super().encode(text)


# --- the model's own spelling -----------------------------------------------------------------------------------------

CHATML = VOCABS["byte level"]
OPENED = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def encode_by_character(text: str) -> list[int]:
    """A character at a time, as no tokenizer would."""
    return [token for character in text for token in CHATML.encode_plain(character)]


def test_generated_text_is_encoded_with_the_generated_tokens() -> None:
    tokens = TokenCache(CHATML, ["<|im_start|>", "<|im_end|>"])
    prompt, generated = tokens.encode(OPENED), encode_by_character("Hello there, how are you?")
    assert generated != CHATML.encode_plain("Hello there, how are you?")
    tokens.learn(prompt, generated)
    later = tokens.encode(OPENED + "Hello there, how are you?<|im_end|>\n<|im_start|>user\nfine<|im_end|>\n")
    assert later[: len(prompt) + len(generated)] == prompt + generated
    assert CHATML.decode(later).endswith("how are you?<|im_end|>\n<|im_start|>user\nfine<|im_end|>\n")


def test_each_segment_between_control_tokens_is_learned_separately() -> None:
    tokens = TokenCache(CHATML, ["<|im_start|>", "<|im_end|>"])
    prompt, end = tokens.encode(OPENED), CHATML.specials["<|im_end|>"]
    generated = [*encode_by_character("Hello there"), end, *encode_by_character(" and there")]
    tokens.learn(prompt, generated)
    assert tokens.encode(OPENED + "Hello there<|im_end|> and there") == prompt + generated


def test_a_known_text_is_not_learned_again() -> None:
    """Another conversation may use it as its prefix."""
    tokens = TokenCache(CHATML, ["<|im_start|>", "<|im_end|>"])
    known = tokens.encode(OPENED + "Hello there, how are you?")
    tokens.learn(tokens.encode(OPENED), encode_by_character("Hello there, how are you?"))
    assert tokens.encode(OPENED + "Hello there, how are you?") == known


@pytest.mark.parametrize("text", ["<|im_end|> is how a turn ends", "\ufffd"])
def test_quoted_control_tokens_and_invalid_text_are_not_learned(text: str) -> None:
    tokens = TokenCache(CHATML, ["<|im_start|>", "<|im_end|>"])
    generated = encode_by_character(text)[:-1] if text == "\ufffd" else encode_by_character(text)
    tokens.learn(tokens.encode(OPENED), generated)
    fresh = TokenCache(CHATML, ["<|im_start|>", "<|im_end|>"])
    assert tokens.encode(OPENED + text) == fresh.encode(OPENED + text)


def test_a_quotation_of_a_control_token_is_not_learned_as_the_token() -> None:
    """The template may write the token itself later, also one at which no text is split."""
    quoted, cuts = "<|im_end|> is how a turn ends", ["<|im_start|>"]
    tokens, text = TokenCache(CHATML, cuts), OPENED.replace("<|im_end|>", "")
    prompt = tokens.encode(text)
    tokens.learn(prompt, encode_by_character(quoted))
    assert CHATML.specials["<|im_end|>"] not in encode_by_character(quoted)
    assert CHATML.specials["<|im_end|>"] in tokens.encode(text + quoted)[len(prompt) :]


def test_a_prompt_without_a_control_token_teaches_nothing() -> None:
    tokens = TokenCache(CHATML, ["<|im_start|>", "<|im_end|>"])
    tokens.learn(CHATML.encode_plain("once upon"), encode_by_character(" a time there was"))
    assert tokens.encode("once upon a time there was") == CHATML.encode("once upon a time there was")


def test_get_returns_what_was_put() -> None:
    cache = TwoGenerationCache(10_000)
    cache.put("one", [1])
    assert cache.get("one") == [1]
    assert cache.get("two") is None
    assert "one" in cache
    assert "two" not in cache


def test_put_does_not_replace_an_entry() -> None:
    cache = TwoGenerationCache(10_000)
    cache.put("one", [1])
    cache.put("one", [2])
    assert cache.get("one") == [1]


def test_recently_used_entries_stay_and_others_are_evicted() -> None:
    cache = TwoGenerationCache(10_000)
    cache.put("used", [1])
    cache.put("never", [2])
    for number in range(200):
        cache.put(f"another {number}", [3])
        assert cache.get("used") == [1]
    assert "never" not in cache
