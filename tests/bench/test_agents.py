"""The agent benchmark: the session, a short run against a server, and what is compared."""

from __future__ import annotations

import asyncio
from collections import Counter

import psutil
from msgspec import structs

from bench.agents import BEST, EQUAL, QUICK, Conversation, Plan, SessionCost, comparisons, run, session
from bench.servers import OURS, Server
from tests.live_server import demo_config, live_server


def played(plan: Plan) -> list[tuple[Conversation, int]]:
    """Each request with the number of its messages."""
    seen = []
    for conversation in session(plan):
        seen.append((conversation, len(conversation.messages)))
        conversation.add("assistant", "fine")
    return seen


def test_a_session_has_twenty_turns_small_requests_between_them_and_two_sub_agents() -> None:
    kinds = Counter(conversation.kind for conversation, _ in played(Plan()))
    assert kinds == {"main": 20, "background": 19 * 4, "sub-agent": 2 * 5}


def test_the_main_conversation_grows_by_its_responses_on_one_long_system_prompt() -> None:
    main = [(conversation, length) for conversation, length in played(Plan()) if conversation.kind == "main"]
    assert [length for _, length in main] == list(range(2, 42, 2))
    assert len({id(conversation) for conversation, _ in main}) == 1
    assert len(main[0][0].messages[0]["content"]) == 20_000


def test_background_requests_share_four_system_prompts_and_no_text() -> None:
    found = [conversation for conversation, _ in played(Plan()) if conversation.kind == "background"]
    assert len({one.messages[0]["content"] for one in found}) == 4
    assert len({(one.name, one.messages[1]["content"]) for one in found}) == len(found)
    assert {one.model for one in found} == {"claude-haiku"}


def test_a_session_is_the_same_every_time() -> None:
    first, second = ([one.messages for one, _ in played(QUICK)] for _ in range(2))
    assert first == second


async def test_a_session_is_run_to_its_end_and_summed_up() -> None:
    seen: list[str] = []
    with live_server(demo_config([{"steps": [{"tokens": 3}]}])) as served:
        server = Server(psutil.Process(), int(served.url.rpartition(":")[2]))
        found = await asyncio.to_thread(run, server, QUICK, lambda one: seen.append(one.name))
    assert found.requests == len(seen) == sum(1 for _ in session(QUICK))
    assert found.output == 3 * found.requests
    assert 0 < found.ttft <= found.seconds
    assert found.peak_mb > 0


ONE = SessionCost(10, 1000, 100, 50, 2.0, 10.0, 8.0, 500.0)


def test_the_best_server_sets_the_times_and_the_equal_one_the_tokens() -> None:
    equal = structs.replace(ONE, evaluated=1000)
    lines = {line.name: line for line in comparisons({OURS: [ONE, ONE], BEST: [ONE, ONE], EQUAL: [equal]})}
    assert lines["prompt tokens evaluated, equal KV memory"].met is True
    assert lines["prompt tokens evaluated"].met is True
    assert lines["times to first token, summed"].met is False
    assert lines["the whole session"].met is True


def test_the_equal_server_can_be_left_out() -> None:
    assert all("equal" not in line.name for line in comparisons({OURS: [ONE], BEST: [ONE]}))
