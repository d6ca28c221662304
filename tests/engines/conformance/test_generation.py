"""Every text engine runs jobs in the same way: their chunks, ends, token counts and log probabilities."""

from __future__ import annotations

from math import exp

import pytest
from msgspec.structs import replace

from modelyard.core.engine import End, Progress, TextEngine, TokenRun
from modelyard.core.errors import ContextOverflow, NotFound
from tests.engines.conformance.conftest import Open
from tests.engines.conformance.subjects import REPORTING_PROGRESS, REUSING_KV, TOPICS, Subject, prompt, reusable_tokens
from tests.engines.reading import accepted, assert_alike, end, ids, logprobs, read

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def test_engine_satisfies_the_protocol_and_lists_its_caches(opened: Open) -> None:
    engine = await opened(parallel=2)
    assert isinstance(engine, TextEngine)
    assert list(engine.info.caches) == ["main", "fast"]
    assert engine.info.capacity == 4
    assert not engine.lost.done()


async def test_job_starts_with_accepted_and_ends_once_with_usage(subject: Subject, opened: Open) -> None:
    engine = await opened()
    chunks = await read(engine.generate(job := prompt(subject)))
    assert accepted(chunks).cached_tokens == 0
    usage = end(chunks).usage
    assert (usage.prompt, usage.cached, usage.output) == (job.n_tokens, 0, len(ids(chunks)))
    assert end(chunks).timings.total is not None
    assert engine.stats().running == 0


async def test_max_tokens_ends_with_length(subject: Subject, opened: Open) -> None:
    engine = await opened()
    chunks = await read(engine.generate(prompt(subject, max_tokens=3)))
    assert len(ids(chunks)) == 3
    assert end(chunks).reason == "length"


async def test_stop_id_ends_the_job_and_is_not_emitted(subject: Subject, opened: Open) -> None:
    engine = await opened()
    free = ids(await read(engine.generate(prompt(subject))))
    stop = next(token for token in free[2:] if token not in free[:2])
    chunks = await read(engine.generate(prompt(subject, stop_ids=(stop,))))
    assert ids(chunks) == free[: free.index(stop)]
    assert end(chunks).reason == "stop"


async def test_full_window_ends_with_window(subject: Subject, opened: Open) -> None:
    job = prompt(subject, max_tokens=100)
    engine = await opened(window=job.n_tokens + 4)
    chunks = await read(engine.generate(job))
    assert len(ids(chunks)) == 4
    assert end(chunks).reason == "window"


async def test_prompt_that_fits_exactly_ends_with_length(subject: Subject, opened: Open) -> None:
    job = prompt(subject, max_tokens=4)
    engine = await opened(window=job.n_tokens + 4)
    assert end(await read(engine.generate(job))).reason == "length"


async def test_prompt_as_long_as_the_window_overflows_without_harm(subject: Subject, opened: Open) -> None:
    job = prompt(subject)
    engine = await opened(window=job.n_tokens)
    (last,) = await read(engine.generate(job))
    assert isinstance(last, End)
    assert last.error == ContextOverflow(job.n_tokens, job.n_tokens)
    shorter = prompt(subject, "Hi.", max_tokens=1)
    assert end(await read(engine.generate(shorter))).error is None


async def test_unknown_cache_is_an_error_that_lists_the_caches(subject: Subject, opened: Open) -> None:
    engine = await opened()
    (last,) = await read(engine.generate(prompt(subject, cache="huge")))
    assert isinstance(last, End)
    assert isinstance(last.error, NotFound)
    assert "main, fast" in last.error.message


async def test_job_without_a_cache_uses_the_first(subject: Subject, opened: Open) -> None:
    engine = await opened()
    await read(engine.generate(job := prompt(subject)))
    again = accepted(await read(engine.generate(prompt(subject, cache=""))))
    assert again.cached_tokens == reusable_tokens(subject, job.n_tokens)


async def test_greedy_answers_are_repeatable(subject: Subject, opened: Open) -> None:
    engine = await opened()
    first, second = [await read(engine.generate(job)) for job in [prompt(subject)] * 2]
    assert_alike(first, second, subject.tolerance)


@pytest.mark.parametrize("subject", REUSING_KV, indirect=True)
async def test_repeated_prompt_is_cached_except_its_last_token(subject: Subject, opened: Open) -> None:
    engine = await opened()
    await read(engine.generate(job := prompt(subject)))
    before = engine.stats()
    chunks = await read(engine.generate(job))
    kept = reusable_tokens(subject, job.n_tokens)
    assert accepted(chunks).cached_tokens == end(chunks).usage.cached == kept
    after = engine.stats()
    assert after.reused_tokens - before.reused_tokens == kept
    assert after.evaluated_tokens - before.evaluated_tokens == job.n_tokens - kept


@pytest.mark.parametrize("subject", REUSING_KV, indirect=True)
async def test_kv_is_reused_inside_its_scope_only(subject: Subject, opened: Open) -> None:
    engine = await opened()
    found: list[int] = []
    for scope in ("ann", "bob", "bob"):
        chunks = await read(engine.generate(job := prompt(subject, scope=scope)))
        assert accepted(chunks).elsewhere == 0
        found.append(end(chunks).usage.cached)
    assert found == [0, 0, reusable_tokens(subject, job.n_tokens)]


@pytest.mark.parametrize("subject", REUSING_KV, indirect=True)
async def test_caches_are_separate(subject: Subject, opened: Open) -> None:
    engine = await opened()
    await read(engine.generate(prompt(subject)))
    assert accepted(await read(engine.generate(prompt(subject, cache="fast")))).cached_tokens == 0


async def test_concurrent_jobs_answer_as_they_do_alone(subject: Subject, opened: Open) -> None:
    engine = await opened(parallel=2)
    jobs = [prompt(subject, topic, cache=cache, session=topic) for topic in TOPICS for cache in ("main", "fast")]
    generations = [engine.generate(job) for job in jobs]
    outputs = [await read(generation) for generation in generations]
    alone = await opened(parallel=1)
    expected = {topic: await read(alone.generate(prompt(subject, topic))) for topic in TOPICS}
    for job, chunks in zip(jobs, outputs, strict=True):
        accepted(chunks)
        assert_alike(chunks, expected[str(job.session)], subject.tolerance)


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


async def test_logprobs_are_absent_by_default(subject: Subject, opened: Open) -> None:
    engine = await opened()
    assert logprobs(await read(engine.generate(prompt(subject, logprobs=None)))) == []


@pytest.mark.parametrize("subject", REPORTING_PROGRESS, indirect=True)
async def test_progress_of_a_long_prompt_increases_up_to_its_length(subject: Subject, opened: Open) -> None:
    engine = await opened(slow=True)
    chunks = await read(engine.generate(job := prompt(subject, "word " * 60, max_tokens=1)))
    reports = [chunk for chunk in chunks if isinstance(chunk, Progress)]
    assert len(reports) >= 2
    assert [report.done for report in reports] == sorted({report.done for report in reports})
    assert {report.total for report in reports} == {job.n_tokens}
    assert reports[-1].done <= job.n_tokens


async def test_characters_of_several_tokens_are_decoded(subject: Subject, opened: Open) -> None:
    engine = await opened(file=subject.fluent_file)
    for pattern in ("一二三四五", "🎉🚀"):
        text = subject.prompt_for(pattern)
        spelled = subject.tokenizer.encode(pattern)
        assert len(spelled) > len(pattern), "the pattern needs characters of several tokens"
        job = prompt(subject, text, raw=True, max_tokens=len(spelled))
        output = ids(await read(engine.generate(job)))
        detokenizer = subject.tokenizer.detokenizer()
        pieces = [piece for token in output for piece in detokenizer.feed([token])] + detokenizer.finish()
        assert "".join(piece.text for piece in pieces) == pattern
        assert not any("\ufffd" in piece.text for piece in pieces)


async def test_prompt_in_several_runs_equals_one_run(subject: Subject, opened: Open) -> None:
    engine = await opened()
    job = prompt(subject)
    whole = await read(engine.generate(job))
    runs = tuple(TokenRun([id]) for id in job.ids)
    split = await read(engine.generate(replace(job, parts=runs)))
    assert accepted(split).cached_tokens == reusable_tokens(subject, job.n_tokens)
    assert_alike(whole, split, subject.tolerance)
