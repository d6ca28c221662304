"""What every token engine does with a job: its frame, its ends, its numbers."""

from __future__ import annotations

from math import exp

import pytest
from msgspec.structs import replace

from modelyard.core.engine import End, Progress, TextEngine, TokenRun
from modelyard.core.errors import ContextOverflow, NotFound
from tests.engines.conformance.conftest import Open
from tests.engines.conformance.subjects import REUSING, TELLING, TOPICS, Subject, prompt, reread
from tests.engines.reading import accepted, assert_alike, end, ids, logprobs, read


async def test_engine_satisfies_the_protocol_and_names_its_caches(opened: Open) -> None:
    engine = await opened(parallel=2)
    assert isinstance(engine, TextEngine)
    assert list(engine.info.caches) == ["main", "fast"]
    assert engine.info.capacity == 4
    assert not engine.lost.done()


async def test_job_is_accepted_first_and_ends_once_with_its_usage(subject: Subject, opened: Open) -> None:
    engine = await opened()
    chunks = await read(engine.generate(asked := prompt(subject)))
    assert accepted(chunks).cached_tokens == 0
    usage = end(chunks).usage
    assert (usage.prompt, usage.cached, usage.output) == (asked.n_tokens, 0, len(ids(chunks)))
    assert end(chunks).timings.total is not None
    assert engine.stats().running == 0


async def test_max_tokens_ends_with_length(subject: Subject, opened: Open) -> None:
    engine = await opened()
    chunks = await read(engine.generate(prompt(subject, max_tokens=3)))
    assert len(ids(chunks)) == 3
    assert end(chunks).reason == "length"


async def test_stop_id_ends_the_job_and_is_not_said(subject: Subject, opened: Open) -> None:
    engine = await opened()
    free = ids(await read(engine.generate(prompt(subject))))
    stop = next(token for token in free[2:] if token not in free[:2])
    chunks = await read(engine.generate(prompt(subject, stop_ids=(stop,))))
    assert ids(chunks) == free[: free.index(stop)]
    assert end(chunks).reason == "stop"


async def test_full_window_ends_with_window(subject: Subject, opened: Open) -> None:
    asked = prompt(subject, max_tokens=100)
    engine = await opened(window=asked.n_tokens + 4)
    chunks = await read(engine.generate(asked))
    assert len(ids(chunks)) == 4
    assert end(chunks).reason == "window"


async def test_prompt_that_fits_exactly_ends_with_length(subject: Subject, opened: Open) -> None:
    asked = prompt(subject, max_tokens=4)
    engine = await opened(window=asked.n_tokens + 4)
    assert end(await read(engine.generate(asked))).reason == "length"


async def test_prompt_as_long_as_the_window_overflows_and_harms_nobody(subject: Subject, opened: Open) -> None:
    asked = prompt(subject)
    engine = await opened(window=asked.n_tokens)
    (last,) = await read(engine.generate(asked))
    assert isinstance(last, End)
    assert last.error == ContextOverflow(asked.n_tokens, asked.n_tokens)
    shorter = prompt(subject, "Hi.", max_tokens=1)
    assert end(await read(engine.generate(shorter))).error is None


async def test_unknown_cache_is_an_error_that_names_the_known_ones(subject: Subject, opened: Open) -> None:
    engine = await opened()
    (last,) = await read(engine.generate(prompt(subject, cache="huge")))
    assert isinstance(last, End)
    assert isinstance(last.error, NotFound)
    assert "main, fast" in last.error.message


async def test_job_without_a_cache_goes_to_the_first(subject: Subject, opened: Open) -> None:
    engine = await opened()
    await read(engine.generate(asked := prompt(subject)))
    again = accepted(await read(engine.generate(prompt(subject, cache=""))))
    assert again.cached_tokens == (reread(subject, asked.n_tokens) if subject.reuses else 0)


async def test_greedy_answers_are_the_same_each_time(subject: Subject, opened: Open) -> None:
    engine = await opened()
    first, second = [await read(engine.generate(asked)) for asked in [prompt(subject)] * 2]
    assert_alike(first, second, subject.tolerance)


@pytest.mark.parametrize("subject", REUSING, indirect=True)
async def test_resent_prompt_is_read_from_the_cache_but_for_its_last_token(subject: Subject, opened: Open) -> None:
    engine = await opened()
    await read(engine.generate(asked := prompt(subject)))
    before = engine.stats()
    chunks = await read(engine.generate(asked))
    kept = reread(subject, asked.n_tokens)
    assert accepted(chunks).cached_tokens == end(chunks).usage.cached == kept
    after = engine.stats()
    assert after.reused_tokens - before.reused_tokens == kept
    assert after.evaluated_tokens - before.evaluated_tokens == asked.n_tokens - kept


@pytest.mark.parametrize("subject", REUSING, indirect=True)
async def test_caches_share_nothing(subject: Subject, opened: Open) -> None:
    engine = await opened()
    await read(engine.generate(prompt(subject)))
    assert accepted(await read(engine.generate(prompt(subject, cache="fast")))).cached_tokens == 0


async def test_concurrent_streams_say_what_each_says_alone(subject: Subject, opened: Open) -> None:
    engine = await opened(parallel=2)
    asked = [prompt(subject, topic, cache=cache, session=topic) for topic in TOPICS for cache in ("main", "fast")]
    together = [engine.generate(each) for each in asked]
    got = [await read(generation) for generation in together]
    alone = await opened(parallel=1)
    expected = {topic: await read(alone.generate(prompt(subject, topic))) for topic in TOPICS}
    for each, chunks in zip(asked, got, strict=True):
        accepted(chunks)
        assert_alike(chunks, expected[str(each.session)], subject.tolerance)


async def test_logprobs_are_a_distribution(subject: Subject, opened: Open) -> None:
    engine = await opened()
    chunks = await read(engine.generate(prompt(subject, logprobs=5)))
    found = logprobs(chunks)
    assert [each.id for each in found] == ids(chunks)
    for each in found:
        values = [value for _, value in each.top]
        assert each.logprob <= 0
        assert len(set(dict(each.top))) == 5
        assert values == sorted(values, reverse=True)
        assert sum(map(exp, values)) <= 1 + 1e-6


async def test_no_logprobs_come_unasked(subject: Subject, opened: Open) -> None:
    engine = await opened()
    assert logprobs(await read(engine.generate(prompt(subject, logprobs=None)))) == []


@pytest.mark.parametrize("subject", TELLING, indirect=True)
async def test_progress_of_a_long_prompt_grows_and_stays_within_it(subject: Subject, opened: Open) -> None:
    engine = await opened(slow=True)
    chunks = await read(engine.generate(asked := prompt(subject, "word " * 60, max_tokens=1)))
    reports = [chunk for chunk in chunks if isinstance(chunk, Progress)]
    assert len(reports) >= 2
    assert [report.done for report in reports] == sorted({report.done for report in reports})
    assert {report.total for report in reports} == {asked.n_tokens}
    assert reports[-1].done <= asked.n_tokens


@pytest.mark.parametrize("pattern", ["一二三四五", "🎉🚀"])
async def test_characters_of_several_tokens_arrive_whole(subject: Subject, opened: Open, pattern: str) -> None:
    engine = await opened()
    text = subject.repeating(pattern)
    spelled = subject.vocabulary.encode(pattern)
    assert len(spelled) > len(pattern), "this would show nothing: each character is one token"
    asked = prompt(subject, text, raw=True, max_tokens=len(spelled))
    said = ids(await read(engine.generate(asked)))
    detokenizer = subject.vocabulary.detokenizer()
    pieces = [piece for token in said for piece in detokenizer.feed([token])] + detokenizer.finish()
    assert "".join(piece.text for piece in pieces) == pattern
    assert not any("\ufffd" in piece.text for piece in pieces)


async def test_prompt_in_several_runs_is_read_as_one(subject: Subject, opened: Open) -> None:
    engine = await opened()
    asked = prompt(subject)
    whole = await read(engine.generate(asked))
    runs = tuple(TokenRun([id]) for id in asked.ids)
    split = await read(engine.generate(replace(asked, parts=runs)))
    assert accepted(split).cached_tokens == (reread(subject, asked.n_tokens) if subject.reuses else 0)
    assert_alike(whole, split, subject.tolerance)
