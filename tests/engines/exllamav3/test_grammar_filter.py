"""Grammar filters: allowed tokens, triggers, and grammars that fail."""

from __future__ import annotations

import logging
from contextlib import closing

import numpy as np
import pytest

from modelyard.core.errors import InvalidRequest
from modelyard.core.request import Constraint
from modelyard_exllamav3.engine import GrammarFilter, GrammarFilters
from modelyard_exllamav3.model_folder import read_model_info
from tests.engines.exllamav3.fake_library import tensors
from tests.engines.exllamav3.helpers import N_VOCAB, model_folder, tokenizer

DATE = Constraint("regex", "[0-9]{4}-[0-9]{2}")


def create(constraint: Constraint) -> GrammarFilter:
    with closing(GrammarFilters(model_folder(), read_model_info(model_folder()), tensors.from_numpy)) as filters:
        found = filters.create(constraint)
    assert found is not None
    return found


def token(text: str) -> int:
    (id,) = tokenizer().encode(text)
    return id


def allowed(one: GrammarFilter) -> set[int]:
    bits = np.unpackbits(one.get_next_logit_mask().array.reshape(-1).view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def test_only_matching_tokens_are_allowed_until_the_grammar_is_complete() -> None:
    one = create(Constraint("regex", "ab|ac"))
    assert one.is_active
    assert token("a") in allowed(one)
    assert token("b") not in allowed(one)
    assert not one.feed(token("a"))
    assert {token("b"), token("c")} <= allowed(one)
    assert token("a") not in allowed(one)
    assert one.feed(token("c")), "a complete grammar ends the job"
    assert one.error is None


def test_control_tokens_do_not_match_text() -> None:
    assert not allowed(create(Constraint("regex", "(?s:.+)"))) & {1, 3, 5}
    assert allowed(create(Constraint("lark", "start: <[5]>"))) == {5}


@pytest.mark.parametrize("trigger", ["<tool_call>", "go:"])
def test_only_the_text_after_each_trigger_is_constrained(trigger: str) -> None:
    one = create(Constraint("regex", "[0-9]", trigger=trigger))
    for _ in range(2):
        assert not one.is_active
        for id in tokenizer().encode("x " + trigger):
            assert not one.feed(id)
        assert one.is_active
        assert token("7") in allowed(one)
        assert token("x") not in allowed(one)
        assert not one.feed(token("7")), "the job goes on"


def test_one_token_may_end_the_trigger_and_start_the_constrained_text() -> None:
    one = create(Constraint("regex", ":[0-9]", trigger="o:"))
    one.feed(token("o"))
    one.feed(token("::"))
    assert one.is_active
    assert token("7") in allowed(one)


def test_token_that_ends_the_trigger_with_forbidden_text_leaves_this_call_unconstrained() -> None:
    one = create(Constraint("regex", "[0-9]", trigger="o:"))
    one.feed(token("o"))
    one.feed(token("::"))
    assert not one.is_active
    assert one.error is None
    for id in tokenizer().encode("o:"):
        one.feed(id)
    assert one.is_active, "the next call is constrained again"


def test_failing_grammar_ends_its_job_without_raising() -> None:
    one = create(DATE)
    assert one.feed(token("x"))
    assert isinstance(one.error, InvalidRequest)
    assert one.error.code == "bad_grammar"
    assert len(allowed(one)) >= N_VOCAB
    assert one.feed(token("x"))


def test_reset_starts_the_grammar_again() -> None:
    one = create(DATE)
    one.feed(token("1"))
    one.reset()
    assert token("1") in allowed(one)
    assert token("-") not in allowed(one)


def test_bad_grammar_is_refused_unless_it_has_a_trigger(caplog: pytest.LogCaptureFixture) -> None:
    with closing(GrammarFilters(model_folder(), read_model_info(model_folder()), tensors.from_numpy)) as filters:
        with pytest.raises(InvalidRequest, match="unclosed group"):
            filters.create(Constraint("regex", "(a"))
        with caplog.at_level(logging.WARNING):
            assert filters.create(Constraint("lark", "start: other", trigger="<tool_call>", tools=("now",))) is None
        assert "calls of now are unconstrained" in caplog.text
