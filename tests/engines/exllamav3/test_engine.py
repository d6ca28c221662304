"""The ExLlamaV3 engine on the fake library: calls, chunks, pages, errors and death."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

import modelyard_exllamav3 as exllamav3
from modelyard import plugins
from modelyard.core.engine import CacheInfo, Control, Media, Progress, TokenRun, Tokens
from modelyard.core.errors import Internal, InvalidRequest, ModelyardError, Timeout, Unavailable, Unsupported
from modelyard.core.request import Constraint, Sampling
from modelyard.engines import generation_queue
from modelyard.engines.generation_queue import TokenDispatch
from modelyard.plugins import MissingLibrary
from modelyard_exllamav3 import engine as model_module
from modelyard_exllamav3.engine import load_library
from tests.engines.exllamav3.fake_library import FakeLibrary
from tests.engines.exllamav3.helpers import N_VOCAB, make, model_folder, prompt, running, spec, text_of, tokenizer
from tests.engines.reading import accepted, end, ids, logprobs, read, until

TWO = {"main": CacheInfo(2048, 2), "fast": CacheInfo(512, 4)}
LONG = "word " * 700


def runs(text: str) -> str:
    return f"<|im_start|>{text}"


# --- the calls ------------------------------------------------------------------------------------------------------


async def test_each_cache_has_its_own_pages_and_generator() -> None:
    library = FakeLibrary()
    async with running(TWO, library, exllama_cache_quant="8,4", exllama_warmup=True):
        assert library.calls["Cache"] == [
            {"max_num_tokens": 2 * 2304, "max_batch_size": 2, "layer_type": "quant", "k_bits": 8, "v_bits": 4},
            {"max_num_tokens": 4 * 768, "max_batch_size": 4, "layer_type": "quant", "k_bits": 8, "v_bits": 4},
        ]
        assert library.calls["load"] == [{"use_per_device": None, "max_chunk_size": 2048, "max_batch_size": 4}]
        made = [{name: call[name] for name in ("max_batch_size", "max_q_size")} for call in library.calls["Generator"]]
        assert made == [{"max_batch_size": 2, "max_q_size": 8}, {"max_batch_size": 4, "max_q_size": 8}]


async def test_native_job_gets_token_ids_limits_and_sampler() -> None:
    library = FakeLibrary()
    async with running(library=library) as engine:
        request = prompt(stop_ids=(2,), sampling=Sampling(seed=7, dry_multiplier=0.8, dry_sequence_breakers=("ab",)))
        await read(engine.generate(request))
        (called,) = library.calls["Job"]
        assert called["input_ids"].tolist() == [request.ids]
        assert (called["max_new_tokens"], called["stop_conditions"], called["seed"]) == (8, [2], 7)
        dry = called["sampler"].steps[0]
        assert (dry.name, dry.called["dry_sequence_breakers"]) == ("SS_DRY", {2})


async def test_event_loop_wakes_once_per_step_for_all_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    library, batches = FakeLibrary(), []
    deliver = generation_queue.deliver

    def counted(batch: Any) -> None:
        batches.append(batch)
        deliver(batch)

    monkeypatch.setattr(generation_queue, "deliver", counted)
    async with running({"main": CacheInfo(512, 4)}, library, slow=True) as engine:
        jobs = [engine.generate(prompt(text, max_tokens=20)) for text in "abcd"]
        for job in jobs:
            assert len(ids(await read(job))) == 20
        assert len(batches) <= library.steps < 4 * 20


def deliveries(monkeypatch: pytest.MonkeyPatch, library: FakeLibrary) -> list[tuple[int, str, int]]:
    """Deliveries of tokens: the step, whether at its GPU wait or its end, and the number of tokens."""
    seen: list[tuple[int, str, int]] = []
    flush, before_gpu_wait = TokenDispatch.flush, TokenDispatch.before_gpu_wait
    when = ["end"]

    def delivered(dispatch: TokenDispatch) -> None:
        tokens = [chunk for _, chunks, _ in dispatch._pending for chunk in chunks if isinstance(chunk, Tokens)]
        if tokens:
            seen.append((library.steps, when[-1], sum(len(chunk.ids) for chunk in tokens)))
        flush(dispatch)

    def waits(dispatch: TokenDispatch) -> None:
        when.append("wait")
        before_gpu_wait(dispatch)
        when.pop()

    monkeypatch.setattr(TokenDispatch, "flush", delivered)
    monkeypatch.setattr(TokenDispatch, "before_gpu_wait", waits)
    return seen


async def test_tokens_are_delivered_during_the_next_gpu_wait_and_the_first_and_last_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = FakeLibrary()
    delivered = deliveries(monkeypatch, library)
    async with running(library=library) as engine:
        await read(engine.generate(prompt(runs("a b c d e f"), max_tokens=6)))
    assert delivered == [(1, "end", 1), (3, "wait", 1), (4, "wait", 1), (5, "wait", 1), (6, "wait", 1), (6, "end", 1)]


async def test_tokens_of_all_jobs_are_delivered_after_the_last_sampler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = FakeLibrary()
    delivered = deliveries(monkeypatch, library)
    begin = threading.Event()

    def wait_for_all_jobs() -> None:
        assert begin.wait(60)

    library.before_step = wait_for_all_jobs
    async with running(library=library) as engine:
        first = engine.generate(prompt(runs("a b c d e f"), max_tokens=5))
        others = [engine.generate(prompt(runs(f"{text} b c d e f"), max_tokens=5)) for text in "gh"]
        begin.set()
        for job in (first, *others):
            await read(job)
    waits = [(step, count) for step, when, count in delivered if when == "wait"]
    assert len(waits) == len({step for step, _ in waits})
    assert max(count for _, count in waits) == 3
    assert sum(count for _, _, count in delivered) == 15


async def test_tokens_are_not_held_back_while_another_prompt_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    library, reading, put = FakeLibrary(), set(), TokenDispatch.put

    def noted(dispatch: TokenDispatch, to: Any, chunks: Any, *rest: Any, **named: Any) -> None:
        if isinstance(chunks[0], Progress):
            reading.add(library.steps)
        put(dispatch, to, chunks, *rest, **named)

    monkeypatch.setattr(TokenDispatch, "put", noted)
    delivered = deliveries(monkeypatch, library)
    async with running(TWO, library, exllama_max_chunk_size=256, slow=True) as engine:
        stream = engine.generate(prompt(runs("a b c d e f"), max_tokens=1000))
        await until(stream, Tokens)
        reading.clear()
        await read(engine.generate(prompt(LONG, max_tokens=1)))
        stream.cancel()
        await read(stream)
    assert len(reading) > 2
    assert {(step, "end", 1) for step in sorted(reading)[:-1]} <= set(delivered)
    assert not any(when == "wait" for step, when, _ in delivered if step in reading)


# --- prefill --------------------------------------------------------------------------------------------------------


async def test_long_prompt_is_read_in_chunks_with_progress() -> None:
    async with running(TWO, exllama_max_chunk_size=256) as engine:
        request = prompt(LONG)
        chunks = await read(engine.generate(request))
        accepted(chunks)
        progress = [chunk for chunk in chunks if isinstance(chunk, Progress)]
        assert [one.done for one in progress] == [256, 512, request.n_tokens - 1]
        assert {one.total for one in progress} == {request.n_tokens}


async def test_job_cancelled_between_two_chunks_stops_reading() -> None:
    async with running(TWO, exllama_max_chunk_size=256, slow=True) as engine:
        job = engine.generate(request := prompt(LONG, max_tokens=100))
        chunks = await until(job, Progress)
        job.cancel()
        chunks += await read(job)
        assert end(chunks).reason == "cancelled"
        assert ids(chunks) == []
        assert max(one.done for one in chunks if isinstance(one, Progress)) < request.n_tokens - 1
        assert engine.stats().running == 0


async def test_continued_conversation_reuses_whole_pages_and_part_of_one() -> None:
    async with running(TWO) as engine:
        first = await read(engine.generate(request := prompt(LONG)))
        longer = replace(request, parts=(TokenRun([*request.ids, *ids(first), 30, 31]),))
        again = await read(engine.generate(longer))
        assert accepted(again).cached_tokens == end(again).usage.cached == request.n_tokens + len(ids(first)) - 1
        assert accepted(again).divergence == accepted(again).cached_tokens
        stats = engine.stats()
        assert stats.reused_tokens == stats.caches["main"].reused_tokens == accepted(again).cached_tokens
        assert stats.evaluated_tokens == request.n_tokens + 3
        assert stats.occupied_tokens > request.n_tokens


async def test_evict_keeps_the_pages_of_a_running_job() -> None:
    async with running(TWO, slow=True) as engine:
        job = engine.generate(prompt(LONG, max_tokens=60))
        chunks = await until(job, Tokens)
        await engine.control(Control("evict", "main"))
        chunks += await read(job)
        assert len(ids(chunks)) == 60
        assert engine.stats().occupied_tokens > 0
        await engine.control(Control("evict", "main"))
        assert engine.stats().occupied_tokens == 0


async def test_unsupported_control_is_refused() -> None:
    async with running() as engine:
        with pytest.raises(InvalidRequest, match="does not support 'save'"):
            await engine.control(Control("save"))


# --- decoding -------------------------------------------------------------------------------------------------------


async def test_tokens_held_back_for_a_character_are_sent_before_the_stop() -> None:
    party = tokenizer().encode("🎉")
    assert len(party) > 2
    shown = runs("🎉🎉🎉")
    async with running() as engine:
        chunks = await read(engine.generate(prompt(shown, max_tokens=20, stop_ids=(party[-1],))))
        assert ids(chunks) == party[:-1]
        assert end(chunks).reason == "stop"
        assert end(chunks).usage.output == len(party) - 1


async def test_logprobs_stay_with_tokens_that_were_held_back() -> None:
    async with running() as engine:
        chunks = await read(engine.generate(prompt(runs("🎉🎉🎉"), max_tokens=9, logprobs=3)))
        assert [one.id for one in logprobs(chunks)] == ids(chunks)
        assert all(len(one.top) == 3 and one.top[0] == (one.id, one.logprob) for one in logprobs(chunks))


async def test_logprobs_0_gives_only_the_chosen_tokens() -> None:
    async with running() as engine:
        found = logprobs(await read(engine.generate(prompt(logprobs=0))))
        assert len(found) == 8
        assert all(one.top == () and one.logprob <= 0 for one in found)


async def test_requeued_answer_is_the_same_answer() -> None:
    async with running(TWO) as plain, running(TWO, exllama_max_rq_tokens=16) as requeued:
        expected = await read(plain.generate(prompt(max_tokens=100)))
        chunks = await read(requeued.generate(prompt(max_tokens=100)))
        accepted(chunks)
        assert ids(chunks) == ids(expected)
        assert len([one for one in chunks if isinstance(one, Progress)]) == 1
        assert end(chunks).usage.cached == 0


async def test_jobs_wait_for_pages_if_the_cache_is_small() -> None:
    async with running({"main": CacheInfo(767, 4)}, exllama_cache_size=1024) as engine:
        jobs = [engine.generate(prompt(f"{n} {text}", max_tokens=300)) for n, text in enumerate("abcd")]
        for job in jobs:
            assert len(ids(await read(job))) == 300


async def test_same_seed_gives_the_same_answer_and_another_seed_a_different_one() -> None:
    async with running() as engine:
        hot = [Sampling(temperature=2.0, seed=seed) for seed in (1, 1, 2)]
        one, same, other = [ids(await read(engine.generate(prompt(sampling=each)))) for each in hot]
        assert one == same != other


async def test_timings_are_the_librarys() -> None:
    async with running() as engine:
        times = end(await read(engine.generate(prompt()))).timings
        assert (times.prefill, times.decode) == (0.25, 0.5)
        assert times.first_token is not None


# --- constraints ----------------------------------------------------------------------------------------------------


async def test_answer_matches_its_grammar_and_may_end_with_the_models_eos() -> None:
    async with running() as engine:
        date = await read(engine.generate(prompt(constraint=Constraint("regex", "[0-9]{4}-[0-9]{2}"), max_tokens=40)))
        assert end(date).reason == "stop"
        assert len(text_of(date)) == 7
        open_ended = prompt(
            constraint=Constraint("regex", "a*"), max_tokens=40, sampling=Sampling(temperature=9, seed=1)
        )
        chunks = await read(engine.generate(open_ended))
        assert set(text_of(chunks)) <= {"a"}
        assert 2 not in ids(chunks)


async def test_tool_call_is_constrained_only_after_its_trigger() -> None:
    constraint = Constraint("regex", r'\{"name": "now"\}', trigger="<tool_call>")
    shown = runs("x<tool_call>nonsense\nx")
    async with running() as engine:
        free = text_of(await read(engine.generate(prompt(shown, max_tokens=6))))
        assert free.startswith("<tool_call>nonsense")
        held = text_of(await read(engine.generate(prompt(shown, max_tokens=30, constraint=constraint))))
        assert held.startswith('<tool_call>{"name": "now"}')


async def test_bad_grammar_ends_only_its_job() -> None:
    async with running() as engine:
        bad = engine.generate(prompt(constraint=Constraint("regex", "(a")))
        assert len(ids(await read(engine.generate(prompt())))) == 8
        error = end(await read(bad)).error
        assert isinstance(error, InvalidRequest)
        assert (error.code, error.param) == ("bad_grammar", "regex")


async def test_job_whose_grammar_compiles_while_the_engine_closes_ends_with_an_error() -> None:
    async with running() as engine:
        jobs = [engine.generate(prompt(constraint=Constraint("json_object"))) for _ in range(3)]
        await engine.close()
        for job in jobs:
            assert isinstance(end(await read(job)).error, Unavailable)


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"adapters": (("law", 1.0),)}, Unsupported, "all jobs at once"),
        ({"parts": (TokenRun([1]), Media("image", "0", b"", 4))}, Unsupported, "takes no image"),
        ({"parts": ()}, InvalidRequest, "empty"),
        ({"parts": (TokenRun([N_VOCAB]),)}, InvalidRequest, f"outside 0…{N_VOCAB - 1}"),
        ({"parts": (TokenRun([-1]),)}, InvalidRequest, f"outside 0…{N_VOCAB - 1}"),
        ({"deadline": 1.0}, Timeout, "deadline"),
    ],
)
async def test_unsupported_job_is_refused(fields: dict[str, Any], kind: type[ModelyardError], message: str) -> None:
    async with running() as engine:
        error = end(await read(engine.generate(replace(prompt(), **fields)))).error
        assert isinstance(error, kind)
        assert message in error.message
        assert engine.stats().running == 0


async def test_deadline_that_passes_during_decoding_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(slow=True) as engine:
        job = engine.generate(prompt(max_tokens=400, deadline=time.monotonic() + 1e6))
        chunks = await until(job, Tokens)
        monkeypatch.setattr(model_module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 2e6))
        chunks += await read(job)
        assert isinstance(end(chunks).error, Timeout)
        assert 0 < len(ids(chunks)) < 400


async def test_job_before_open_is_refused() -> None:
    engine = make(spec(), FakeLibrary())
    assert isinstance(end(await read(engine.generate(prompt()))).error, Unavailable)
    await engine.close()


async def test_window_beyond_the_trained_length_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        async with running({"main": CacheInfo(9000)}):
            assert "was trained on 8192" in caplog.text


# --- loading and death ----------------------------------------------------------------------------------------------


def raiser(error: Exception) -> Any:
    def fail() -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "model_too_large", "exllama_cache_quant"),
        (RuntimeError("Insufficient VRAM in split for model and cache"), "model_too_large", "too little free memory"),
        (AssertionError("bad tensor"), "model_unreadable", "cannot be loaded: bad tensor"),
    ],
)
async def test_failed_load_says_why_and_leaves_the_engine_unavailable(
    error: Exception, code: str, message: str
) -> None:
    library = FakeLibrary()
    library.before_load = raiser(error)
    engine = make(spec(), library)
    with pytest.raises(InvalidRequest, match=message) as caught:
        await engine.open(lambda *_: None)
    assert caught.value.code == code
    assert isinstance(end(await read(engine.generate(prompt()))).error, Unavailable)
    await engine.close()


async def test_closing_during_a_load_aborts_it() -> None:
    library, begun, go_on = FakeLibrary(), threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert go_on.wait(60)

    library.before_load = wait
    engine = make(spec(), library)
    opening = asyncio.create_task(engine.open(lambda *_: None))
    assert await asyncio.to_thread(begun.wait, 60)
    closing = asyncio.create_task(engine.close())
    await asyncio.sleep(0)
    go_on.set()
    await closing
    with pytest.raises(Unavailable, match="closed"):
        await opening
    assert "Generator" not in library.calls


async def test_failing_step_ends_all_jobs_and_reports_the_engine_lost() -> None:
    library = FakeLibrary()
    async with running(library=library, slow=True) as engine:
        jobs = [engine.generate(prompt(text, max_tokens=400)) for text in "ab"]
        seen = [await until(job, Tokens) for job in jobs]
        library.before_step = raiser(RuntimeError("CUDA error: an illegal memory access was encountered"))
        for job, chunks in zip(jobs, seen, strict=True):
            error = end(chunks + await read(job)).error
            assert isinstance(error, Unavailable)
            assert "illegal memory access" in error.message
        assert isinstance(await asyncio.wait_for(engine.lost, 60), Unavailable)
        assert isinstance(end(await read(engine.generate(prompt()))).error, Unavailable)
        with pytest.raises(Unavailable):
            await engine.control(Control("evict"))


@pytest.mark.parametrize(
    ("fault", "kind"),
    [(ValueError("odd"), Internal), (RuntimeError("CUDA out of memory."), Unavailable)],
)
async def test_failing_job_leaves_the_others_running(fault: Exception, kind: type[ModelyardError]) -> None:
    library = FakeLibrary()
    async with running(library=library) as engine:
        library.job_error = fault
        assert isinstance(end(await read(engine.generate(prompt("a")))).error, kind)
        assert len(ids(await read(engine.generate(prompt("b"))))) == 8
        assert not engine.lost.done()


async def test_cuda_error_in_one_job_kills_the_engine() -> None:
    library = FakeLibrary()
    async with running(library=library) as engine:
        library.job_error = RuntimeError("CUDA error: device-side assert triggered")
        assert isinstance(end(await read(engine.generate(prompt("a")))).error, Unavailable)
        assert isinstance(await asyncio.wait_for(engine.lost, 60), Unavailable)


async def test_schema_holds_at_high_temperature() -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 22]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    async with running() as engine:
        for seed in range(3):
            hot = Sampling(temperature=3.0, top_p=0.99, seed=seed)
            request = prompt(constraint=Constraint("json_schema", json.dumps(schema)), sampling=hot, max_tokens=40)
            assert json.loads(text_of(await read(engine.generate(request))))["n"] in (1, 22)


# --- the plug-in ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["torch", "exllamav3", "llguidance"])
async def test_missing_package_is_named_with_install_instructions(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    present = {name: ModuleSpec(name, None) for name in ("torch", "exllamav3", "llguidance") if name != missing}
    monkeypatch.setattr(exllamav3, "find_spec", present.get)
    with pytest.raises(MissingLibrary, match=rf"'{missing}'.*pip install 'modelyard\[exllamav3\]'"):
        exllamav3.create(spec())


def test_failed_import_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "exllamav3.py").write_text("raise RuntimeError('Traceback\\nno CUDA device is visible')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "exllamav3", raising=False)
    with pytest.raises(MissingLibrary, match=r"no CUDA device is visible\. It needs an NVIDIA GPU"):
        load_library()


def test_plug_in_asks_for_its_own_process_and_has_its_tokenizer_beside_the_weights() -> None:
    assert plugins.engine("exllamav3") is exllamav3.ENGINE
    assert exllamav3.ENGINE.own_process(None)
    assert exllamav3.ENGINE.holds_weights
    options = exllamav3.Options(path=str(model_folder()))
    assert exllamav3.ENGINE.kind == "text"
    assert exllamav3.tokenizer_path(options) == model_folder()
