from __future__ import annotations

from modelyard.core.engine import IdLogprob
from modelyard.scanner.logprobs import Trail


def _trail() -> Trail:
    trail = Trail(lambda i: (chr(i), bytes([i])))
    for at, token in ((1, 97), (2, 98), (3, 99)):
        trail.note(at, IdLogprob(token, -1.0))
    return trail


def test_a_token_comes_with_the_text_in_which_it_ends() -> None:
    trail = _trail()
    trail.show(0, 2, seen=10)
    assert [t.token for t in trail.take(11)] == ["a"]
    assert [t.token for t in trail.take(12)] == ["b"]


def test_tokens_that_are_no_visible_text_are_passed_over() -> None:
    trail = _trail()
    trail.pass_over(2)
    trail.show(2, 3, seen=0)
    assert [t.token for t in trail.take(1)] == ["c"]
