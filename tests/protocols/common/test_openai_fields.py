from __future__ import annotations

import msgspec
import pytest

from modelyard.core.errors import InvalidRequest
from modelyard.core.events import Usage
from modelyard.protocols.common.openai_fields import (
    OpenAIUsage,
    PromptField,
    Prompts,
    read_prompts,
    read_usage,
    write_usage,
)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("hi", ("hi",)),
        ("", ("",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
        (["a", [3]], ("a", (3,))),
    ],
)
def test_prompts_are_texts_or_token_ids(value: PromptField, expected: Prompts) -> None:
    assert read_prompts(value, "prompt") == expected


@pytest.mark.parametrize(
    ("value", "param", "message"),
    [
        (None, "prompt", "required"),
        ([], "prompt", "empty list"),
        ([[]], "prompt[0]", "empty list"),
        (["a", 1], "prompt[1]", "one kind only"),
        ([1, "a"], "prompt", "'a' is not a token id"),
        ([1, -1], "prompt", "-1 is not a token id"),
        ([[2**31]], "prompt[0]", "is not a token id"),
        (["x"] * 2049, "prompt", "at most 2048"),
    ],
)
def test_an_invalid_prompt_is_named(value: PromptField | None, param: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        read_prompts(value, "prompt")
    assert caught.value.param == param


def test_usage_counts_a_shared_prompt_once() -> None:
    usages = [Usage(10, 4, 3, 1), Usage(10, 10, 5, 2)]
    assert msgspec.to_builtins(write_usage(usages[:1], usages)) == {
        "prompt_tokens": 10,
        "completion_tokens": 8,
        "total_tokens": 18,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 3},
    }


def test_one_answer_alone_is_its_own_sum() -> None:
    usage = Usage(10, 4, 3, 1)
    assert write_usage([usage], [usage]) == write_usage([usage], [usage, Usage()])


def test_missing_usage_fields_read_as_zero() -> None:
    assert read_usage(None) == Usage()
    assert read_usage(OpenAIUsage(prompt_tokens=5)) == Usage(5)
