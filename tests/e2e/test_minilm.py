"""The real all-MiniLM-L6-v2 over HTTP: its tokens are those of its makers' tokenizer, and its vectors those of
sentence-transformers.

Two references: the encoder in numpy, from the same weights, and vectors that sentence-transformers has computed
(minilm_vectors.json, which says how).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from tokenizers import Tokenizer

from tests.live_server import live_server
from tests.real_models import ENGLISH, minilm, minilm_folder, read_tensors

STORED: dict[str, Any] = json.loads((Path(__file__).parent / "minilm_vectors.json").read_text("utf-8"))
TEXTS: list[str] = STORED["texts"]
HEADS, EPSILON = 12, 1e-12


@cache
def tokenizer() -> Any:
    """The one in its package, without the truncation to 128 tokens that its file asks for."""
    found = Tokenizer.from_file(str(minilm_folder() / "tokenizer.json"))
    found.no_truncation()
    found.no_padding()
    return found


@cache
def weights() -> dict[str, Any]:
    return read_tensors(minilm_folder() / "model.safetensors")


def linear(x: Any, name: str) -> Any:
    return x @ weights()[f"{name}.weight"].T + weights()[f"{name}.bias"]


def normed(x: Any, name: str) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + EPSILON)
    return scaled * weights()[f"{name}.weight"] + weights()[f"{name}.bias"]


def attended(x: Any, layer: str) -> Any:
    query, key, value = (
        linear(x, f"{layer}.self.{name}").reshape(len(x), HEADS, -1).transpose(1, 0, 2)
        for name in ("query", "key", "value")
    )
    scores = query @ key.transpose(0, 2, 1) / math.sqrt(query.shape[-1])
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = (scores / scores.sum(-1, keepdims=True)) @ value
    return linear(mixed.transpose(1, 0, 2).reshape(len(x), -1), f"{layer}.output.dense")


def error_function(x: Any) -> Any:
    """By Abramowitz and Stegun, 7.1.26: exact to 1.5e-7."""
    t = 1 / (1 + 0.3275911 * np.abs(x))
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return np.sign(x) * (1 - series * np.exp(-(x**2)))


def vector(ids: list[int]) -> Any:
    """BERT, the mean of all tokens, and length 1."""
    table = weights()
    x = table["embeddings.word_embeddings.weight"][ids]
    x = (
        x
        + table["embeddings.position_embeddings.weight"][: len(ids)]
        + table["embeddings.token_type_embeddings.weight"][0]
    )
    x = normed(x, "embeddings.LayerNorm")
    for layer in (f"encoder.layer.{number}" for number in range(6)):
        x = normed(x + attended(x, f"{layer}.attention"), f"{layer}.attention.output.LayerNorm")
        inner = linear(x, f"{layer}.intermediate.dense")
        inner = inner * (1 + error_function(inner / math.sqrt(2))) / 2
        x = normed(x + linear(inner, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
    mean = x.mean(0)
    return mean / np.linalg.norm(mean)


# --- over HTTP --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with live_server({"models": {"minilm": {"path": str(minilm()), "n_threads": 1}}}) as server:
        yield server.url


def embedded(url: str, texts: list[str]) -> tuple[Any, int]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="-", timeout=120, max_retries=0) as client:
        reply = client.embeddings.create(model="minilm", input=texts, encoding_format="float")
    return np.array([each.embedding for each in reply.data]), reply.usage.prompt_tokens


def assert_close(ours: Any, theirs: Any) -> None:
    """llama.cpp has the approximation of GELU by tanh, in a table of 16-bit numbers: measured, 4e-4 and 0.999998."""
    assert np.abs(ours - theirs).max() < 1e-3
    assert (ours * theirs).sum(1).min() > 0.9999  # both have length 1


def test_vectors_are_those_of_sentence_transformers(url: str) -> None:
    ours, tokens = embedded(url, TEXTS)
    assert tokens == sum(len(tokenizer().encode(text).ids) for text in TEXTS)
    assert_close(ours, np.array(STORED["vectors"]))
    assert_close(ours, np.array([vector(tokenizer().encode(text).ids) for text in TEXTS]))


def test_a_text_alone_has_the_vector_that_it_has_among_others(url: str) -> None:
    together, _ = embedded(url, TEXTS[:4])
    for text, row in zip(TEXTS[:4], together, strict=True):
        assert_close(embedded(url, [text])[0], row[None])


def test_similar_texts_are_found_in_any_wording(url: str) -> None:
    texts = [
        "A man is eating food.",
        "Someone has a meal.",
        "The stock market fell sharply.",
        "Shares lost much value.",
    ]
    vectors, _ = embedded(url, texts)
    near = vectors @ vectors.T - np.eye(4)
    assert near.argmax(1).tolist() == [1, 0, 3, 2]


def test_texts_are_tokenized_as_by_the_makers_tokenizer(url: str) -> None:
    corpus = [*TEXTS, ENGLISH, "[CLS] [MASK] [unused1] ##s", "x" * 101, "a\u0301\u200b\u00ad\ufffd\x00\u3000\u2028b"]
    with httpx.Client(base_url=url, timeout=60) as client:
        for text in corpus:
            ours = client.post("/tokenize", json={"model": "minilm", "content": text}).json()["tokens"]
            assert ours == tokenizer().encode(text, add_special_tokens=False).ids, text


def test_a_text_beyond_the_window_is_refused_and_never_cut(url: str) -> None:
    longest = "word " * 510
    ours, tokens = embedded(url, [longest])
    assert tokens == 512
    assert_close(ours, vector(tokenizer().encode(longest).ids)[None])
    with pytest.raises(openai.BadRequestError) as caught:
        embedded(url, [longest + "more"])
    assert caught.value.code == "context_length_exceeded"
