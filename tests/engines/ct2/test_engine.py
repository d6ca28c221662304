"""What CTranslate2 does beside the conformance suite: batches, beams, refusals, death."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from textwrap import dedent
from typing import Any

import ctranslate2
import pytest

from modelyard.core.engine import Accepted, CacheInfo, Control, End, Media, Prompt, TokenRun, Tokens
from modelyard.core.errors import Internal, InvalidRequest, ModelyardError, Timeout, Unavailable, Unsupported
from modelyard.core.request import Constraint, Sampling
from modelyard.engines.ct2.batch import Ct2Batch
from modelyard.engines.ct2.engine import Ct2Engine
from tests.engines.ct2.stage import GREEDY, model_folder, prompt, running, said, spec
from tests.engines.reading import assert_alike, end, ids, logprobs, read, until

ALIKE = ("Tell me about the city of Paris.", "Tell me about the city of Berlin.", "Tell me about the city of Rome.")
LONG = "A long walk along the river. " * 8
DEADLINE_S = 60.0


class Watched:
    """Sees which jobs share a batch, and can hold a batch at its next token."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self.held: threading.Event | None = None
        run, on_token = Ct2Batch.run, Ct2Batch._on_token

        def running(batch: Ct2Batch, generator: Any) -> None:
            self.sizes.append(len(batch.jobs))
            run(batch, generator)

        def token(batch: Ct2Batch, result: Any) -> bool:
            if self.held is not None and len(batch.jobs[0].ids) > 50:
                self.held.wait(DEADLINE_S)
            return on_token(batch, result)

        monkeypatch.setattr(Ct2Batch, "run", running)
        monkeypatch.setattr(Ct2Batch, "_on_token", token)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    watched = Watched(monkeypatch)
    yield watched
    if watched.held is not None:
        watched.held.set()


# --- batches ----------------------------------------------------------------------------------------------------------


async def test_jobs_that_come_together_share_a_batch(watched: Watched) -> None:
    async with running() as engine:
        generations = [engine.generate(prompt(text)) for text in ALIKE]
        answers = [await read(generation) for generation in generations]
    assert watched.sizes == [3]
    assert all(end(chunks).reason == "length" for chunks in answers)


async def test_each_job_of_a_batch_ends_by_its_own_rules(watched: Watched) -> None:
    async with running() as engine:
        free = ids(await read(engine.generate(prompt(ALIKE[0], max_tokens=12))))
        stop = next(token for token in free[4:] if token not in free[:4])
        asked = [prompt(ALIKE[0], max_tokens=12, stop_ids=(stop,)), prompt(ALIKE[0], max_tokens=2), prompt(ALIKE[0])]
        stopped, short, other = [await read(each) for each in [engine.generate(one) for one in asked]]
    assert watched.sizes == [1, 3]
    assert (end(stopped).reason, ids(stopped)) == ("stop", free[: free.index(stop)])
    assert (end(short).reason, len(ids(short))) == ("length", 2)
    assert (end(other).reason, len(ids(other))) == ("length", 8)


async def test_logprobs_in_a_batch_are_each_jobs_own(watched: Watched) -> None:
    """Rows move when a job ends, and prompts of other lengths begin later."""
    asked = [prompt(text, logprobs=3, max_tokens=3 + 3 * n) for n, text in enumerate((*ALIKE, "Tell me of Oslo."))]
    async with running() as engine:
        together = [await read(each) for each in [engine.generate(one) for one in asked]]
        alone = [await read(engine.generate(one)) for one in asked]
    assert watched.sizes[0] == 4
    for chunks, expected in zip(together, alone, strict=True):
        assert all(each.id == each.top[0][0] for each in logprobs(chunks)), "greedy takes the best of its own row"
        assert_alike(chunks, expected)


async def test_a_job_without_alternatives_gets_the_chosen_tokens_logprob() -> None:
    async with running() as engine:
        plain, full = [await read(engine.generate(prompt(logprobs=n))) for n in (0, 2)]
    assert [each.top for each in logprobs(plain)] == [()] * 8
    for one, other in zip(logprobs(plain), logprobs(full), strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)


async def test_a_short_job_does_not_wait_for_a_long_one(watched: Watched) -> None:
    watched.held = threading.Event()
    async with running({"main": CacheInfo(512, 2)}) as engine:
        long = engine.generate(prompt(LONG, max_tokens=50))
        await until(long, Accepted)
        short = await asyncio.wait_for(read(engine.generate(prompt("Hi", max_tokens=2))), DEADLINE_S)
        assert end(short).reason == "length"
        assert engine.stats().running == 1
        watched.held.set()
        assert end(await read(long)).error is None


async def test_with_one_worker_the_next_batch_takes_all_who_waited(watched: Watched) -> None:
    watched.held = threading.Event()
    async with running(inter_threads=1) as engine:
        long = engine.generate(prompt(LONG, max_tokens=2))
        await until(long, Accepted)
        others = [engine.generate(prompt(text, max_tokens=2)) for text in ALIKE]
        watched.held.set()
        answers = [await read(each) for each in others]
        await read(long)
    assert watched.sizes == [1, 3]
    assert all(len(ids(chunks)) == 2 for chunks in answers)


async def test_jobs_that_still_gather_are_not_sent_off_by_anothers_end(watched: Watched) -> None:
    watched.held = threading.Event()
    async with running() as engine:
        long = engine.generate(prompt(LONG, max_tokens=2))
        await until(long, Accepted)
        engine.options = engine.options.model_copy(update={"batch_window": 3600.0})
        first = engine.generate(prompt(ALIKE[0], max_tokens=2))
        watched.held.set()
        await asyncio.wait(list(engine._running.values()))
        assert not engine._running
        second = engine.generate(prompt(ALIKE[1], max_tokens=2))
        engine._dispatch()
        for generation in (long, first, second):
            await read(generation)
    assert watched.sizes == [1, 2]


async def test_a_job_that_waits_can_be_cancelled_at_once(watched: Watched) -> None:
    watched.held = threading.Event()
    async with running(inter_threads=1) as engine:
        long = engine.generate(prompt(LONG, max_tokens=2))
        await until(long, Accepted)
        waiting = engine.generate(prompt("Hi"))
        waiting.cancel()
        chunks = await asyncio.wait_for(read(waiting), DEADLINE_S)
        assert [type(chunk) for chunk in chunks] == [End]
        assert end(chunks).reason == "cancelled"
        watched.held.set()
        await read(long)
    assert watched.sizes == [1]


async def test_deadline_ends_a_job_before_it_is_read_and_while_it_speaks(watched: Watched) -> None:
    async with running() as engine:
        (last,) = await read(engine.generate(prompt(deadline=1.0)))
        assert isinstance(last, End)
        assert isinstance(last.error, Timeout)
        watched.held = threading.Event()
        job = engine.generate(prompt(LONG, max_tokens=50))
        await until(job, Accepted)
        for batch in engine._running:
            batch.jobs[0].is_late = lambda now: True  # type: ignore[method-assign]
        watched.held.set()
        assert isinstance(end(await read(job)).error, Timeout)


# --- sampling ---------------------------------------------------------------------------------------------------------


async def test_beam_search_says_what_ctranslate2_says_and_counts_it() -> None:
    asked = prompt("Tell me about Paris.", sampling=Sampling(beam_size=3), max_tokens=10, stop_ids=(2,))
    async with running() as engine:
        chunks = await read(engine.generate(asked))
        words = [engine._words[id] for id in asked.ids]
        direct = engine._held[0].generate_batch(
            [words], include_prompt_in_result=False, beam_size=3, max_length=10, end_token=[2]
        )
    assert [type(chunk) for chunk in chunks] == [Accepted, Tokens, End]
    assert ids(chunks) == direct[0].sequences_ids[0]
    assert end(chunks).usage.output == len(ids(chunks)) > 0


async def test_beam_search_that_ends_says_so_and_hides_the_end() -> None:
    asked = prompt("What is the capital of France?", sampling=Sampling(beam_size=2), max_tokens=30, stop_ids=(2,))
    async with running() as engine:
        chunks = await read(engine.generate(asked))
    assert end(chunks).reason == "stop"
    assert 2 not in ids(chunks)
    assert "Paris" in said(chunks)


async def test_int8_as_it_comes_answers_sensibly() -> None:
    async with running(compute_type="int8") as engine:
        asked = prompt("What is the capital of France?", max_tokens=20, stop_ids=(2,))
        assert "Paris" in said(await read(engine.generate(asked)))
        assert engine.info.device == "cpu"


async def test_sampling_keeps_to_its_nucleus() -> None:
    """A nucleus of nearly nothing is the best token, whatever the temperature."""
    tight = Sampling(temperature=2.0, top_p=1e-6)
    async with running() as engine:
        greedy, narrow = [await read(engine.generate(prompt(sampling=how))) for how in (GREEDY, tight)]
    assert ids(greedy) == ids(narrow)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(beam_size=2)], ids=["greedy", "beams"])
async def test_answers_have_at_least_min_length(sampling: Sampling) -> None:
    asked = prompt("What is the capital of France?", sampling=sampling, max_tokens=20, stop_ids=(2,))
    async with running() as engine:
        assert len(ids(await read(engine.generate(asked)))) < 16, "it would be this long anyway"
    async with running(min_length=16) as engine:
        assert len(ids(await read(engine.generate(asked)))) >= 16


# --- refusals ---------------------------------------------------------------------------------------------------------

REFUSED: list[tuple[Prompt, type[ModelyardError], str]] = [
    (Prompt(parts=(TokenRun([]),), max_tokens=1), InvalidRequest, "empty"),
    (Prompt(parts=(TokenRun([1, 49152]),), max_tokens=1), InvalidRequest, "outside 0…49151"),
    (Prompt(parts=(TokenRun([-1]),), max_tokens=1), InvalidRequest, "outside"),
    (Prompt(parts=(TokenRun([1]), Media("image", "x", b"", 4)), max_tokens=1), Unsupported, "text only"),
    (Prompt(parts=(TokenRun([1]),), constraint=Constraint("json_object")), Unsupported, "schema or grammar"),
    (Prompt(parts=(TokenRun([1]),), adapters=(("law", 1.0),)), Unsupported, "LoRA"),
    (Prompt(parts=(TokenRun([1]),), logprobs=1, sampling=Sampling(beam_size=2)), Unsupported, "beam"),
]


async def test_what_it_cannot_do_is_refused_with_the_reason() -> None:
    async with running() as engine:
        for asked, kind, why in REFUSED:
            (last,) = await read(engine.generate(asked))
            assert isinstance(last, End)
            assert isinstance(last.error, kind)
            assert why in last.error.message
        with pytest.raises(InvalidRequest, match="save"):
            await engine.control(Control("save"))


async def test_capabilities_say_what_it_cannot() -> None:
    engine = Ct2Engine(spec())
    can = engine.info.capabilities
    assert (can.structured, can.lora, can.embeddings, can.logprobs, can.multi_turn) == (False, False, False, True, True)
    assert "seed" in can.ignored
    await engine.close()


async def test_compute_type_that_the_device_has_not_is_told_at_opening() -> None:
    supported = ctranslate2.get_supported_compute_types("cpu")
    missing = next(kind for kind in ("float16", "int8_float16") if kind not in supported)
    engine = Ct2Engine(spec(compute_type=missing))
    with pytest.raises(InvalidRequest, match=missing):
        await engine.open(lambda *_: None)
    await engine.close()


async def test_window_beyond_the_trained_length_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    async with running({"main": CacheInfo(9000, 1)}):
        assert "trained on 8192" in caplog.text


# --- death ------------------------------------------------------------------------------------------------------------


class Broken:
    """A generator that fails as the real one would: from inside its call."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def generate_batch(self, *args: Any, **kwargs: Any) -> None:
        raise self.error


async def test_error_of_the_library_is_the_engines_death() -> None:
    async with running() as engine:
        engine._held[0] = Broken(RuntimeError("CUDA failed with error unspecified launch failure"))
        chunks = await read(engine.generate(prompt()))
        assert isinstance(end(chunks).error, Unavailable)
        assert "launch failure" in (await asyncio.wait_for(engine.lost, DEADLINE_S)).message
        assert isinstance(end(await read(engine.generate(prompt()))).error, Unavailable)


async def test_too_little_memory_is_one_batchs_trouble() -> None:
    async with running() as engine:
        whole, engine._held[0] = engine._held[0], Broken(MemoryError("std::bad_alloc"))
        assert isinstance(end(await read(engine.generate(prompt()))).error, Internal)
        engine._held[0] = whole
        assert end(await read(engine.generate(prompt()))).reason == "length"
        assert not engine.lost.done()


async def test_fault_in_a_callback_ends_its_jobs_and_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as engine:
        with monkeypatch.context() as patched:
            patched.setattr(Ct2Batch, "_on_token", lambda self, result: 1 / 0)
            assert isinstance(end(await read(engine.generate(prompt()))).error, Internal)
        assert end(await read(engine.generate(prompt()))).reason == "length"


def test_process_that_never_closes_its_engine_still_ends_well() -> None:
    script = f"""
        import asyncio
        from modelyard.core.engine import CacheInfo, EngineSpec, Prompt, TokenRun
        from modelyard.engines import ct2

        async def main():
            options = ct2.Options(path={str(model_folder())!r}, device="cpu", intra_threads=1)
            engine = ct2.create(EngineSpec("m", options, {{"main": CacheInfo(64)}}))
            await engine.open(lambda *_: None)
            async for _ in engine.generate(Prompt(parts=(TokenRun([1, 2]),), max_tokens=2)):
                pass
            return engine

        engine = asyncio.run(main())
    """
    done = subprocess.run([sys.executable, "-c", dedent(script)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
