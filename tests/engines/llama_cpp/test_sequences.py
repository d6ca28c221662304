"""Which sequence takes a prompt: the decision table, and what holds for any state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelyard.engines.llama_cpp.sequences import Choice, Ids, Slot, choose, common, donor, intact


def run(*tokens: int) -> Ids:
    return np.array(tokens, np.int32)


def slot(index: int, *tokens: int, **fields: Any) -> Slot:
    return Slot(index, run(*tokens), **fields)


OLD_MAIN = slot(0, 9, 9, 9, used=1)
NEW_MAIN = slot(1, 8, 8, 8, used=3)
BACKGROUND = slot(2, 7, 7, 7, used=2, priority="background")
EMPTY = slot(3)


@pytest.mark.parametrize(
    ("slots", "prompt", "session", "expected"),
    [
        pytest.param([slot(0), slot(1)], run(1, 2), None, Choice(0, 0), id="the lowest empty one"),
        pytest.param([slot(0, busy=True), slot(1)], run(1), None, Choice(1, 0), id="never a busy one"),
        pytest.param(
            [slot(0, 1, 2, 3), slot(1, 1, 9, session="a")], run(1, 2, 3), "a", Choice(1, 1), id="the session's own"
        ),
        pytest.param(
            [slot(0, 1, 2), slot(1, 5, session="a", busy=True)], run(1, 2, 3), "a", Choice(0, 2), id="session is busy"
        ),
        pytest.param([slot(0), slot(1, 1, 2, 3)], run(1, 2, 3, 4), None, Choice(1, 3), id="the one it continues"),
        pytest.param(
            [slot(0, 1, 2), slot(1, 1, 2, 3)], run(1, 2, 3, 4), None, Choice(1, 3), id="the longer of two prefixes"
        ),
        pytest.param(
            [slot(0, 1, 2, used=1), slot(1, 1, 2, used=2)], run(1, 2, 3), None, Choice(1, 2), id="the later of equals"
        ),
        pytest.param(
            [slot(0, 1, 5, 5, 5, 5), slot(1)], run(1, 2), None, Choice(1, 0), id="a short common start is no reason"
        ),
        pytest.param(
            [slot(0, 1, 2, 3, 4, session="a"), slot(1)],
            run(1, 2, 3, 9),
            "b",
            Choice(1, 0),
            id="a shared system prompt is not the same conversation",
        ),
        pytest.param(
            [slot(0, 1, 2, 3, 4), slot(1)], run(1, 2, 3, 9), None, Choice(0, 3), id="most of it, and nobody's session"
        ),
        pytest.param([OLD_MAIN, NEW_MAIN, BACKGROUND, EMPTY], run(1), None, Choice(3, 0), id="an empty one"),
        pytest.param(
            [OLD_MAIN, NEW_MAIN, BACKGROUND], run(1), None, Choice(2, 0, evicted=True), id="background goes first"
        ),
        pytest.param([OLD_MAIN, NEW_MAIN], run(1), None, Choice(0, 0, evicted=True), id="the least recently used"),
        pytest.param(
            [slot(0, 1, 2, 3, adapters=(("x", 1.0),))],
            run(1, 2, 3, 4),
            None,
            Choice(0, 0, evicted=True),
            id="no KV of other adapters",
        ),
        pytest.param(
            [slot(0, 1, 2, session="a", adapters=(("x", 1.0),))],
            run(1, 2),
            "a",
            Choice(0, 0),
            id="not even in a session",
        ),
    ],
)
def test_choice(slots: list[Slot], prompt: Ids, session: str | None, expected: Choice) -> None:
    assert choose(slots, prompt, session) == expected


def test_donor_is_whoever_shares_more_than_the_chosen_one_keeps() -> None:
    slots = [slot(0, 1, 2, 3, busy=True), slot(1), slot(2, 1, 2), slot(3, 1, 2, 3, 4, adapters=(("x", 1.0),))]
    assert donor(slots, run(1, 2, 3, 4), Choice(1, 0), ()) == (0, 3)
    assert donor(slots, run(7), Choice(1, 0), ()) == (1, 0)
    assert donor(slots, run(1, 2), Choice(2, 2), ()) == (2, 2)


@pytest.mark.parametrize(
    ("oldest", "newest", "keep", "n_swa", "only_forward", "expected"),
    [
        pytest.param(0, 9, 10, 0, False, True, id="all there"),
        pytest.param(-1, -1, 10, 0, False, False, id="nothing there"),
        pytest.param(0, 8, 10, 0, False, False, id="the end is missing"),
        pytest.param(1, 9, 10, 0, False, False, id="the start is missing"),
        pytest.param(6, 9, 10, 4, False, True, id="the window is there"),
        pytest.param(7, 9, 10, 4, False, False, id="the window has moved on"),
        pytest.param(0, 2, 3, 4, False, True, id="shorter than the window"),
        pytest.param(9, 9, 10, 0, True, True, id="the state of a recurrent model stands at the end"),
        pytest.param(11, 11, 10, 0, True, False, id="and cannot go back"),
        pytest.param(9, 9, 10, 4, True, False, id="a hybrid with a window is held to its window"),
    ],
)
def test_cut_sequence_is_used_only_where_it_is_intact(
    oldest: int, newest: int, keep: int, n_swa: int, only_forward: bool, expected: bool
) -> None:
    assert intact(oldest, newest, keep, n_swa=n_swa, only_forward=only_forward) is expected


RUNS = st.lists(st.integers(0, 2), max_size=8).map(lambda tokens: run(*tokens))
ADAPTERS = st.sampled_from([(), (("x", 1.0),), (("x", 0.5),)])
SLOTS = st.lists(
    st.builds(
        dict,
        tokens=RUNS,
        session=st.sampled_from([None, "a", "b"]),
        adapters=ADAPTERS,
        priority=st.sampled_from(["main", "background"]),
        used=st.integers(0, 9),
        busy=st.booleans(),
    ),
    min_size=1,
    max_size=5,
).map(lambda rows: [Slot(index, **row) for index, row in enumerate(rows)])


@given(SLOTS, RUNS, st.sampled_from([None, "a"]), ADAPTERS)
def test_chosen_sequence_is_idle_and_keeps_only_its_own_verified_prefix(
    slots: list[Slot], prompt: Ids, session: str | None, adapters: Any
) -> None:
    slots[0].busy = False
    choice = choose(slots, prompt, session, adapters)
    chosen = slots[choice.index]
    assert not chosen.busy
    assert list(chosen.tokens[: choice.keep]) == list(prompt[: choice.keep])
    assert choice.keep == 0 or chosen.adapters == adapters
    source, shared = donor(slots, prompt, choice, adapters)
    assert shared >= choice.keep
    assert list(slots[source].tokens[:shared]) == list(prompt[:shared])
    assert shared == 0 or slots[source].adapters == adapters


@given(RUNS, RUNS)
def test_common_prefix_is_the_longest(a: Ids, b: Ids) -> None:
    n = common(a, b)
    assert list(a[:n]) == list(b[:n])
    assert n == min(len(a), len(b)) or a[n] != b[n]
