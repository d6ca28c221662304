"""The ExLlamaV3 engine on the stand-in: its calls, chunks, pages, faults and death."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from modelyard.core.engine import CacheInfo, Control, Media, Progress, TokenRun, Tokens
from modelyard.core.errors import Internal, InvalidRequest, ModelyardError, Timeout, Unavailable, Unsupported
from modelyard.core.request import Constraint, Sampling
from modelyard.engines import token_dispatch
from modelyard.engines.exllamav3 import model as lane_module
from modelyard.engines.token_dispatch import TokenDispatch
from tests.engines.exllamav3.stage import make, prompt, running, said, spec, vocabulary
from tests.engines.exllamav3.standin import StandIn
from tests.engines.reading import accepted, end, ids, logprobs, read, until

TWO = {"main": CacheInfo(2048, 2), "fast": CacheInfo(512, 4)}
LONG = "word " * 700


def runs(text: str) -> str:
    return f"<|im_start|>{text}"


# --- the calls ------------------------------------------------------------------------------------------------------


async def test_every_cache_has_pages_and_a_generator_of_its_own() -> None:
    stand_in = StandIn()
    async with running(TWO, stand_in, exllama_cache_quant="8,4", exllama_warmup=True):
        assert stand_in.calls["Cache"] == [
            {"max_num_tokens": 2 * 2304, "max_batch_size": 2, "layer_type": "quant", "k_bits": 8, "v_bits": 4},
            {"max_num_tokens": 4 * 768, "max_batch_size": 4, "layer_type": "quant", "k_bits": 8, "v_bits": 4},
        ]
        assert stand_in.calls["load"] == [{"use_per_device": None, "max_chunk_size": 2048, "max_batch_size": 4}]
        made = [{name: call[name] for name in ("max_batch_size", "max_q_size")} for call in stand_in.calls["Generator"]]
        assert made == [{"max_batch_size": 2, "max_q_size": 8}, {"max_batch_size": 4, "max_q_size": 8}]


async def test_job_is_made_of_token_ids_and_knows_its_own_end() -> None:
    stand_in = StandIn()
    async with running(stand_in=stand_in) as engine:
        asked = prompt(stop_ids=(2,), sampling=Sampling(seed=7, dry_multiplier=0.8, dry_sequence_breakers=("ab",)))
        await read(engine.generate(asked))
        (called,) = stand_in.calls["Job"]
        assert called["input_ids"].tolist() == [asked.ids]
        assert (called["max_new_tokens"], called["stop_conditions"], called["seed"]) == (8, [2], 7)
        dry = called["sampler"].steps[0]
        assert (dry.name, dry.called["dry_sequence_breakers"]) == ("SS_DRY", {2})


async def test_engine_wakes_the_loop_once_a_step_for_all_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in, parcels = StandIn(), []
    hand_out = token_dispatch.hand_out

    def counted(told: Any) -> None:
        parcels.append(told)
        hand_out(told)

    monkeypatch.setattr(token_dispatch, "hand_out", counted)
    async with running({"main": CacheInfo(512, 4)}, stand_in, slow=True) as engine:
        jobs = [engine.generate(prompt(text, max_tokens=20)) for text in "abcd"]
        for job in jobs:
            assert len(ids(await read(job))) == 20
        assert len(parcels) <= stand_in.steps < 4 * 20


def deliveries(monkeypatch: pytest.MonkeyPatch, stand_in: StandIn) -> list[tuple[int, str, int]]:
    """Of tokens: in which step, at its wait or its end, and how many."""
    told: list[tuple[int, str, int]] = []
    flush, before_gpu_wait = TokenDispatch.flush, TokenDispatch.before_gpu_wait
    when = ["end"]

    def delivered(dispatch: TokenDispatch) -> None:
        said = [chunk for _, chunks, _ in dispatch._parcels for chunk in chunks if isinstance(chunk, Tokens)]
        if said:
            told.append((stand_in.steps, when[-1], sum(len(chunk.ids) for chunk in said)))
        flush(dispatch)

    def waits(dispatch: TokenDispatch) -> None:
        when.append("wait")
        before_gpu_wait(dispatch)
        when.pop()

    monkeypatch.setattr(TokenDispatch, "flush", delivered)
    monkeypatch.setattr(TokenDispatch, "before_gpu_wait", waits)
    return told


async def test_a_token_is_handed_over_while_the_next_step_computes_and_the_first_and_last_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in = StandIn()
    told = deliveries(monkeypatch, stand_in)
    async with running(stand_in=stand_in) as engine:
        await read(engine.generate(prompt(runs("a b c d e f"), max_tokens=6)))
    assert told == [(1, "end", 1), (3, "wait", 1), (4, "wait", 1), (5, "wait", 1), (6, "wait", 1), (6, "end", 1)]


async def test_tokens_of_all_jobs_are_handed_over_when_the_last_of_them_is_sampled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in = StandIn()
    told = deliveries(monkeypatch, stand_in)
    begin = threading.Event()

    def when_all_are_there() -> None:
        assert begin.wait(60)

    stand_in.before_step = when_all_are_there
    async with running(stand_in=stand_in) as engine:
        first = engine.generate(prompt(runs("a b c d e f"), max_tokens=5))
        others = [engine.generate(prompt(runs(f"{text} b c d e f"), max_tokens=5)) for text in "gh"]
        begin.set()
        for job in (first, *others):
            await read(job)
    waits = [(step, count) for step, when, count in told if when == "wait"]
    assert len(waits) == len({step for step, _ in waits})
    assert max(count for _, count in waits) == 3
    assert sum(count for _, _, count in told) == 15


async def test_no_token_lies_while_somebody_elses_prompt_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in, reading, put = StandIn(), set(), TokenDispatch.put

    def noted(dispatch: TokenDispatch, to: Any, chunks: Any, *rest: Any, **named: Any) -> None:
        if isinstance(chunks[0], Progress):
            reading.add(stand_in.steps)
        put(dispatch, to, chunks, *rest, **named)

    monkeypatch.setattr(TokenDispatch, "put", noted)
    told = deliveries(monkeypatch, stand_in)
    async with running(TWO, stand_in, exllama_max_chunk_size=256, slow=True) as engine:
        speaks = engine.generate(prompt(runs("a b c d e f"), max_tokens=1000))
        await until(speaks, Tokens)
        reading.clear()
        await read(engine.generate(prompt(LONG, max_tokens=1)))
        speaks.cancel()
        await read(speaks)
    assert len(reading) > 2
    assert {(step, "end", 1) for step in sorted(reading)[:-1]} <= set(told)
    assert not any(when == "wait" for step, when, _ in told if step in reading)


# --- reading --------------------------------------------------------------------------------------------------------


async def test_long_prompt_is_read_in_chunks_and_tells_how_far_it_is() -> None:
    async with running(TWO, exllama_max_chunk_size=256) as engine:
        asked = prompt(LONG)
        chunks = await read(engine.generate(asked))
        accepted(chunks)
        told = [chunk for chunk in chunks if isinstance(chunk, Progress)]
        assert [one.done for one in told] == [256, 512, asked.n_tokens - 1]
        assert {one.total for one in told} == {asked.n_tokens}


async def test_job_cancelled_between_two_chunks_is_read_no_further() -> None:
    async with running(TWO, exllama_max_chunk_size=256, slow=True) as engine:
        job = engine.generate(asked := prompt(LONG, max_tokens=100))
        chunks = await until(job, Progress)
        job.cancel()
        chunks += await read(job)
        assert end(chunks).reason == "cancelled"
        assert ids(chunks) == []
        assert max(one.done for one in chunks if isinstance(one, Progress)) < asked.n_tokens - 1
        assert engine.stats().running == 0


async def test_begun_conversation_is_found_again_by_whole_pages_and_by_a_part_of_one() -> None:
    async with running(TWO) as engine:
        first = await read(engine.generate(asked := prompt(LONG)))
        longer = replace(asked, parts=(TokenRun([*asked.ids, *ids(first), 30, 31]),))
        again = await read(engine.generate(longer))
        assert accepted(again).cached_tokens == end(again).usage.cached == asked.n_tokens + len(ids(first)) - 1
        assert accepted(again).divergence == accepted(again).cached_tokens
        stats = engine.stats()
        assert stats.reused_tokens == stats.caches["main"].reused_tokens == accepted(again).cached_tokens
        assert stats.evaluated_tokens == asked.n_tokens + 3
        assert stats.occupied_tokens > asked.n_tokens


async def test_evicting_spares_the_pages_of_a_running_job() -> None:
    async with running(TWO, slow=True) as engine:
        job = engine.generate(prompt(LONG, max_tokens=60))
        chunks = await until(job, Tokens)
        await engine.control(Control("evict", "main"))
        chunks += await read(job)
        assert len(ids(chunks)) == 60
        assert engine.stats().occupied_tokens > 0
        await engine.control(Control("evict", "main"))
        assert engine.stats().occupied_tokens == 0


async def test_control_that_exllama_does_not_know_is_refused() -> None:
    async with running() as engine:
        with pytest.raises(InvalidRequest, match="save is not a thing"):
            await engine.control(Control("save"))


# --- speaking -------------------------------------------------------------------------------------------------------


async def test_tokens_held_back_for_a_character_are_said_before_a_stop() -> None:
    party = vocabulary().encode("🎉")
    assert len(party) > 2
    shown = runs("🎉🎉🎉")
    async with running() as engine:
        chunks = await read(engine.generate(prompt(shown, max_tokens=20, stop_ids=(party[-1],))))
        assert ids(chunks) == party[:-1]
        assert end(chunks).reason == "stop"
        assert end(chunks).usage.output == len(party) - 1


async def test_logprobs_stay_with_their_tokens_where_some_are_held_back() -> None:
    async with running() as engine:
        chunks = await read(engine.generate(prompt(runs("🎉🎉🎉"), max_tokens=9, logprobs=3)))
        assert [one.id for one in logprobs(chunks)] == ids(chunks)
        assert all(len(one.top) == 3 and one.top[0] == (one.id, one.logprob) for one in logprobs(chunks))


async def test_logprobs_of_the_chosen_tokens_alone_have_no_others_beside_them() -> None:
    async with running() as engine:
        found = logprobs(await read(engine.generate(prompt(logprobs=0))))
        assert len(found) == 8
        assert all(one.top == () and one.logprob <= 0 for one in found)


async def test_answer_that_gives_its_pages_back_in_between_is_the_same_answer() -> None:
    async with running(TWO) as whole, running(TWO, exllama_max_rq_tokens=16) as parted:
        expected = await read(whole.generate(prompt(max_tokens=100)))
        chunks = await read(parted.generate(prompt(max_tokens=100)))
        accepted(chunks)
        assert ids(chunks) == ids(expected)
        assert len([one for one in chunks if isinstance(one, Progress)]) == 1
        assert end(chunks).usage.cached == 0


async def test_jobs_wait_for_pages_where_the_budget_is_small() -> None:
    async with running({"main": CacheInfo(767, 4)}, exllama_cache_size=1024) as engine:
        jobs = [engine.generate(prompt(f"{n} {text}", max_tokens=300)) for n, text in enumerate("abcd")]
        for job in jobs:
            assert len(ids(await read(job))) == 300


async def test_same_seed_says_the_same_and_another_something_else() -> None:
    async with running() as engine:
        hot = [Sampling(temperature=2.0, seed=seed) for seed in (1, 1, 2)]
        one, same, other = [ids(await read(engine.generate(prompt(sampling=each)))) for each in hot]
        assert one == same != other


async def test_times_of_the_library_are_told() -> None:
    async with running() as engine:
        times = end(await read(engine.generate(prompt()))).timings
        assert (times.prefill, times.decode) == (0.25, 0.5)
        assert times.first_token is not None


# --- constraints ----------------------------------------------------------------------------------------------------


async def test_answer_fits_its_grammar_and_may_end_with_the_models_own_end() -> None:
    async with running() as engine:
        date = await read(engine.generate(prompt(constraint=Constraint("regex", "[0-9]{4}-[0-9]{2}"), max_tokens=40)))
        assert end(date).reason == "stop"
        assert len(said(date)) == 7
        open_ended = prompt(
            constraint=Constraint("regex", "a*"), max_tokens=40, sampling=Sampling(temperature=9, seed=1)
        )
        chunks = await read(engine.generate(open_ended))
        assert set(said(chunks)) <= {"a"}
        assert 2 not in ids(chunks)


async def test_call_is_bound_after_its_marker_only() -> None:
    bound = Constraint("regex", r'\{"name": "now"\}', trigger="<tool_call>")
    shown = runs("x<tool_call>nonsense\nx")
    async with running() as engine:
        free = said(await read(engine.generate(prompt(shown, max_tokens=6))))
        assert free.startswith("<tool_call>nonsense")
        held = said(await read(engine.generate(prompt(shown, max_tokens=30, constraint=bound))))
        assert held.startswith('<tool_call>{"name": "now"}')


async def test_grammar_that_cannot_be_compiled_ends_its_own_job_only() -> None:
    async with running() as engine:
        bad = engine.generate(prompt(constraint=Constraint("regex", "(a")))
        assert len(ids(await read(engine.generate(prompt())))) == 8
        error = end(await read(bad)).error
        assert isinstance(error, InvalidRequest)
        assert (error.code, error.param) == ("bad_grammar", "regex")


async def test_job_whose_grammar_is_compiled_while_the_engine_closes_hears_of_it() -> None:
    async with running() as engine:
        jobs = [engine.generate(prompt(constraint=Constraint("json_object"))) for _ in range(3)]
        await engine.close()
        for job in jobs:
            assert isinstance(end(await read(job)).error, Unavailable)


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"adapters": (("law", 1.0),)}, Unsupported, "all jobs at once"),
        ({"parts": (TokenRun([1]), Media("image", "0", b"", 4))}, Unsupported, "text only"),
        ({"parts": ()}, InvalidRequest, "empty"),
        ({"parts": (TokenRun([4096]),)}, InvalidRequest, "outside 0…4095"),
        ({"parts": (TokenRun([-1]),)}, InvalidRequest, "outside 0…4095"),
        ({"deadline": 1.0}, Timeout, "deadline"),
    ],
)
async def test_job_that_cannot_be_done_is_refused(
    fields: dict[str, Any], kind: type[ModelyardError], words: str
) -> None:
    async with running() as engine:
        error = end(await read(engine.generate(replace(prompt(), **fields)))).error
        assert isinstance(error, kind)
        assert words in error.message
        assert engine.stats().running == 0


async def test_deadline_that_passes_while_it_speaks_ends_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(slow=True) as engine:
        job = engine.generate(prompt(max_tokens=400, deadline=time.time() + 1e6))
        chunks = await until(job, Tokens)
        monkeypatch.setattr(lane_module, "time", SimpleNamespace(time=lambda: time.time() + 2e6))
        chunks += await read(job)
        assert isinstance(end(chunks).error, Timeout)
        assert 0 < len(ids(chunks)) < 400


async def test_job_before_opening_is_refused() -> None:
    engine = make(spec(), StandIn())
    assert isinstance(end(await read(engine.generate(prompt()))).error, Unavailable)
    await engine.close()


async def test_window_beyond_the_training_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        async with running({"main": CacheInfo(9000)}):
            assert "was trained on 8192" in caplog.text


# --- loading and dying ----------------------------------------------------------------------------------------------


def raiser(error: Exception) -> Any:
    def fail() -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "model_too_large", "exllama_cache_quant"),
        (RuntimeError("Insufficient VRAM in split for model and cache"), "model_too_large", "too little free memory"),
        (AssertionError("bad tensor"), "model_unreadable", "cannot be loaded: bad tensor"),
    ],
)
async def test_load_that_fails_says_why_and_leaves_nothing(error: Exception, code: str, words: str) -> None:
    stand_in = StandIn()
    stand_in.before_load = raiser(error)
    engine = make(spec(), stand_in)
    with pytest.raises(InvalidRequest, match=words) as caught:
        await engine.open(lambda *_: None)
    assert caught.value.code == code
    assert isinstance(end(await read(engine.generate(prompt()))).error, Unavailable)
    await engine.close()


async def test_load_that_nobody_waits_for_any_more_is_broken_off() -> None:
    stand_in, begun, go_on = StandIn(), threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert go_on.wait(60)

    stand_in.before_load = wait
    engine = make(spec(), stand_in)
    opening = asyncio.create_task(engine.open(lambda *_: None))
    assert await asyncio.to_thread(begun.wait, 60)
    closing = asyncio.create_task(engine.close())
    await asyncio.sleep(0)
    go_on.set()
    await closing
    with pytest.raises(Unavailable, match="closed"):
        await opening
    assert "Generator" not in stand_in.calls


async def test_step_that_raises_ends_all_jobs_and_reports_the_loss() -> None:
    stand_in = StandIn()
    async with running(stand_in=stand_in, slow=True) as engine:
        jobs = [engine.generate(prompt(text, max_tokens=400)) for text in "ab"]
        seen = [await until(job, Tokens) for job in jobs]
        stand_in.before_step = raiser(RuntimeError("CUDA error: an illegal memory access was encountered"))
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
async def test_job_that_fails_alone_leaves_the_others(fault: Exception, kind: type[ModelyardError]) -> None:
    stand_in = StandIn()
    async with running(stand_in=stand_in) as engine:
        stand_in.fault = fault
        assert isinstance(end(await read(engine.generate(prompt("a")))).error, kind)
        assert len(ids(await read(engine.generate(prompt("b"))))) == 8
        assert not engine.lost.done()


async def test_fault_of_the_gpu_in_one_job_is_the_engines_end() -> None:
    stand_in = StandIn()
    async with running(stand_in=stand_in) as engine:
        stand_in.fault = RuntimeError("CUDA error: device-side assert triggered")
        assert isinstance(end(await read(engine.generate(prompt("a")))).error, Unavailable)
        assert isinstance(await asyncio.wait_for(engine.lost, 60), Unavailable)


async def test_schema_holds_under_a_hot_sampler() -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 22]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    async with running() as engine:
        for seed in range(3):
            hot = Sampling(temperature=3.0, top_p=0.99, seed=seed)
            asked = prompt(constraint=Constraint("json_schema", json.dumps(schema)), sampling=hot, max_tokens=40)
            assert json.loads(said(await read(engine.generate(asked))))["n"] in (1, 22)
