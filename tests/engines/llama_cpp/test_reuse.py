"""KV that is used again: the next turn, a shared system prompt copied between sequences, and never anybody else's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import pytest

from modelyard.core.engine import CacheInfo, Chunk, Control, Prompt, Tokens
from modelyard.engines.llama_cpp.engine import LlamaEngine
from tests.engines.llama_cpp.stage import answer, chatml, prompt, running, said
from tests.engines.reading import accepted, assert_alike, end, ids, read, until

SYSTEM = ("system", "You are a guide in a small town. Be brief, be friendly, and never speak of the weather.")
ALONE = {"main": CacheInfo(512, 1)}


async def alone(*texts: str, max_tokens: int = 8) -> list[list[Chunk]]:
    """Each text on an engine that holds nothing else."""
    out = []
    async with running(ALONE) as engine:
        for text in texts:
            out.append(await answer(engine, text, max_tokens=max_tokens))
            await engine.control(Control("evict"))
    return out


# --- the next turn --------------------------------------------------------------------------------------------------


async def test_second_turn_reads_only_what_is_new() -> None:
    first = chatml(SYSTEM, ("user", "Where is the church?"))
    async with running() as engine:
        chunks = await answer(engine, first, session="a")
        second = first + said(chunks) + "<|im_end|>\n<|im_start|>user\nAnd the inn?<|im_end|>\n<|im_start|>assistant\n"
        held, before = prompt(first).n_tokens + len(ids(chunks)) - 1, engine.stats()
        again = await answer(engine, second, session="a")
        after = engine.stats()
    # The last token of an answer was sampled and never read: no KV stands for it.
    assert accepted(again).cached_tokens == accepted(again).divergence == held
    assert after.evaluated_tokens - before.evaluated_tokens == prompt(second).n_tokens - held
    (fresh,) = await alone(second)
    assert_alike(again, fresh)


async def test_turn_that_was_edited_is_read_from_the_edit_on() -> None:
    first, edited = (chatml(SYSTEM, ("user", f"Where is the {place}?")) for place in ("church", "market"))
    async with running() as engine:
        await answer(engine, first, session="a")
        chunks = await answer(engine, edited, session="a")
    shared = next(n for n, (a, b) in enumerate(zip(prompt(first).ids, prompt(edited).ids, strict=False)) if a != b)
    assert accepted(chunks).cached_tokens == shared
    (fresh,) = await alone(edited)
    assert_alike(chunks, fresh)


async def test_new_conversation_goes_to_an_empty_sequence_and_evicts_only_when_there_is_none() -> None:
    async with running({"main": CacheInfo(512, 2)}) as engine:
        evicted = [
            accepted(await answer(engine, text, session=text, max_tokens=1)).evicted
            for text in ("First of all: hello.", "Second comes this.", "Third is another one.")
        ]
        assert evicted == [False, False, True]
        kept = await answer(engine, "Second comes this.", session="Second comes this.", max_tokens=1)
        assert accepted(kept).cached_tokens == prompt("Second comes this.").n_tokens - 1


# --- copies between sequences ---------------------------------------------------------------------------------------


@asynccontextmanager
async def copying(monkeypatch: pytest.MonkeyPatch, parallel: int) -> AsyncIterator[LlamaEngine]:
    """Copies pay off from many tokens on; here from few, to keep the test short."""
    monkeypatch.setattr("modelyard.engines.llama_cpp.context._COPY_FROM", 8)
    async with running({"main": CacheInfo(512, parallel)}) as engine:
        yield engine


async def test_shared_system_prompt_is_copied_from_a_running_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [chatml(SYSTEM, ("user", question)) for question in ("Where is the church?", "Who are you?", "Any inns?")]
    shared = len(prompt(chatml(SYSTEM)).ids) - 3  # without <|im_start|>assistant and a new line
    async with copying(monkeypatch, 3) as engine:
        source = engine.generate(prompt(texts[0], session="a", max_tokens=40))
        got = await until(source, Tokens)
        copies = [await answer(engine, text, session=text) for text in texts[1:]]
        got += await read(source)
    for chunks, text in zip([got, *copies], texts, strict=True):
        (fresh,) = await alone(text, max_tokens=end(chunks).usage.output)
        assert_alike(chunks, fresh)
    assert all(shared <= accepted(chunks).cached_tokens <= shared + 3 for chunks in copies)


async def test_copy_and_its_source_go_on_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (chatml(SYSTEM, ("user", f"My name is {name}. What is my name?")) for name in ("Anna", "Boris"))
    async with copying(monkeypatch, 2) as engine:
        source = engine.generate(prompt(one, session="a", max_tokens=12))
        got = await until(source, Tokens)
        first = await answer(engine, two, session="b", max_tokens=12)
        got += await read(source)
        again = [
            await answer(engine, text, session=session, max_tokens=12) for text, session in ((one, "a"), (two, "b"))
        ]
    assert [accepted(chunks).cached_tokens for chunks in again] == [prompt(text).n_tokens - 1 for text in (one, two)]
    assert_alike(got, again[0])
    assert_alike(first, again[1])


async def test_copy_onto_a_sequence_that_held_something_else_leaves_nothing_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = chatml(SYSTEM, ("user", "Who are you?"))
    async with copying(monkeypatch, 2) as engine:
        await answer(engine, chatml(SYSTEM, ("user", "Hello!")), session="a")
        await answer(engine, "Repeat the word zebra forty times, please: zebra zebra zebra zebra.", session="b")
        chunks = await answer(engine, text, session="b")
    assert accepted(chunks).cached_tokens > 8
    (fresh,) = await alone(text)
    assert_alike(chunks, fresh)


# --- isolation ------------------------------------------------------------------------------------------------------

SECRETS = ("zebra", "violin", "Norway", "pepper", "castle", "tulip")


def turns(secret: str, first: str | None = None) -> str:
    asked = ("user", f"The secret word is {secret}. Say the secret word.")
    if first is None:
        return chatml(asked, opening="The secret word is")
    return chatml(asked, ("assistant", f"The secret word is{first}"), ("user", "Again."), opening="The secret word is")


async def _converse(engine: LlamaEngine, secret: str, cache: str) -> list[list[Chunk]]:
    first = await answer(engine, turns(secret), cache=cache, session=secret, max_tokens=4)
    return [first, await answer(engine, turns(secret, said(first)), cache=cache, session=secret, max_tokens=4)]


@pytest.mark.parametrize("seed", [1, 2])
async def test_no_word_crosses_between_conversations(seed: int) -> None:
    """Two caches of two sequences, six conversations, so that sequences are also taken over; any order, several at a
    time. Each answer must be what the same conversation gets alone."""
    random = Random(seed)
    caches = {"main": CacheInfo(256, 2), "fast": CacheInfo(256, 2)}
    homes = {secret: ("main", "fast")[n % 2] for n, secret in enumerate(SECRETS)}
    got: dict[str, list[list[Chunk]]] = {secret: [] for secret in SECRETS}
    async with running(caches) as engine:
        while waiting := [secret for secret in SECRETS if len(got[secret]) < 2]:
            batch = _fitting(random.sample(waiting, len(waiting)), homes)[: random.randint(1, 4)]
            jobs = {s: engine.generate(_next_turn(s, homes[s], got[s])) for s in batch}
            for secret, job in jobs.items():
                got[secret].append(await read(job))
    async with running({"main": CacheInfo(256, 1)}) as engine:
        for secret in SECRETS:
            for mixed, single in zip(got[secret], await _converse(engine, secret, "main"), strict=True):
                assert_alike(mixed, single)
                assert not any(other in said(mixed) for other in SECRETS if other != secret)
            await engine.control(Control("evict"))
    assert sum(secret in said(got[secret][0]) for secret in SECRETS) >= 4, "a model that tells nothing shows nothing"


def _next_turn(secret: str, cache: str, before: list[list[Chunk]]) -> Prompt:
    text = turns(secret, said(before[0]) if before else None)
    return prompt(text, cache=cache, session=secret, max_tokens=4)


def _fitting(order: list[str], homes: dict[str, str]) -> list[str]:
    """No more than two of a cache at a time: the scheduler hands out no more places."""
    return [s for n, s in enumerate(order) if sum(homes[o] == homes[s] for o in order[:n]) < 2]
