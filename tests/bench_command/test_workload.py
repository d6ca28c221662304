"""Workloads: of the promised lengths, the same for a seed, and never two conversations alike."""

from __future__ import annotations

import pytest

from modelyard.core.errors import InvalidRequest
from modelyard_bench.workload import WORKLOADS, PromptSizer, UserTurn, conversation, get_workload


def test_the_same_seed_and_key_give_the_same_conversation() -> None:
    for workload in WORKLOADS.values():
        assert conversation(workload, 1, "0/1") == conversation(workload, 1, "0/1")
        assert conversation(workload, 1, "0/1") != conversation(workload, 2, "0/1")


@pytest.mark.parametrize("name", WORKLOADS)
def test_no_two_conversations_share_even_their_first_words(name: str) -> None:
    starts = [conversation(WORKLOADS[name], seed, f"{key}")[0].text[:6] for seed in range(2) for key in range(20)]
    assert len(set(starts)) == len(starts)


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_turn_has_enough_words_for_its_tokens(name: str) -> None:
    workload = get_workload(name, prompt_tokens=700)
    turns = conversation(workload, 3, "x")
    assert len(turns) == workload.turns
    assert [turn.tokens for turn in turns] == [700, *[workload.turn_tokens] * (workload.turns - 1)]
    assert all(len(turn.text.split()) >= turn.tokens for turn in turns)
    assert {turn.output_tokens for turn in turns} == {workload.output_tokens}


@pytest.mark.parametrize("name", WORKLOADS)
def test_texts_do_not_repeat_and_have_no_empty_slots(name: str) -> None:
    lines = conversation(get_workload(name, prompt_tokens=2000), 5, "x")[0].text.splitlines()
    assert len(set(lines)) > 0.9 * len(lines)
    assert not any("{who" in line or "{n" in line or "{file" in line for line in lines)


def test_a_change_of_none_is_ignored() -> None:
    assert get_workload("chat", prompt_tokens=None) == WORKLOADS["chat"]
    assert get_workload("chat", output_tokens=5).output_tokens == 5


def test_an_unknown_workload_names_those_that_exist() -> None:
    with pytest.raises(InvalidRequest, match="'talk'; choose one of chat, agent, batch"):
        get_workload("talk")


def test_a_conversation_needs_context_for_all_its_turns() -> None:
    assert get_workload("chat").context_tokens == 64 + 128
    agent = get_workload("agent", prompt_tokens=100, output_tokens=10, turns=3)
    assert agent.context_tokens == 100 + 2 * agent.turn_tokens + 3 * 10


@pytest.mark.parametrize(
    ("count", "cut"), [(1, "one"), (2.4, "one two"), (3, "one two\nthree"), (9, "one two\nthree"), (0, "one")]
)
def test_a_text_is_cut_between_words(count: float, cut: str) -> None:
    assert UserTurn("one two\nthree", 3, 1).first_words(count) == cut


# --- sizes ------------------------------------------------------------------------------------------------------------


def turn(tokens: int) -> UserTurn:
    return UserTurn(" ".join(f"w{n}" for n in range(tokens * 2)), tokens, 1)


def test_the_first_prompt_has_an_estimated_length() -> None:
    assert len(PromptSizer().first_message(turn(90)).split()) == 60
    assert len(PromptSizer().later_message(turn(90)).split()) == 60


def test_the_sizer_learns_the_wanted_length_for_any_tokenizer_and_template() -> None:
    for wanted in (40, 100, 2000):
        for slope in (1.1, 1.5, 2.4):
            for overhead in (0, 31):
                sizer = PromptSizer()
                for _ in range(12):
                    text = sizer.first_message(turn(wanted))
                    sizer.learn(text, round(overhead + slope * len(text.split())))
                found = overhead + slope * len(sizer.first_message(turn(wanted)).split())
                assert abs(found - wanted) <= 3 + 0.01 * wanted, (wanted, slope, overhead)


def test_later_turns_are_sized_by_their_words() -> None:
    sizer = PromptSizer()
    sizer.learn("a b c d", 8)
    assert len(sizer.later_message(turn(90)).split()) == 45


def test_a_server_without_usage_teaches_nothing() -> None:
    sizer = PromptSizer()
    sizer.learn("a b c d", 0)
    assert len(sizer.first_message(turn(90)).split()) == 60


def test_a_prompt_is_never_empty() -> None:
    sizer = PromptSizer()
    sizer.learn("a", 5000)
    assert sizer.first_message(turn(10)) == "w0"
