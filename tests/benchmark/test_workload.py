"""Workloads: of the lengths they promise, the same for a seed, and never two conversations alike."""

from __future__ import annotations

import pytest

from modelyard.benchmark.workload import WORKLOADS, Ask, named, talk
from modelyard.core.errors import InvalidRequest


def test_the_same_seed_and_name_give_the_same_conversation() -> None:
    for workload in WORKLOADS.values():
        assert talk(workload, 1, "0/1") == talk(workload, 1, "0/1")


@pytest.mark.parametrize("name", WORKLOADS)
def test_no_two_conversations_share_even_their_first_words(name: str) -> None:
    starts = [talk(WORKLOADS[name], seed, f"{key}").asks[0].words[:6] for seed in range(2) for key in range(20)]
    assert len(set(starts)) == len(starts)


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_turn_has_words_enough_for_its_tokens(name: str) -> None:
    workload = named(name, prompt_tokens=700)
    asks = talk(workload, 3, "x").asks
    assert len(asks) == workload.turns
    assert [ask.tokens for ask in asks] == [700, *[workload.turn_tokens] * (workload.turns - 1)]
    assert all(len(ask.words.split()) >= ask.tokens for ask in asks)
    assert {ask.output_tokens for ask in asks} == {workload.output_tokens}


@pytest.mark.parametrize("name", WORKLOADS)
def test_texts_do_not_repeat_themselves(name: str) -> None:
    lines = talk(named(name, prompt_tokens=2000), 5, "x").asks[0].words.splitlines()
    assert len(set(lines)) > 0.9 * len(lines)


def test_a_change_of_none_changes_nothing() -> None:
    assert named("chat", prompt_tokens=None) == WORKLOADS["chat"]
    assert named("chat", output_tokens=5).output_tokens == 5


def test_an_unknown_workload_is_told_those_that_exist() -> None:
    with pytest.raises(InvalidRequest, match="'talk'; there are chat, agent, batch"):
        named("talk")


def test_a_conversation_takes_all_its_turns_of_the_window() -> None:
    assert named("chat").longest == 64 + 128
    agent = named("agent", prompt_tokens=100, output_tokens=10, turns=3)
    assert agent.longest == 100 + 2 * agent.turn_tokens + 3 * 10


@pytest.mark.parametrize(
    ("count", "cut"), [(1, "one"), (2.4, "one two"), (3, "one two\nthree"), (9, "one two\nthree"), (0, "one")]
)
def test_a_text_is_cut_between_words(count: float, cut: str) -> None:
    assert Ask("one two\nthree", 3, 1).cut(count) == cut
