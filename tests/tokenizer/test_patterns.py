"""Patterns whose time is linear in the text are told from those whose is not."""

from __future__ import annotations

import time

import pytest

from modelyard.tokenizer.patterns import is_linear, probes, regexes
from tests.tokenizer.test_word_cache import GPT4O, LLAMA3, QWEN2

TEKKEN = GPT4O.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", "")
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize(
    "pattern",
    [
        LLAMA3,
        QWEN2,
        GPT4O,
        TEKKEN,
        CL100K,
        DEEPSEEK,
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f]+",
        r"\s?\p{L}+",
        "[0-9][0-9][0-9]",
        r"[\r\n]",
        " ",
    ],
)
def test_the_patterns_of_common_models_are_linear(pattern: str) -> None:
    assert is_linear(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$|(a|aa)+$|x",
        "(?:a|ab)*c",
        "a*$|x",
        "a*a*b",
        r"\s*[\r\n]+",  # nothing else matches spaces
        r"\s+(?!\S)|\p{L}+",
        r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|\s+",
        r"(a)\1+",
        r"\g<0>a|b",
        "a{2,}b",
        "(?=a*b)a",
        ".*x",
        r"\p{L}+\s+|\s+",
    ],
)
def test_a_pattern_that_may_try_again_is_not_linear(pattern: str) -> None:
    assert not is_linear(pattern)


def test_all_patterns_of_a_step_and_its_parts_are_found() -> None:
    split = {"type": "Split", "pattern": {"Regex": "a"}}
    replace = {"type": "Replace", "pattern": {"String": "not one"}, "content": "Regex"}
    assert list(regexes([None, {"type": "Sequence", "pretokenizers": [split, replace]}, split])) == ["a", "a"]


def test_probes_are_runs_of_what_a_pattern_contains() -> None:
    began = time.perf_counter()
    made = list(probes("(qz|q)+\\p{L}[\u00df]"))
    assert {"q" * 30, "qz" * 15 + "!", "\u00df" * 20_000, " " * 20_000} <= set(made)
    assert len(made) < 200
    assert time.perf_counter() - began < 5
