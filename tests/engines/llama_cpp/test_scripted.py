"""Scripted answers on the real engine: their KV is computed and reused by the next turn."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from bench.scripted_llama import scripted_answers
from modelyard.core.engine import CacheInfo
from modelyard.core.request import Constraint
from modelyard.engines.llama_cpp.engine import LlamaCppEngine
from tests.engines.llama_cpp.helpers import chatml, prompt, running, vocabulary
from tests.engines.llama_cpp.short_model import short_model_file
from tests.engines.reading import accepted, end, ids, read

CACHES = {"main": CacheInfo(512, 2)}


@asynccontextmanager
async def scripted(rules: list[dict[str, Any]]) -> AsyncIterator[LlamaCppEngine]:
    with scripted_answers(rules):
        async with running(CACHES, path=str(short_model_file())) as engine:
            yield engine


def text_of(chunks: Any) -> str:
    return vocabulary().decode(ids(chunks))


async def test_the_script_answers_and_the_next_turn_reuses_its_kv() -> None:
    call = {"name": "read", "arguments": {"path": "a.txt"}}
    rules: list[dict[str, Any]] = [
        {"result": "forty", "steps": [{"text": "It is forty-two."}]},
        {"when": "look", "steps": [{"think": "Hm."}, {"text": "Looking.\n"}, {"call": call}]},
    ]
    async with scripted(rules) as engine:
        first = await read(engine.generate(prompt("look into it", max_tokens=200, session="a")))
        turn = chatml(
            ("user", "look into it"),
            ("assistant", text_of(first)),
            ("user", "<tool_response>\nforty-two\n</tool_response>"),
        )
        second = await read(engine.generate(prompt(turn, max_tokens=200, session="a")))
    assert text_of(first) == (
        "<think>\nHm.\n</think>\n\nLooking.\n"
        '<tool_call>\n{"name": "read", "arguments": {"path": "a.txt"}}\n</tool_call>'
    )
    assert end(first).reason == end(second).reason == "stop"
    assert text_of(second) == "It is forty-two."
    assert accepted(second).cached_tokens == end(first).usage.prompt + end(first).usage.output


async def test_turns_count_per_session_and_a_prompt_without_a_rule_gets_an_empty_answer() -> None:
    rules = [{"turn": n, "steps": [{"text": f"Answer {n}."}]} for n in (1, 2)]
    async with scripted(rules) as engine:
        answers = [
            text_of(await read(engine.generate(prompt("go on", max_tokens=50, session=session))))
            for session in "aabaab"
        ]
    assert answers == ["Answer 1.", "Answer 2.", "Answer 1.", "", "", "Answer 2."]


async def test_limits_apply_to_scripted_answers_and_grammars_do_not() -> None:
    rules = [{"steps": [{"tokens": 12}]}]
    async with scripted(rules) as engine:
        cut = await read(engine.generate(prompt(max_tokens=7)))
        free = await read(engine.generate(prompt(max_tokens=20, constraint=Constraint("json_object"))))
        endless = await read(engine.generate(prompt(max_tokens=20, stop_ids=())))
    assert (end(cut).reason, len(ids(cut))) == ("length", 7)
    assert (end(free).reason, len(ids(free))) == ("stop", 12)
    assert (end(endless).reason, len(ids(endless))) == ("stop", 12)
