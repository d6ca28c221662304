"""What CTranslate2 does beyond the conformance suite: batches, beam search, refusals, death."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import ctranslate2
import pytest

from modelyard.core.engine import Accepted, CacheInfo, Chunk, Control, End, Media, Prompt, TokenRun, Tokens
from modelyard.core.errors import Internal, InvalidRequest, ModelyardError, Timeout, Unavailable, Unsupported
from modelyard.core.request import Constraint, Sampling
from modelyard_ct2.engine import Ct2Batch, Ct2Engine, Ct2Job, next_batch
from modelyard_ct2.options import Ct2Options
from tests.engines.ct2.helpers import GREEDY, model_folder, prompt, running, spec, text_of, tiny_folder
from tests.engines.reading import assert_alike, end, ids, logprobs, read, until

SIMILAR = ("Tell me about the city of Paris.", "Tell me about the city of Berlin.", "Tell me about the city of Rome.")
LONG = "A long walk along the river. " * 8
DEADLINE_S = 60.0


class BatchProbe:
    """Records the size of each batch, and can block long batches at their next token."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self.block: threading.Event | None = None
        run, on_token = Ct2Batch.run, Ct2Batch._on_token

        def recording_run(batch: Ct2Batch, generator: Any) -> None:
            self.sizes.append(len(batch.jobs))
            run(batch, generator)

        def blocking_on_token(batch: Ct2Batch, result: Any) -> bool:
            if self.block is not None and batch.jobs[0].prompt_tokens > 50:
                self.block.wait(DEADLINE_S)
            return on_token(batch, result)

        monkeypatch.setattr(Ct2Batch, "run", recording_run)
        monkeypatch.setattr(Ct2Batch, "_on_token", blocking_on_token)


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Iterator[BatchProbe]:
    probe = BatchProbe(monkeypatch)
    yield probe
    if probe.block is not None:
        probe.block.set()


# --- batches ----------------------------------------------------------------------------------------------------------


async def test_jobs_that_arrive_together_share_a_batch(probe: BatchProbe) -> None:
    async with running() as engine:
        generations = [engine.generate(prompt(text)) for text in SIMILAR]
        answers = [await read(generation) for generation in generations]
    assert probe.sizes == [3]
    assert all(end(chunks).reason == "length" for chunks in answers)


async def test_each_job_of_a_batch_ends_by_its_own_limits(probe: BatchProbe) -> None:
    async with running() as engine:
        free = ids(await read(engine.generate(prompt(SIMILAR[0], max_tokens=12))))
        stop = next(token for token in free[4:] if token not in free[:4])
        prompts = [
            prompt(SIMILAR[0], max_tokens=12, stop_ids=(stop,)),
            prompt(SIMILAR[0], max_tokens=2),
            prompt(SIMILAR[0]),
        ]
        stopped, short, other = [await read(each) for each in [engine.generate(one) for one in prompts]]
    assert probe.sizes == [1, 3]
    assert (end(stopped).reason, ids(stopped)) == ("stop", free[: free.index(stop)])
    assert (end(short).reason, len(ids(short))) == ("length", 2)
    assert (end(other).reason, len(ids(other))) == ("length", 8)


async def test_logprobs_in_a_batch_belong_to_their_job(probe: BatchProbe) -> None:
    """Rows move when a job ends, and prompts of other lengths start later."""
    texts = (*SIMILAR, "Tell me of Oslo.")
    prompts = [prompt(text, logprobs=3, max_tokens=3 + 3 * n) for n, text in enumerate(texts)]
    async with running() as engine:
        together = [await read(each) for each in [engine.generate(one) for one in prompts]]
        alone = [await read(engine.generate(one)) for one in prompts]
    assert probe.sizes[0] == 4
    for chunks, expected in zip(together, alone, strict=True):
        assert all(each.id == each.top[0][0] for each in logprobs(chunks)), "greedy takes the best of its own row"
        assert_alike(chunks, expected)


async def test_logprobs_0_gives_only_the_chosen_token() -> None:
    async with running() as engine:
        plain, full = [await read(engine.generate(prompt(logprobs=n))) for n in (0, 2)]
    assert [each.top for each in logprobs(plain)] == [()] * 8
    for one, other in zip(logprobs(plain), logprobs(full), strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)


async def test_short_job_does_not_wait_for_a_long_one(probe: BatchProbe) -> None:
    probe.block = threading.Event()
    async with running({"main": CacheInfo(512, 2)}) as engine:
        long = engine.generate(prompt(LONG, max_tokens=50))
        await until(long, Accepted)
        short = await asyncio.wait_for(read(engine.generate(prompt("Hi", max_tokens=2))), DEADLINE_S)
        assert end(short).reason == "length"
        assert engine.stats().running == 1
        probe.block.set()
        assert end(await read(long)).error is None


async def test_with_one_worker_the_next_batch_takes_all_waiting_jobs(probe: BatchProbe) -> None:
    probe.block = threading.Event()
    async with running(inter_threads=1) as engine:
        long = engine.generate(prompt(LONG, max_tokens=2))
        await until(long, Accepted)
        others = [engine.generate(prompt(text, max_tokens=2)) for text in SIMILAR]
        probe.block.set()
        answers = [await read(each) for each in others]
        await read(long)
    assert probe.sizes == [1, 3]
    assert all(len(ids(chunks)) == 2 for chunks in answers)


async def test_end_of_a_batch_does_not_close_the_batch_window_of_waiting_jobs(probe: BatchProbe) -> None:
    probe.block = threading.Event()
    async with running() as engine:
        long = engine.generate(prompt(LONG, max_tokens=2))
        await until(long, Accepted)
        engine.options = engine.options.model_copy(update={"batch_window": 3600.0})
        first = engine.generate(prompt(SIMILAR[0], max_tokens=2))
        probe.block.set()
        await asyncio.wait(list(engine._running.values()))
        assert not engine._running
        second = engine.generate(prompt(SIMILAR[1], max_tokens=2))
        engine._start_batches()
        for generation in (long, first, second):
            await read(generation)
    assert probe.sizes == [1, 2]


async def test_waiting_job_is_cancelled_at_once(probe: BatchProbe) -> None:
    probe.block = threading.Event()
    async with running(inter_threads=1) as engine:
        long = engine.generate(prompt(LONG, max_tokens=2))
        await until(long, Accepted)
        waiting = engine.generate(prompt("Hi"))
        waiting.cancel()
        chunks = await asyncio.wait_for(read(waiting), DEADLINE_S)
        assert [type(chunk) for chunk in chunks] == [End]
        assert end(chunks).reason == "cancelled"
        probe.block.set()
        await read(long)
    assert probe.sizes == [1]


async def test_deadline_ends_a_job_before_prefill_and_during_decoding(probe: BatchProbe) -> None:
    async with running() as engine:
        (last,) = await read(engine.generate(prompt(deadline=1.0)))
        assert isinstance(last, End)
        assert isinstance(last.error, Timeout)
        probe.block = threading.Event()
        job = engine.generate(prompt(LONG, max_tokens=50))
        await until(job, Accepted)
        for batch in engine._running:
            batch.jobs[0].revoked = lambda now: ("error", Timeout("late"))  # type: ignore[method-assign]
        probe.block.set()
        assert isinstance(end(await read(job)).error, Timeout)


# --- sampling ---------------------------------------------------------------------------------------------------------


async def test_beam_search_returns_what_ctranslate2_returns() -> None:
    beams = prompt("Tell me about Paris.", sampling=Sampling(beam_size=3), max_tokens=10, stop_ids=(2,))
    async with running() as engine:
        chunks = await read(engine.generate(beams))
        texts = [engine._vocabulary[id] for id in beams.ids]
        direct = engine._generators[0].generate_batch(
            [texts], include_prompt_in_result=False, beam_size=3, max_length=10, end_token=[2]
        )
    assert [type(chunk) for chunk in chunks] == [Accepted, Tokens, End]
    assert ids(chunks) == direct[0].sequences_ids[0]
    assert end(chunks).usage.output == len(ids(chunks)) > 0


async def test_real_model_answers_in_int8_by_sampling_and_by_beam_search() -> None:
    question, fields = "What is the capital of France?", {"max_tokens": 20, "stop_ids": (2,)}
    async with running(path=str(model_folder()), compute_type="int8") as engine:
        assert engine.info.device == "cpu"
        sampled = engine.generate(prompt(question, **fields))
        beams = engine.generate(prompt(question, sampling=Sampling(beam_size=2), **fields))
        for chunks in (await read(sampled), await read(beams)):
            assert "Paris" in text_of(chunks)
            assert end(chunks).reason == "stop"
            assert 2 not in ids(chunks), "the stop token is not part of the answer"


async def test_tiny_top_p_takes_the_best_token_at_any_temperature() -> None:
    narrow = Sampling(temperature=2.0, top_p=1e-6)
    async with running() as engine:
        best, sampled = [await read(engine.generate(prompt(sampling=each))) for each in (GREEDY, narrow)]
    assert ids(best) == ids(sampled)


async def test_answers_have_at_least_min_length() -> None:
    async with running() as plain, running(min_length=16) as longer:
        for sampling in (GREEDY, Sampling(beam_size=2)):
            stop = ids(await read(plain.generate(prompt(sampling=sampling))))[-1]
            stopping = prompt(sampling=sampling, max_tokens=20, stop_ids=(stop,))
            assert len(ids(await read(plain.generate(stopping)))) < 16
            assert len(ids(await read(longer.generate(stopping)))) >= 16


# --- refusals ---------------------------------------------------------------------------------------------------------

REFUSED: list[tuple[Prompt, type[ModelyardError], str]] = [
    (Prompt(parts=(TokenRun([]),), max_tokens=1), InvalidRequest, "empty"),
    (Prompt(parts=(TokenRun([1, 49152]),), max_tokens=1), InvalidRequest, "outside 0…49151"),
    (Prompt(parts=(TokenRun([-1]),), max_tokens=1), InvalidRequest, "outside"),
    (Prompt(parts=(TokenRun([1]), Media("image", "x", b"", 4)), max_tokens=1), Unsupported, "takes no image"),
    (Prompt(parts=(TokenRun([1]),), constraint=Constraint("json_object")), Unsupported, "schema or grammar"),
    (Prompt(parts=(TokenRun([1]),), adapters=(("law", 1.0),)), Unsupported, "LoRA"),
    (Prompt(parts=(TokenRun([1]),), logprobs=1, sampling=Sampling(beam_size=2)), Unsupported, "beam"),
]


async def test_unsupported_prompts_are_refused_with_a_reason() -> None:
    async with running() as engine:
        for refused, kind, message in REFUSED:
            (last,) = await read(engine.generate(refused))
            assert isinstance(last, End)
            assert isinstance(last.error, kind)
            assert message in last.error.message
        with pytest.raises(InvalidRequest, match="save"):
            await engine.control(Control("save"))


async def test_capabilities_exclude_what_ctranslate2_lacks() -> None:
    engine = Ct2Engine(spec())
    can = engine.info.capabilities
    assert (can.structured, can.lora, can.embeddings, can.logprobs, can.multi_turn) == (False, False, False, True, True)
    assert "seed" in can.ignored
    await engine.close()


async def test_open_refuses_a_compute_type_that_the_device_lacks() -> None:
    supported = ctranslate2.get_supported_compute_types("cpu")
    missing = next(name for name in ("float16", "int8_float16") if name not in supported)
    engine = Ct2Engine(spec(compute_type=missing))
    with pytest.raises(InvalidRequest, match=missing):
        await engine.open(lambda *_: None)
    await engine.close()


async def test_window_beyond_the_trained_length_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with running({"main": CacheInfo(9000, 1)}):
        assert "trained on 8192" in caplog.text


# --- death ------------------------------------------------------------------------------------------------------------


class BrokenGenerator:
    """Fails inside its call, like the real one."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def generate_batch(self, *args: Any, **kwargs: Any) -> None:
        raise self.error

    def unload_model(self) -> None: ...


async def test_runtime_error_of_the_library_kills_the_engine() -> None:
    async with running() as engine:
        engine._generators[0] = BrokenGenerator(RuntimeError("CUDA failed with error unspecified launch failure"))
        chunks = await read(engine.generate(prompt()))
        assert isinstance(end(chunks).error, Unavailable)
        assert "launch failure" in (await asyncio.wait_for(engine.lost, DEADLINE_S)).message
        assert isinstance(end(await read(engine.generate(prompt()))).error, Unavailable)


async def test_out_of_memory_ends_one_batch_only() -> None:
    async with running() as engine:
        working, engine._generators[0] = engine._generators[0], BrokenGenerator(MemoryError("std::bad_alloc"))
        assert isinstance(end(await read(engine.generate(prompt()))).error, Internal)
        engine._generators[0] = working
        assert end(await read(engine.generate(prompt()))).reason == "length"
        assert not engine.lost.done()


async def test_error_in_a_callback_ends_one_batch_only(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as engine:
        with monkeypatch.context() as patched:
            patched.setattr(Ct2Batch, "_on_token", lambda self, result: 1 / 0)
            assert isinstance(end(await read(engine.generate(prompt()))).error, Internal)
        assert end(await read(engine.generate(prompt()))).reason == "length"


def test_process_that_never_closes_its_engine_exits_cleanly() -> None:
    script = f"""
        import asyncio
        from modelyard.core.engine import CacheInfo, EngineSpec, Prompt, TokenRun
        import modelyard_ct2 as ct2

        async def main():
            options = ct2.Options(path={str(tiny_folder())!r}, device="cpu", intra_threads=1)
            engine = ct2.create(EngineSpec("m", options, {{"main": CacheInfo(64)}}))
            await engine.open(lambda *_: None)
            async for _ in engine.generate(Prompt(parts=(TokenRun([1, 2]),), max_tokens=2)):
                pass
            return engine

        engine = asyncio.run(main())
    """
    done = subprocess.run([sys.executable, "-c", dedent(script)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_unloading_returns_the_memory_of_the_weights() -> None:
    """In a process of its own: SmolLM2 takes 270 MB, and nothing of it may stay, however often it is loaded."""
    script = f"""
        import asyncio, psutil
        from modelyard.core.engine import CacheInfo, EngineSpec, Prompt, TokenRun
        import modelyard_ct2 as ct2

        async def cycle():
            options = ct2.Options(path={str(model_folder())!r}, device="cpu", intra_threads=1)
            engine = ct2.create(EngineSpec("m", options, {{"main": CacheInfo(64, 4)}}))
            await engine.open(lambda *_: None)
            async for _ in engine.generate(Prompt(parts=(TokenRun([1, 2]),), max_tokens=2)):
                pass
            await engine.close()

        async def main():
            for _ in range(6):
                await cycle()
                print(psutil.Process().memory_info().rss >> 20)

        asyncio.run(main())
    """
    done = subprocess.run([sys.executable, "-c", dedent(script)], capture_output=True, text=True, timeout=120)
    first, *others = [int(line) for line in done.stdout.split()]
    assert first < 200, done.stdout + done.stderr
    assert max(others) - first < 48, done.stdout


# Which jobs share a batch, and when a running batch delivers tokens.


def create_job(length: int, max_tokens: int, sampling: Sampling = GREEDY) -> Ct2Job:
    prompt = Prompt(parts=(TokenRun([1] * length),), sampling=sampling, max_tokens=max_tokens)
    return Ct2Job(prompt, asyncio.get_running_loop(), "main", 4096, Ct2Options(path="x"), on_cancel=lambda: None)


# --- choosing a batch -------------------------------------------------------------------------------------------------


def create_jobs(*lengths: int, sampling: Sequence[Sampling] = ()) -> list[Ct2Job]:
    return [
        create_job(length, 5 + index, sampling[index] if sampling else Sampling())
        for index, length in enumerate(lengths)
    ]


def batch_lengths(jobs: list[Ct2Job], slack: int) -> list[int]:
    return [job.prompt_tokens for job in next_batch(jobs, slack)]


async def test_jobs_of_nearly_the_same_length_share_a_batch_longest_first() -> None:
    assert batch_lengths(create_jobs(100, 104, 98), slack=16) == [104, 100, 98]


async def test_jobs_of_the_same_length_keep_their_order() -> None:
    waiting = create_jobs(50, 50, 50)
    assert next_batch(waiting, slack=16) == waiting


async def test_the_oldest_job_leads_and_jobs_of_another_length_wait() -> None:
    assert batch_lengths(create_jobs(100, 500, 110), slack=16) == [110, 100]


async def test_no_two_jobs_of_a_batch_differ_by_more_than_the_slack() -> None:
    assert batch_lengths(create_jobs(100, 110, 95), slack=10) == [110, 100]


async def test_without_slack_only_jobs_of_the_same_length_share_a_batch() -> None:
    assert batch_lengths(create_jobs(7, 8, 7), slack=0) == [7, 7]


async def test_jobs_with_other_sampling_get_another_batch() -> None:
    sampling = [Sampling(temperature=0.5), Sampling(temperature=0.6), Sampling(temperature=0.5)]
    waiting = create_jobs(10, 10, 10, sampling=sampling)
    assert next_batch(waiting, slack=16) == [waiting[0], waiting[2]]


async def test_output_limits_separate_beam_searches_only() -> None:
    assert len(next_batch(create_jobs(10, 10), slack=16)) == 2
    assert len(next_batch(create_jobs(10, 10, sampling=[Sampling(beam_size=2)] * 2), slack=16)) == 1


# --- running a batch --------------------------------------------------------------------------------------------------


class Generator:
    """Calls back once per step for each row that has not ended, row after row, like CTranslate2."""

    def generate_batch(
        self, prompts: list[list[str]], *, max_length: int, callback: Callable[[Any], bool], **_: Any
    ) -> None:
        rows = list(range(len(prompts)))
        for step in range(max_length):
            rows = [row for row in rows if not callback(SimpleNamespace(step=step, batch_id=row, token_id=7))]


class RecordingDispatch:
    """Records tokens, ends and flushes that deliver something."""

    def __init__(self, jobs: list[Ct2Job]) -> None:
        self.jobs, self.events = jobs, list[str]()

    def put(self, job: Ct2Job, chunks: list[Chunk], last: bool = False) -> None:
        (chunk,) = chunks
        assert last == isinstance(chunk, End)
        self.events.append(f"{'token' if isinstance(chunk, Tokens) else 'end'} {self.jobs.index(job)}")

    def flush(self) -> None:
        if self.events and self.events[-1] != "flush":
            self.events.append("flush")


def run(jobs: list[Ct2Job]) -> list[str]:
    dispatch = RecordingDispatch(jobs)
    Ct2Batch(jobs, [f"word{id}" for id in range(10)], dispatch).run(Generator())  # type: ignore[arg-type]
    return dispatch.events


async def test_tokens_are_flushed_once_per_step_after_the_last_row() -> None:
    events = run([create_job(2, max_tokens=2), create_job(2, max_tokens=2)])
    first, second = ["token 0", "token 1", "flush"], ["token 0", "end 0", "token 1", "end 1", "flush"]
    assert events == first + second


async def test_flush_follows_the_last_row_that_still_runs() -> None:
    events = run([create_job(2, max_tokens=3), create_job(2, max_tokens=1)])
    assert events == ["token 0", "token 1", "end 1", "flush", "token 0", "flush", "token 0", "end 0", "flush"]


async def test_cancelled_job_ends_without_a_token() -> None:
    cancelled = create_job(2, max_tokens=5)
    cancelled.cancel()
    assert run([create_job(2, max_tokens=1), cancelled]) == ["token 0", "end 0", "end 1", "flush"]
