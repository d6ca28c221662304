"""The vLLM engine over a stand-in for the library; what all engines do is in the conformance suite."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from modelyard.core.engine import CacheInfo, Control, End, EngineSpec, Media, TokenRun, Tokens
from modelyard.core.errors import ContextOverflow, InvalidRequest, NotFound, Timeout, Unavailable, Unsupported
from modelyard.core.request import Constraint, Sampling
from modelyard.engines import vllm
from modelyard.engines.vllm.engine import VllmEngine
from modelyard.plugins import MissingLibrary
from tests.engines.reading import accepted, end, ids, read, until
from tests.engines.vllm import helpers
from tests.engines.vllm.helpers import make, prompt, running

SLOW = {"token_delay": 0.001}
PATIENCE_S = 60.0


def llm(engine: VllmEngine) -> Any:
    assert engine._core is not None
    return engine._core._llm


@asynccontextmanager
async def patient() -> AsyncIterator[None]:
    async with asyncio.timeout(PATIENCE_S):
        yield


# --- opening --------------------------------------------------------------------------------------------------------


async def test_library_that_is_not_here_is_one_sentence_with_both_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [each for each in sys.path if not each.endswith("standin")])
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(MissingLibrary, match=r"modelyard\[vllm\].*python = "):
        vllm.create(helpers.spec())


async def test_vllm_is_asked_for_what_we_rely_on() -> None:
    async with running({"main": CacheInfo(300, 2), "fast": CacheInfo(200, 1)}) as engine:
        args = llm(engine).args
        assert args.structured_outputs_config == {"backend": "guidance"}
        assert args.scheduling_policy == "priority"
        assert args.disable_log_stats is True
        assert (args.max_model_len, args.max_num_seqs) == (300, 3)


async def test_users_word_on_an_engine_argument_is_the_last() -> None:
    async with running(vllm_engine_args={"scheduling_policy": "fcfs"}) as engine:
        assert llm(engine).args.scheduling_policy == "fcfs"


async def test_environment_is_prepared_unless_it_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER", raising=False)
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    async with running():
        assert os.environ["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
        assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "fork"


async def test_load_that_fails_says_what_and_why() -> None:
    engine = make(standin={"fails": "the KV cache does not fit"})
    with pytest.raises(InvalidRequest, match="the KV cache does not fit") as caught:
        await engine.open(lambda *_: None)
    assert str(helpers.model_folder()) in caught.value.message
    await engine.close()


async def test_model_is_tried_before_it_counts_as_open() -> None:
    async with running() as engine:
        assert [len(each["prompt"]["prompt_token_ids"]) for each in llm(engine).asked] == [1]


# --- asking ---------------------------------------------------------------------------------------------------------


async def test_jobs_carry_their_priority_and_the_salt_of_their_cache() -> None:
    caches = {"main": CacheInfo(512, 2), "fast": CacheInfo(512, 2)}
    async with running(caches) as engine:
        await read(engine.generate(prompt()))
        await read(engine.generate(prompt(cache="fast", priority="background")))
        first, second = llm(engine).asked[1:]
        assert (first["priority"], second["priority"]) == (0, 1)
        assert first["prompt"]["cache_salt"] != second["prompt"]["cache_salt"]


async def test_adapter_goes_with_the_job_that_wears_it(tmp_path: Path) -> None:
    async with running(lora={"law": str(helpers.adapter(tmp_path / "law"))}) as engine:
        assert engine.info.capabilities.lora
        await read(engine.generate(prompt(adapters=(("law", 1.0),))))
        await read(engine.generate(prompt()))
        worn, bare = (each["lora"] for each in llm(engine).asked[1:])
        assert (worn.lora_path, bare) == (str(tmp_path / "law"), None)


async def test_refusal_of_vllm_is_the_clients_fault() -> None:
    async with running() as engine:
        last = end(await read(engine.generate(prompt(sampling=Sampling(temperature=3.0)))))
        assert isinstance(last.error, InvalidRequest)
        assert "temperature must be in [0, 2]" in last.error.message
        assert end(await read(engine.generate(prompt()))).error is None


async def test_grammar_that_was_asked_for_and_does_not_compile_is_refused() -> None:
    async with running() as engine:
        last = end(await read(engine.generate(prompt(constraint=Constraint("lark", "start: nonsense")))))
        assert isinstance(last.error, InvalidRequest)
        assert (last.error.code, last.error.param) == ("bad_grammar", "lark")


async def test_grammar_that_nobody_asked_for_does_not_fail_the_request() -> None:
    async with running() as engine:
        wish = Constraint("lark", "start: nonsense", trigger="<tool>", tools=("t",))
        chunks = await read(engine.generate(prompt(constraint=wish)))
        assert end(chunks).error is None
        assert ids(chunks)


async def test_token_outside_the_vocabulary_is_refused() -> None:
    async with running() as engine:
        asked = prompt(parts=(TokenRun([1 << 30]),))
        assert isinstance(end(await read(engine.generate(asked))).error, InvalidRequest)


async def test_picture_for_a_model_that_reads_text_is_refused() -> None:
    async with running() as engine:
        asked = prompt(parts=(TokenRun([1, 2]), Media("image", "ab", b"", 1)))
        assert isinstance(end(await read(engine.generate(asked))).error, Unsupported)


async def test_picture_that_outgrows_the_window_is_an_overflow() -> None:
    """What it takes of the window only vLLM knows."""
    async with running({"main": CacheInfo(512, 1)}) as engine:
        llm(engine).args.max_model_len = 4
        assert end(await read(engine.generate(prompt()))).error == ContextOverflow(prompt().n_tokens, 4)


async def test_deadline_ends_a_job_as_late() -> None:
    async with running(standin=SLOW) as engine, patient():
        asked = prompt("many words " * 20, max_tokens=400, deadline=time.time())
        assert isinstance(end(await read(engine.generate(asked))).error, Timeout)
        assert engine.stats().running == 0


async def test_cancelled_job_is_aborted_in_vllm() -> None:
    async with running(standin=SLOW) as engine, patient():
        job = engine.generate(prompt("many words " * 20, max_tokens=400))
        await until(job, Tokens)
        job.cancel()
        assert end(await read(job)).reason == "cancelled"
        assert llm(engine).aborted == ["standin-0"]


# --- answering ------------------------------------------------------------------------------------------------------


async def test_evicted_cache_finds_nothing_again() -> None:
    async with running() as engine:
        long = prompt("so many words " * 10)
        for _ in range(2):
            chunks = await read(engine.generate(long))
        assert accepted(chunks).cached_tokens > 0
        await engine.control(Control("evict", "main"))
        assert accepted(await read(engine.generate(long))).cached_tokens == 0
        stats = engine.stats().caches["main"]
        assert (stats.reused_tokens > 0, stats.evaluated_tokens > stats.reused_tokens) == (True, True)


async def test_what_vllm_cannot_do_is_refused() -> None:
    async with running() as engine:
        with pytest.raises(InvalidRequest, match="save"):
            await engine.control(Control("save", argument="x"))
        with pytest.raises(NotFound, match="huge"):
            await engine.control(Control("evict", "huge"))


async def test_guesses_are_counted_where_the_model_speculates() -> None:
    options = {"vllm_speculative_method": "ngram", "vllm_num_speculative_tokens": 3}
    async with running(**options) as engine:
        assert llm(engine).args.speculative_config == {"method": "ngram", "num_speculative_tokens": 3}
        await read(engine.generate(prompt()))
        stats = engine.stats()
        assert stats.guessed_tokens > stats.accepted_tokens > 0


# --- dying ----------------------------------------------------------------------------------------------------------


async def test_death_of_its_process_ends_jobs_with_the_reason_and_is_told_first() -> None:
    async with running(standin=SLOW | {"spawns": True}) as engine, patient():
        job = engine.generate(prompt("many words " * 40, max_tokens=400))
        seen = await until(job, Tokens)
        assert engine._core is not None
        os.kill(engine._core._children[0].pid, signal.SIGKILL)
        told = await asyncio.shield(engine.lost)
        last = end(seen + await read(job))
        assert isinstance(told, Unavailable)
        assert told.message == "vLLM's engine process was killed by SIGKILL"
        assert last.error == told
        assert end(await read(engine.generate(prompt()))).error == told


async def test_death_of_an_idle_engine_is_told() -> None:
    async with running(standin={"spawns": True}) as engine, patient():
        assert engine._core is not None
        os.kill(engine._core._children[0].pid, signal.SIGKILL)
        assert isinstance(await asyncio.shield(engine.lost), Unavailable)


async def test_close_ends_processes_that_vllm_leaves_behind() -> None:
    async with running(standin={"spawns": True, "lingers": True}) as engine:
        assert engine._core is not None
        reaper, (child,) = engine._core._reaper, engine._core._children
        assert reaper.pids == [child.pid]
    await asyncio.to_thread(child.join, PATIENCE_S)
    assert child.exitcode == -signal.SIGKILL


async def test_closing_is_no_death() -> None:
    async with running(standin={"spawns": True}) as engine:
        pass
    assert not engine.lost.done()


# --- another environment --------------------------------------------------------------------------------------------


def test_it_gets_a_process_of_its_own_unless_told_otherwise() -> None:
    assert vllm.OWN_PROCESS


async def test_capabilities_follow_the_definition() -> None:
    spec: EngineSpec = helpers.spec(modalities=("text", "image"))
    helpers.use_fake_library()
    engine = vllm.create(spec)
    assert engine.info.capabilities.modalities == ("text", "image")
    assert not engine.info.capabilities.lora
    await engine.close()
    (last,) = await read(engine.generate(prompt()))  # type: ignore[union-attr]
    assert isinstance(last, End)
