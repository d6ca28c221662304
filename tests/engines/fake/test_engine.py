"""The fake as a TextEngine: its contract from Accepted to End."""

import asyncio
import math
import threading
import time
from collections.abc import Hashable
from typing import Any

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.core.engine import (
    Accepted,
    CacheInfo,
    Control,
    EmbeddingEngine,
    End,
    Media,
    Progress,
    Prompt,
    TextEngine,
    TokenRun,
    Tokens,
)
from modelyard.core.errors import ContextOverflow, Internal, NotFound, Timeout, Unavailable
from modelyard_fake.engine import PrefixCache, common_prefix, fake_logprob, unit_vector
from tests.engines.fake.helpers import chatml, output_text, prompt, text_engine, tokenizer
from tests.engines.reading import end, ids, read, until

SLOW = [{"steps": [{"tokens": 5}, {"hang": True}]}]


async def test_job_is_accepted_emits_tokens_and_ends() -> None:
    engine = await text_engine(script=[{"steps": [{"text": "Hello there."}]}])
    prompt_ = prompt()
    chunks = await read(engine.generate(prompt_))
    assert isinstance(chunks[0], Accepted)
    assert output_text(chunks) == "Hello there."
    last = end(chunks)
    assert last.reason == "stop"
    assert last.error is None
    assert (last.usage.prompt, last.usage.output) == (prompt_.n_tokens, len(ids(chunks)))
    assert last.timings.total is not None
    assert last.timings.first_token is not None


async def test_engine_satisfies_both_protocols() -> None:
    engine = await text_engine()
    assert isinstance(engine, TextEngine)
    assert isinstance(engine, EmbeddingEngine)
    assert engine.info.capacity == 8


async def test_tokens_come_one_by_one_with_a_delay() -> None:
    engine = await text_engine(script=[{"steps": [{"tokens": 3}]}], token_delay=0.001)
    chunks = await read(engine.generate(prompt()))
    assert [len(chunk.ids) for chunk in chunks if isinstance(chunk, Tokens)] == [1, 1, 1]


def test_waiting_for_the_next_token_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvloop's clock stands still for a millisecond, however often it is asked."""
    calls = 0

    async def play() -> int:
        nonlocal calls
        engine = await text_engine(token_delay=1e-6, script=[{"steps": [{"tokens": 50}]}])
        step = engine._continue_jobs

        def counted() -> None:
            nonlocal calls
            calls += 1
            step()

        monkeypatch.setattr(engine, "_continue_jobs", counted)
        return len(ids(await read(engine.generate(prompt()))))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(play()) == 50
    assert calls <= 51


async def test_max_tokens_ends_with_length() -> None:
    engine = await text_engine(script=[{"steps": [{"tokens": 10}, {"tokens": 10}]}])
    chunks = await read(engine.generate(prompt(max_tokens=12)))
    assert len(ids(chunks)) == 12
    assert end(chunks).reason == "length"


async def test_full_window_ends_with_window() -> None:
    prompt_ = prompt()
    engine = await text_engine(script=[{"steps": [{"tokens": 100}]}], window=prompt_.n_tokens + 7)
    chunks = await read(engine.generate(prompt_))
    assert len(ids(chunks)) == 7
    assert end(chunks).reason == "window"


async def test_prompt_as_long_as_the_window_overflows() -> None:
    prompt_ = prompt()
    engine = await text_engine(window=prompt_.n_tokens)
    (last,) = await read(engine.generate(prompt_))
    assert isinstance(last, End)
    assert last.error == ContextOverflow(prompt_.n_tokens, prompt_.n_tokens)
    assert engine.stats().running == 0


async def test_stop_id_ends_the_job_and_is_not_emitted() -> None:
    engine = await text_engine(script=[{"steps": [{"raw": "yes<|im_end|>no"}]}])
    stop = tokenizer().specials["<|im_end|>"]
    chunks = await read(engine.generate(prompt(stop_ids=(99999, stop))))
    assert output_text(chunks) == "yes"
    assert end(chunks).reason == "stop"


async def test_unknown_cache_is_an_error_that_names_the_known_ones() -> None:
    engine = await text_engine()
    (last,) = await read(engine.generate(prompt(cache="huge")))
    assert isinstance(last, End)
    assert isinstance(last.error, NotFound)
    assert "main, fast" in last.error.message


async def test_media_tokens_count_as_prompt_tokens() -> None:
    engine = await text_engine(script=[{"steps": [{"text": "nice"}]}])
    picture = Media("image", "00", b"", 100)
    run = TokenRun(tokenizer().encode(chatml(("user", "look"))))
    last = end(await read(engine.generate(Prompt(parts=(picture, run), max_tokens=9))))
    assert last.usage.prompt == 100 + len(run.ids)


# --- prefill and caches ---------------------------------------------------------------------------------------------


async def test_scripted_prefill_reports_its_progress() -> None:
    engine = await text_engine(script=[{"steps": [{"prefill": 0.01, "progress": 4}, {"text": "ok"}]}])
    chunks = await read(engine.generate(prompt_ := prompt()))
    reports = [chunk for chunk in chunks if isinstance(chunk, Progress)]
    assert [r.total for r in reports] == [prompt_.n_tokens] * 4
    assert reports[-1].done == prompt_.n_tokens
    assert [r.done for r in reports] == sorted(r.done for r in reports)


async def test_prefill_rate_reports_progress_over_the_uncached_part_only() -> None:
    engine = await text_engine(script=[{"steps": [{"text": "ok"}]}], prefill_rate=100_000.0)
    prompt_ = prompt("word " * 30)
    for cached in (0, prompt_.n_tokens - 1):
        chunks = await read(engine.generate(prompt_))
        reports = [chunk.done for chunk in chunks if isinstance(chunk, Progress)]
        assert len(reports) == 8
        assert cached <= reports[0] <= reports[-1] == prompt_.n_tokens
        assert end(chunks).usage.cached == cached


async def test_next_turn_finds_its_prefix_in_the_cache() -> None:
    engine = await text_engine(script=[{"steps": [{"text": "Fine."}]}])
    begun = chatml(("user", "how are you"))
    await read(engine.generate(prompt(begun)))
    longer = begun + "Fine.<|im_end|>\n<|im_start|>user\nand now<|im_end|>\n<|im_start|>assistant\n"
    chunks = await read(engine.generate(prompt(longer)))
    whole = tokenizer().encode(begun + "Fine.")
    assert chunks[0] == Accepted(len(whole), len(whole), False)
    assert end(chunks).usage.cached == len(whole)
    assert engine.stats().reused_tokens == len(whole)


async def test_caches_and_sessions_do_not_share() -> None:
    engine = await text_engine(script=[{"steps": [{"text": "x"}]}])
    await read(engine.generate(prompt("same words", cache="main", session="a")))
    other = await read(engine.generate(prompt("same words", cache="fast", session="a")))
    assert other[0] == Accepted(0, None, False)
    again = await read(engine.generate(prompt("same words", cache="main", session="a")))
    assert end(again).usage.cached == prompt("same words").n_tokens - 1


async def test_control_evicts_saves_and_restores() -> None:
    engine = await text_engine(script=[{"steps": [{"text": "x"}]}])
    await read(engine.generate(prompt()))
    await engine.control(Control("save", argument="s"))
    await engine.control(Control("evict", cache="main"))
    assert engine.stats().sequences == 0
    await engine.control(Control("restore", argument="s"))
    assert engine.stats().sequences == 1
    with pytest.raises(NotFound, match="'nothing'"):
        await engine.control(Control("restore", argument="nothing"))
    await engine.control(Control("load_adapter", argument="lora"))
    await engine.control(Control("unload_adapter", argument="lora"))


# --- logprobs and embeddings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [0, 1, 5, 20])
async def test_logprobs_are_given_when_asked_for(wanted: int) -> None:
    engine = await text_engine(script=[{"steps": [{"tokens": 8}]}])
    chunks = await read(engine.generate(prompt(logprobs=wanted)))
    found = [each for chunk in chunks if isinstance(chunk, Tokens) for each in chunk.logprobs or ()]
    assert [each.id for each in found] == ids(chunks)
    assert all(len(each.top) == wanted for each in found)


async def test_embeddings_are_unit_vectors_and_equal_for_equal_text() -> None:
    engine = await text_engine(embedding_size=16)
    encode = tokenizer().encode
    made = await engine.embed([encode("cat"), encode("dog"), encode("cat")])
    assert made.vectors[0] == made.vectors[2] != made.vectors[1]
    assert all(len(v) == 16 and abs(sum(x * x for x in v) - 1) < 1e-9 for v in made.vectors)
    assert made.prompt_tokens == 2 * len(encode("cat")) + len(encode("dog"))


# --- cancellation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "phase"),
    [
        ([{"prefill": 60, "progress": 2}], Accepted),
        ([{"delay": 60}], Accepted),
        ([{"tokens": 5}, {"delay": 60}], Tokens),
        ([{"tokens": 5}, {"hang": True}], Tokens),
    ],
    ids=["in prefill", "before the first token", "between tokens", "hanging"],
)
async def test_cancel_ends_the_job_at_once(steps: list[dict[str, Any]], phase: type) -> None:
    engine = await text_engine(script=[{"steps": steps}])
    generation = engine.generate(prompt())
    got = await until(generation, phase)
    generation.cancel()
    generation.cancel()
    assert engine.stats().running == 0
    got += await read(generation)
    assert end(got).reason == "cancelled"
    assert end(got).usage.output == len(ids(got))


async def test_cancel_between_delayed_tokens_counts_only_emitted_tokens() -> None:
    engine = await text_engine(script=[{"steps": [{"tokens": 100}]}], token_delay=0.001)
    generation = engine.generate(prompt())
    got = await until(generation, Tokens)
    generation.cancel()
    got += await read(generation)
    assert end(got).reason == "cancelled"
    assert end(got).usage.output == len(ids(got)) < 100


async def test_cancelled_job_does_not_delay_the_tokens_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = await text_engine(script=[{"steps": [{"tokens": 20}]}], token_delay=0.001)
    ticks, continue_jobs = [0], engine._continue_jobs

    def count_ticks() -> None:
        ticks[0] += 1
        continue_jobs()

    monkeypatch.setattr(engine, "_continue_jobs", count_ticks)
    jobs = [engine.generate(prompt(f"job {i}")) for i in range(3)]
    jobs[0].cancel()
    all_chunks = await asyncio.gather(*map(read, jobs))
    assert [end(chunks).reason for chunks in all_chunks] == ["cancelled", "stop", "stop"]
    assert [len(ids(chunks)) for chunks in all_chunks] == [1, 20, 20]
    assert ticks[0] <= 2 * 3 * 20  # one timer at a time, however many jobs wait


async def test_cancel_from_another_thread_reaches_the_job() -> None:
    engine = await text_engine(script=SLOW)
    generation = engine.generate(prompt())
    thread = threading.Thread(target=generation.cancel)
    thread.start()
    chunks = await read(generation)
    thread.join()
    assert end(chunks).reason == "cancelled"


async def test_cancel_after_the_end_changes_nothing() -> None:
    engine = await text_engine(script=[{"steps": [{"text": "x"}]}])
    generation = engine.generate(prompt())
    generation.cancel()
    assert end(await read(generation)).reason == "stop"


async def test_deadline_ends_a_hanging_job() -> None:
    engine = await text_engine(script=SLOW)
    chunks = await read(engine.generate(prompt(deadline=time.monotonic() + 0.01)))
    assert end(chunks).reason == "error"
    assert isinstance(end(chunks).error, Timeout)


async def test_infinite_job_waits_for_a_slow_reader() -> None:
    engine = await text_engine(script=[{"steps": [{"repeat": 10**9, "steps": [{"tokens": 10}]}]}], window=10**12)
    generation = engine.generate(prompt(max_tokens=10**11))
    waiting = await anext(generation)
    assert len(ids(waiting)) < 10_000
    more = await anext(generation)
    assert 0 < len(ids(more)) < 10_000
    generation.cancel()
    assert end(await read(generation)).reason == "cancelled"


async def test_long_answer_yields_to_the_event_loop() -> None:
    engine = await text_engine(script=[{"steps": [{"tokens": 20_000}]}], window=10**6)
    generation = engine.generate(prompt(max_tokens=10**5))
    first = await anext(generation)
    assert len(ids(first)) < 20_000
    assert len(ids(first)) + len(ids(await read(generation))) == 20_000


# --- failure and death ----------------------------------------------------------------------------------------------


async def test_failure_as_the_first_step_comes_before_acceptance() -> None:
    engine = await text_engine(script=[{"steps": [{"fail": "no memory", "kind": "unavailable"}]}])
    (last,) = await read(engine.generate(prompt()))
    assert isinstance(last, End)
    assert last.error == Unavailable("no memory")
    assert not engine.lost.done()


async def test_failure_during_the_answer_keeps_its_output() -> None:
    engine = await text_engine(script=[{"steps": [{"text": "so far"}, {"fail": "broken"}, {"text": "never"}]}])
    chunks = await read(engine.generate(prompt()))
    assert isinstance(chunks[0], Accepted)
    assert output_text(chunks) == "so far"
    assert end(chunks).reason == "error"
    assert isinstance(end(chunks).error, Internal)


async def test_death_ends_every_job_and_resolves_lost() -> None:
    script = [{"when": "die", "steps": [{"text": "oh"}, {"die": "segfault"}]}, *SLOW]
    engine = await text_engine(script=script)
    other = engine.generate(prompt("live"))
    chunks = await read(engine.generate(prompt("die")))
    assert output_text(chunks) == "oh"
    assert end(chunks).error == Unavailable("segfault")
    assert end(await read(other)).error == Unavailable("segfault")
    assert await engine.lost == Unavailable("segfault")
    assert engine.stats().running == 0


async def test_lost_engine_takes_no_more_jobs() -> None:
    engine = await text_engine(script=[{"steps": [{"die": "gone"}]}])
    await read(engine.generate(prompt()))
    (last,) = await read(engine.generate(prompt()))
    assert isinstance(last, End)
    assert last.error == Unavailable("gone")


async def test_cancelled_lost_future_does_not_disturb_other_jobs() -> None:
    engine = await text_engine(script=[{"steps": [{"die": "gone"}]}])
    engine.lost.cancel()
    assert end(await read(engine.generate(prompt()))).error == Unavailable("gone")


async def test_close_ends_running_jobs() -> None:
    engine = await text_engine(script=SLOW)
    generation = engine.generate(prompt())
    await engine.close()
    assert isinstance(end(await read(generation)).error, Unavailable)
    assert not engine.lost.done()


async def test_crash_inside_the_engine_ends_the_job_with_an_id(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = await text_engine()

    def broken(*_: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(engine, "answer", broken)
    (last,) = await read(engine.generate(prompt()))
    assert isinstance(last, End)
    assert isinstance(last.error, Internal)
    assert last.error.id in caplog.text
    assert "oops" in caplog.text


async def test_many_jobs_run_concurrently() -> None:
    engine = await text_engine(script=[{"steps": [{"tokens": 4}, {"delay": 0.001}, {"tokens": 4}]}])
    all_chunks = await asyncio.gather(*(read(engine.generate(prompt(f"job {i}"))) for i in range(100)))
    assert all(len(ids(chunks)) == 8 and end(chunks).reason == "stop" for chunks in all_chunks)
    assert engine.stats().running == 0


# --- prefix cache -----------------------------------------------------------------------------------------------------


def test_first_prompt_has_nothing_cached() -> None:
    key, accepted = PrefixCache(CacheInfo(4096, 2)).take([1, 2, 3], None)
    assert key
    assert accepted == Accepted(0, None, False)


def test_same_prompt_leaves_one_token_to_evaluate() -> None:
    cache = PrefixCache(CacheInfo(4096, 2))
    cache.put("a", [1, 2, 3])
    assert cache.take([1, 2, 3], "a") == ("a", Accepted(2, None, False))


def test_session_continues_its_own_sequence() -> None:
    cache = PrefixCache(CacheInfo(4096, 2))
    cache.put("a", [1, 2, 9, 9])
    cache.put("b", [1, 2, 3, 4])
    assert cache.take([1, 2, 3, 4, 5], "a") == ("a", Accepted(2, 2, False))


def test_new_session_may_continue_another_sequence() -> None:
    cache = PrefixCache(CacheInfo(4096, 2))
    cache.put("a", [1, 2, 3])
    assert cache.take([1, 2, 3, 4], "b") == ("b", Accepted(3, 3, False))


def test_prompt_that_shares_less_than_half_of_a_sequence_is_another_conversation() -> None:
    cache = PrefixCache(CacheInfo(4096, 4))
    cache.put("long", [1, 1, 1, 7, 1, 1, 1, 1])
    assert cache.take([1, 1, 1, 8], None)[1] == Accepted()
    assert len(cache.sequences) == 1
    cache.put("short", [1, 1, 1, 7, 1])
    assert cache.take([1, 1, 1, 8], None) == ("short", Accepted(3, 3))


def test_least_recently_used_sequence_is_evicted() -> None:
    cache = PrefixCache(CacheInfo(4096, 2))
    cache.put("a", [1, 1])
    cache.put("b", [2, 2])
    key, accepted = cache.take([3, 3], "c")
    assert accepted.evicted
    cache.put(key, [3, 3])
    assert (len(cache.sequences), sum(map(len, cache.sequences.values()))) == (2, 4)
    assert cache.take([1, 1], "a")[1].cached_tokens == 0


def prefix_length(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 3000), st.lists(st.integers(0, 1), max_size=4), st.lists(st.integers(0, 1), max_size=4))
def test_common_prefix_equals_the_reference(shared: int, a: list[int], b: list[int]) -> None:
    left, right = [7] * shared + a, [7] * shared + b
    assert common_prefix(left, right) == prefix_length(left, right)


class ReferenceCache:
    """The reference: sequences in a list, least recently used first, compared token by token."""

    def __init__(self, parallel: int) -> None:
        self.parallel = parallel
        self.sequences: list[tuple[Hashable, list[int]]] = []

    def take(self, ids: list[int], session: str | None) -> tuple[Hashable, Accepted]:
        own = [entry for entry in self.sequences if entry[0] == session]
        recent = [entry for entry in self.sequences[:-3:-1] if prefix_length(entry[1], ids) * 2 >= len(entry[1])]
        found = own or sorted(recent, key=lambda entry: -prefix_length(entry[1], ids))[:1]
        found = [(key, sequence) for key, sequence in found if own or prefix_length(sequence, ids)]
        if not found:
            evicted = len(self.sequences) >= self.parallel
            self.sequences = self.sequences[1:] if evicted else self.sequences
            return session or object(), Accepted(evicted=evicted)
        self.sequences.remove(found[0])
        key, sequence = found[0]
        shared = prefix_length(sequence, ids)
        divergence = shared if sequence and shared < len(ids) else None
        return session or key, Accepted(max(0, min(shared, len(ids) - 1)), divergence)

    def put(self, key: Hashable, ids: list[int]) -> None:
        self.sequences = [*(entry for entry in self.sequences if entry[0] != key), (key, ids)][-self.parallel :]


tokens = st.lists(st.integers(0, 1), max_size=6)
jobs = st.tuples(tokens, st.sampled_from([None, None, "a", "b"]), tokens, st.integers(0, 2))


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 4), st.lists(jobs, max_size=16))
def test_overlapping_jobs_find_what_the_reference_finds(
    parallel: int, jobs: list[tuple[list[int], str | None, list[int], int]]
) -> None:
    cache, reference, running = PrefixCache(CacheInfo(4096, parallel)), ReferenceCache(parallel), []
    for start, session, output, most in jobs:
        (key, found), (name, expected) = cache.take(start, session), reference.take(start, session)
        assert found == expected
        running.append((key, name, start + output))
        while len(running) > most:
            key, name, sequence = running.pop(0)
            cache.put(key, sequence)
            reference.put(name, sequence)
        assert list(cache.sequences.values()) == [sequence for _, sequence in reference.sequences]


# --- numbers ----------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 4095), st.integers(0, 20))
def test_top_logprobs_are_a_distribution_led_by_the_chosen_token(token: int, alternatives: int) -> None:
    made = fake_logprob(token, alternatives, 4096)
    assert len(made.top) == len({t for t, _ in made.top}) == alternatives
    assert sum(math.exp(p) for _, p in made.top) <= 1
    assert [p for _, p in made.top] == sorted((p for _, p in made.top), reverse=True)
    assert alternatives == 0 or made.top[0] == (token, made.logprob)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 4095), max_size=20), st.integers(1, 100))
def test_unit_vectors_are_stable(ids: list[int], size: int) -> None:
    vector = unit_vector(ids, size)
    assert len(vector) == size
    assert math.isclose(sum(x * x for x in vector), 1)
    assert vector == unit_vector(ids, size)
