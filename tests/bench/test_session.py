"""The agent's session: who speaks when, and that it is the same every time."""

from __future__ import annotations

from collections import Counter

from bench.session import QUICK, Conversation, Plan, replay


def played(plan: Plan) -> list[tuple[Conversation, int]]:
    """Each request with the length of its conversation."""
    seen = []
    for talk in replay(plan):
        seen.append((talk, len(talk.messages)))
        talk.hears("fine")
    return seen


def test_twenty_turns_four_small_requests_between_them_and_two_sub_agents():
    kinds = Counter(talk.kind for talk, _ in played(Plan()))
    assert kinds == {"main": 20, "background": 19 * 4, "sub-agent": 2 * 5}


def test_the_main_conversation_grows_by_what_was_answered():
    lengths = [length for talk, length in played(Plan()) if talk.kind == "main"]
    assert lengths == list(range(2, 42, 2))


def test_the_main_system_prompt_is_long_and_begins_every_turn():
    talks = [talk for talk, _ in played(Plan()) if talk.kind == "main"]
    assert len({id(talk) for talk in talks}) == 1
    assert len(talks[0].messages[0]["content"]) == 20_000


def test_background_requests_share_four_system_prompts_and_no_text():
    talks = [talk for talk, _ in played(Plan()) if talk.kind == "background"]
    assert len({talk.messages[0]["content"] for talk in talks}) == 4
    assert len({(talk.name, talk.messages[1]["content"]) for talk in talks}) == len(talks)
    assert {talk.model for talk in talks} == {"claude-haiku"}


def test_a_session_is_the_same_every_time():
    first, second = ([talk.messages for talk, _ in played(QUICK)] for _ in range(2))
    assert first == second
