"""The end of reasoning whose budget is spent, token by token."""

from __future__ import annotations

import pytest

from modelyard.core.engine import ReasoningBounds, ReasoningBudget
from modelyard.engines.reasoning_limit import ReasoningLimit

WORDS = ["a", "b", "<think>", "</think>", "\n", "<th", "ink>", "</think>\n", "é".encode()[:1], "é".encode()[1:]]
A, B, THINK, END, NEWLINE, THINK_1, THINK_2, END_NEWLINE, HALF, REST = range(len(WORDS))
THINKING = ReasoningBounds("<think>", ("</think>",), (NEWLINE, END))


def run(tokens: int, model: list[int], opened: int | None = None) -> list[int]:
    """What is generated if the model would generate these tokens, as far as it is free."""
    limit = ReasoningLimit(ReasoningBudget(tokens, (THINKING,), opened), token_bytes)
    wanted, output = iter(model), list[int]()
    while True:
        forced = limit.next_token()
        token = forced if forced is not None else next(wanted, None)
        if token is None:
            return output
        output.append(token)
        limit.read(token)


def token_bytes(token: int) -> bytes:
    word = WORDS[token]
    return word if isinstance(word, bytes) else word.encode()


@pytest.mark.parametrize(
    ("tokens", "model", "opened", "output"),
    [
        pytest.param(2, [A, A, A, B], 0, [A, A, NEWLINE, END, A, B], id="closed when the budget is spent"),
        pytest.param(0, [A, B], 0, [NEWLINE, END, A, B], id="no reasoning at all"),
        pytest.param(9, [A, END, B, B], 0, [A, END, B, B], id="the model is faster"),
        pytest.param(1, [A, END_NEWLINE, B, B], 0, [A, NEWLINE, END, END_NEWLINE, B, B], id="at the same time"),
        pytest.param(2, [A, A, A], None, [A, A, A], id="text is not counted"),
        pytest.param(1, [THINK, A, A, B], None, [THINK, A, NEWLINE, END, A, B], id="opened by the model"),
        pytest.param(1, [THINK_1, THINK_2, A, B], None, [THINK_1, THINK_2, A, NEWLINE, END, B], id="of several tokens"),
        pytest.param(3, [A, END_NEWLINE, B, B, B], 0, [A, END_NEWLINE, B, B, B], id="the end inside a token"),
        pytest.param(1, [HALF, REST, B], 0, [HALF, REST, NEWLINE, END, B], id="not inside a character"),
        pytest.param(1, [A, THINK, B], 0, [A, NEWLINE, END, THINK, NEWLINE, END, B], id="opened again"),
    ],
)
def test_reasoning_ends_with_its_budget(tokens: int, model: list[int], opened: int | None, output: list[int]) -> None:
    assert run(tokens, model, opened) == output
