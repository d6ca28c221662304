"""The vLLM engine on the fake library; what all engines do is in the conformance suite."""

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

import modelyard_vllm as vllm
from modelyard.core.engine import CacheInfo, Control, End, EngineSpec, Media, TokenRun, Tokens
from modelyard.core.errors import ContextOverflow, InvalidRequest, NotFound, Timeout, Unavailable, Unsupported
from modelyard.core.request import Constraint, Sampling
from modelyard.plugins import MissingLibrary
from modelyard_vllm.engine import VllmEngine
from tests.engines.reading import accepted, end, ids, read, until
from tests.engines.vllm import helpers
from tests.engines.vllm.helpers import FAKE_LIBRARY, make, prompt, running

SLOW = {"token_delay": 0.001}
PATIENCE_S = 60.0


def llm(engine: VllmEngine) -> Any:
    assert engine._runner is not None
    return engine._runner._llm


@asynccontextmanager
async def patient() -> AsyncIterator[None]:
    async with asyncio.timeout(PATIENCE_S):
        yield


# --- opening --------------------------------------------------------------------------------------------------------


async def test_missing_library_names_both_ways_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each != str(FAKE_LIBRARY)])
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(MissingLibrary, match=r"modelyard\[vllm\].*python = "):
        vllm.create(helpers.spec())


async def test_engine_arguments_include_what_the_engine_relies_on() -> None:
    async with running({"main": CacheInfo(300, 2), "fast": CacheInfo(200, 1)}) as engine:
        args = llm(engine).args
        assert args.structured_outputs_config == {"backend": "guidance"}
        assert args.scheduling_policy == "priority"
        assert args.disable_log_stats is True
        assert (args.max_model_len, args.max_num_seqs) == (300, 3)


async def test_vllm_engine_args_take_precedence() -> None:
    async with running(vllm_engine_args={"scheduling_policy": "fcfs"}) as engine:
        assert llm(engine).args.scheduling_policy == "fcfs"


async def test_environment_defaults_do_not_override_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER", raising=False)
    monkeypatch.delenv("VLLM_NO_USAGE_STATS", raising=False)
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    async with running():
        assert os.environ["VLLM_NO_USAGE_STATS"] == "1"
        assert "VLLM_USE_FLASHINFER_SAMPLER" not in os.environ, "vLLM decides"
        assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "fork"


async def test_failed_load_names_the_model_and_the_reason() -> None:
    engine = make(behaviour={"fails": "the KV cache does not fit"})
    with pytest.raises(InvalidRequest, match="the KV cache does not fit") as caught:
        await engine.open(lambda *_: None)
    assert str(helpers.model_folder()) in caught.value.message
    await engine.close()


async def test_open_generates_a_first_token() -> None:
    async with running() as engine:
        assert [len(each["prompt"]["prompt_token_ids"]) for each in llm(engine).requests] == [1]


# --- requests -------------------------------------------------------------------------------------------------------


async def test_requests_have_their_priority_and_the_salt_of_their_cache() -> None:
    caches = {"main": CacheInfo(512, 2), "fast": CacheInfo(512, 2)}
    async with running(caches) as engine:
        await read(engine.generate(prompt()))
        await read(engine.generate(prompt(cache="fast", priority="background")))
        first, second = llm(engine).requests[1:]
        assert (first["priority"], second["priority"]) == (0, 1)
        assert first["prompt"]["cache_salt"] != second["prompt"]["cache_salt"]


async def test_adapter_is_sent_with_its_request_only(tmp_path: Path) -> None:
    async with running(lora={"law": str(helpers.adapter(tmp_path / "law"))}) as engine:
        assert engine.info.capabilities.lora
        await read(engine.generate(prompt(adapters=(("law", 1.0),))))
        await read(engine.generate(prompt()))
        with_adapter, without = (each["lora"] for each in llm(engine).requests[1:])
        assert (with_adapter.lora_path, without) == (str(tmp_path / "law"), None)


async def test_refusal_by_vllm_is_an_invalid_request() -> None:
    async with running() as engine:
        last = end(await read(engine.generate(prompt(sampling=Sampling(temperature=3.0)))))
        assert isinstance(last.error, InvalidRequest)
        assert "temperature must be in [0, 2]" in last.error.message
        assert end(await read(engine.generate(prompt()))).error is None


async def test_bad_grammar_of_the_client_is_refused() -> None:
    async with running() as engine:
        last = end(await read(engine.generate(prompt(constraint=Constraint("lark", "start: nonsense")))))
        assert isinstance(last.error, InvalidRequest)
        assert (last.error.code, last.error.param) == ("bad_grammar", "lark")


async def test_bad_grammar_of_a_triggered_tool_call_is_dropped() -> None:
    async with running() as engine:
        triggered = Constraint("lark", "start: nonsense", trigger="<tool>", tools=("t",))
        chunks = await read(engine.generate(prompt(constraint=triggered)))
        assert end(chunks).error is None
        assert ids(chunks)


async def test_token_outside_the_vocabulary_is_refused() -> None:
    async with running() as engine:
        request = prompt(parts=(TokenRun([1 << 30]),))
        assert isinstance(end(await read(engine.generate(request))).error, InvalidRequest)


async def test_image_for_a_text_model_is_refused() -> None:
    async with running() as engine:
        request = prompt(parts=(TokenRun([1, 2]), Media("image", "ab", b"", 1)))
        assert isinstance(end(await read(engine.generate(request))).error, Unsupported)


async def test_prompt_longer_than_vllms_window_is_an_overflow() -> None:
    """Only vLLM knows how many tokens an image has."""
    async with running({"main": CacheInfo(512, 1)}) as engine:
        llm(engine).args.max_model_len = 4
        assert end(await read(engine.generate(prompt()))).error == ContextOverflow(prompt().n_tokens, 4)


async def test_deadline_ends_a_job_with_a_timeout() -> None:
    async with running(behaviour=SLOW) as engine, patient():
        request = prompt("many words " * 20, max_tokens=400, deadline=time.monotonic())
        assert isinstance(end(await read(engine.generate(request))).error, Timeout)
        assert engine.stats().running == 0


async def test_cancelled_job_is_aborted_in_vllm() -> None:
    async with running(behaviour=SLOW) as engine, patient():
        job = engine.generate(prompt("many words " * 20, max_tokens=400))
        await until(job, Tokens)
        job.cancel()
        assert end(await read(job)).reason == "cancelled"
        assert llm(engine).aborted == ["fake-0"]


# --- caches and counters ---------------------------------------------------------------------------------------------


async def test_evicted_cache_reuses_nothing() -> None:
    async with running() as engine:
        long = prompt("so many words " * 10)
        for _ in range(2):
            chunks = await read(engine.generate(long))
        assert accepted(chunks).cached_tokens > 0
        await engine.control(Control("evict", "main"))
        assert accepted(await read(engine.generate(long))).cached_tokens == 0
        stats = engine.stats().caches["main"]
        assert (stats.reused_tokens > 0, stats.evaluated_tokens > stats.reused_tokens) == (True, True)


async def test_unsupported_control_is_refused() -> None:
    async with running() as engine:
        with pytest.raises(InvalidRequest, match="save"):
            await engine.control(Control("save", argument="x"))
        with pytest.raises(NotFound, match="huge"):
            await engine.control(Control("evict", "huge"))


async def test_speculated_tokens_are_counted() -> None:
    options = {"vllm_speculative_method": "ngram", "vllm_num_speculative_tokens": 3}
    async with running(**options) as engine:
        assert llm(engine).args.speculative_config == {"method": "ngram", "num_speculative_tokens": 3}
        await read(engine.generate(prompt()))
        stats = engine.stats()
        assert stats.guessed_tokens > stats.accepted_tokens > 0


# --- death ----------------------------------------------------------------------------------------------------------


async def test_death_of_vllms_process_is_reported_and_ends_jobs_with_the_reason() -> None:
    async with running(behaviour=SLOW | {"spawns": True}) as engine, patient():
        job = engine.generate(prompt("many words " * 40, max_tokens=400))
        seen = await until(job, Tokens)
        assert engine._runner is not None
        os.kill(engine._runner._children[0].pid, signal.SIGKILL)
        lost = await asyncio.shield(engine.lost)
        last = end(seen + await read(job))
        assert isinstance(lost, Unavailable)
        assert lost.message == "vLLM's engine process was killed by SIGKILL"
        assert last.error == lost
        assert end(await read(engine.generate(prompt()))).error == lost


async def test_death_of_an_idle_engine_is_reported() -> None:
    async with running(behaviour={"spawns": True}) as engine, patient():
        assert engine._runner is not None
        os.kill(engine._runner._children[0].pid, signal.SIGKILL)
        assert isinstance(await asyncio.shield(engine.lost), Unavailable)


async def test_close_kills_processes_that_vllm_leaves_behind() -> None:
    async with running(behaviour={"spawns": True, "lingers": True}) as engine:
        assert engine._runner is not None
        reaper, (child,) = engine._runner._reaper, engine._runner._children
        assert reaper.pids == [child.pid]
    await asyncio.to_thread(child.join, PATIENCE_S)
    assert child.exitcode == -signal.SIGKILL


async def test_the_sockets_of_vllms_processes_are_removed_with_the_engine() -> None:
    async with running() as engine:
        assert engine._runner is not None
        assert engine._runner._sockets is not None
        folder = engine._runner._sockets.name
        assert await asyncio.to_thread(os.listdir, folder) == ["socket"]
        assert "VLLM_RPC_BASE_PATH" not in os.environ
    assert not await asyncio.to_thread(os.path.exists, folder)


async def test_close_is_not_reported_as_death() -> None:
    async with running(behaviour={"spawns": True}) as engine:
        pass
    assert not engine.lost.done()


# --- the plug-in ----------------------------------------------------------------------------------------------------


def test_plug_in_asks_for_its_own_process() -> None:
    assert vllm.ENGINE.own_process(None)


async def test_capabilities_follow_the_models_modalities() -> None:
    spec: EngineSpec = helpers.spec(modalities=("text", "image"))
    helpers.use_fake_library()
    engine = vllm.create(spec)
    assert engine.info.capabilities.modalities == ("text", "image")
    assert not engine.info.capabilities.lora
    await engine.close()
    (last,) = await read(engine.generate(prompt()))  # type: ignore[union-attr]
    assert isinstance(last, End)
