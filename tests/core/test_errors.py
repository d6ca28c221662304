"""The error classes: their fields, and that the tree in the docstring is correct."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import get_args

import pytest

from modelyard.core import errors
from modelyard.core.errors import (
    ContextOverflow,
    Incomplete,
    Internal,
    InvalidRequest,
    Kind,
    ModelyardError,
    OutputOverflow,
    Overloaded,
    RateLimited,
    Unavailable,
)


def tree(root: type[ModelyardError], depth: int = 0) -> Iterator[tuple[int, str]]:
    """Only what this module defines: plug-ins may add leaves of their own."""
    yield depth, root.__name__
    for child in root.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from tree(child, depth + 1)


def test_the_tree_in_the_docstring_is_correct():
    drawn = re.findall(r"^    ((?:│   |    )*)(?:[├└]── )?([A-Z]\w+)", errors.__doc__ or "", re.MULTILINE)
    names = [(len(indent) // 4 + (name != "ModelyardError"), name) for indent, name in drawn]
    assert names == list(tree(ModelyardError))


def test_every_kind_has_a_class_and_every_class_a_kind():
    classes = [getattr(errors, name) for _, name in tree(ModelyardError)]
    assert {cls.kind for cls in classes} == set(get_args(Kind))


def test_an_explicit_code_overrides_that_of_the_class():
    assert Unavailable("x").code == "engine_unavailable"
    assert Unavailable("x", code="model_failed").code == "model_failed"


def test_errors_are_equal_by_their_fields():
    assert InvalidRequest("a", param="p") == InvalidRequest("a", param="p")
    assert InvalidRequest("a", param="p") != InvalidRequest("a", param="q")
    assert InvalidRequest("a") != ModelyardError("a")
    assert hash(InvalidRequest("a")) == hash(InvalidRequest("a"))
    assert repr(Unavailable("gone")) == "Unavailable('gone', code='engine_unavailable')"


def test_overflows_carry_the_token_counts():
    alone, both = ContextOverflow(900, 512), OutputOverflow(300, 400, 512)
    assert (alone.prompt_tokens, alone.window) == (900, 512)
    assert (both.prompt_tokens, both.max_tokens, both.window) == (300, 400, 512)
    assert isinstance(alone, InvalidRequest)
    assert alone.code == both.code == "context_length_exceeded"


@pytest.mark.parametrize("error", [RateLimited("x", retry_after=3.0), Overloaded("x"), Unavailable("x")])
def test_retryable_errors_have_retry_after(error: ModelyardError):
    assert error.retry_after is not None
    assert error.retry_after > 0


def test_internal_errors_have_an_id():
    first, second = Internal(), Incomplete("cut short")
    assert first.id != second.id
    assert second.id in second.message
    assert Internal("load failed", id="load").message == "load failed"
