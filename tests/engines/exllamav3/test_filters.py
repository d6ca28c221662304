"""Constrained output on its own: what is allowed when, triggers, and grammars that break."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from modelyard.core.errors import InvalidRequest
from modelyard.core.request import Constraint
from modelyard.engines.exllamav3 import model_folder as folder
from modelyard.engines.exllamav3.grammar_filter import GrammarFilter, GrammarFilters
from tests.engines.exllamav3.stage import model_folder, vocabulary
from tests.engines.exllamav3.standin import tensors

DATE = Constraint("regex", "[0-9]{4}-[0-9]{2}")


def made(constraint: Constraint) -> GrammarFilter:
    filters = GrammarFilters(model_folder(), folder.read_model_info(model_folder()), tensors.from_numpy)
    found = filters.make(constraint)
    assert found is not None
    return found


def token(text: str) -> int:
    (id,) = vocabulary().encode(text)
    return id


def allowed(one: GrammarFilter) -> set[int]:
    bits = np.unpackbits(one.get_next_logit_mask().array.reshape(-1).view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def test_only_what_fits_is_allowed_until_it_is_complete() -> None:
    one = made(Constraint("regex", "ab|ac"))
    assert one.is_active
    assert token("a") in allowed(one)
    assert token("b") not in allowed(one)
    assert not one.feed(token("a"))
    assert {token("b"), token("c")} <= allowed(one)
    assert token("a") not in allowed(one)
    assert one.feed(token("c")), "what is complete ends the job"
    assert one.fault is None


def test_control_tokens_are_no_text() -> None:
    assert not allowed(made(Constraint("regex", "(?s:.+)"))) & {1, 3, 5}
    assert allowed(made(Constraint("lark", "start: <[5]>"))) == {5}


@pytest.mark.parametrize("trigger", ["<tool_call>", "go:"])
def test_trigger_binds_what_follows_it_and_that_only_each_time(trigger: str) -> None:
    one = made(Constraint("regex", "[0-9]", trigger=trigger))
    for _ in range(2):
        assert not one.is_active
        for id in vocabulary().encode("x " + trigger):
            assert not one.feed(id)
        assert one.is_active
        assert token("7") in allowed(one)
        assert token("x") not in allowed(one)
        assert not one.feed(token("7")), "the job goes on"


def test_token_may_end_the_trigger_and_begin_what_follows() -> None:
    one = made(Constraint("regex", ":[0-9]", trigger="o:"))
    one.feed(token("o"))
    one.feed(token("::"))
    assert one.is_active
    assert token("7") in allowed(one)


def test_token_that_ends_the_trigger_with_what_does_not_fit_leaves_this_one_free() -> None:
    one = made(Constraint("regex", "[0-9]", trigger="o:"))
    one.feed(token("o"))
    one.feed(token("::"))
    assert not one.is_active
    assert one.fault is None
    for id in vocabulary().encode("o:"):
        one.feed(id)
    assert one.is_active, "the next one is bound again"


def test_grammar_that_breaks_ends_its_job_and_raises_nothing() -> None:
    one = made(DATE)
    assert one.feed(token("x"))
    assert isinstance(one.fault, InvalidRequest)
    assert one.fault.code == "bad_grammar"
    assert len(allowed(one)) >= 4096
    assert one.feed(token("x"))


def test_filter_begins_anew_when_it_is_reset() -> None:
    one = made(DATE)
    one.feed(token("1"))
    one.reset()
    assert token("1") in allowed(one)
    assert token("-") not in allowed(one)


def test_bad_grammar_is_refused_and_a_triggered_one_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    filters = GrammarFilters(model_folder(), folder.read_model_info(model_folder()), tensors.from_numpy)
    with pytest.raises(InvalidRequest, match="unclosed group"):
        filters.make(Constraint("regex", "(a"))
    with caplog.at_level(logging.WARNING):
        assert filters.make(Constraint("lark", "start: other", trigger="<tool_call>", tools=("now",))) is None
    assert "the calls of now stay free" in caplog.text
