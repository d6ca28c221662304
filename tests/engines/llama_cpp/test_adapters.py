"""LoRA adapters on an unquantized model: each job runs as if it were alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelyard.core.engine import CacheInfo, Chunk, Control, Tokens
from modelyard.core.errors import Conflict, InvalidRequest, NotFound
from modelyard.engines.llama_cpp import Options
from modelyard.engines.llama_cpp.batch import next_in_turn
from modelyard.engines.llama_cpp.engine import LlamaCppEngine
from tests.engines.llama_cpp.exact_models import exact_model
from tests.engines.llama_cpp.helpers import id_prompt, running
from tests.engines.llama_cpp.lora_files import write_lora
from tests.engines.reading import accepted, assert_alike, end, ids, logprobs, read, until

TALK = [(7 * n) % 250 + 1 for n in range(40)]
NONE, LAW, POET = (), (("law", 1.0),), (("poet", 1.0),)
SETS = [NONE, LAW, POET, (("law", 0.5), ("poet", 1.0))]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    names = enumerate(("law", "poet"))
    return {
        name: str(write_lora(tmp_path / f"{name}.gguf", width=64, layers=2, seed=seed, strength=0.3))
        for seed, name in names
    }


@asynccontextmanager
async def opened(lora: Any, caches: dict[str, CacheInfo] | None = None) -> AsyncIterator[LlamaCppEngine]:
    async with running(caches, path=str(exact_model()), lora=lora) as engine:
        yield engine


async def generate(engine: LlamaCppEngine, adapters: Any = NONE, **fields: Any) -> list[Chunk]:
    return await read(engine.generate(id_prompt(TALK, adapters=adapters, **fields)))


def differ(one: list[Chunk], other: list[Chunk]) -> bool:
    return abs(logprobs(one)[0].logprob - logprobs(other)[0].logprob) > 0.05 or ids(one) != ids(other)


async def test_an_adapter_changes_only_the_answers_that_use_it(files: dict[str, str]) -> None:
    async with opened({}) as engine:
        plain = await generate(engine)
    async with opened(files) as engine:
        assert engine.info.capabilities.lora
        before = await generate(engine)
        law, poet = await generate(engine, LAW), await generate(engine, POET)
        after = await generate(engine)
    assert_alike(before, plain)
    assert_alike(after, plain)
    assert differ(law, plain)
    assert differ(poet, plain)
    assert differ(law, poet)


async def test_concurrent_jobs_with_different_adapters_run_as_alone(files: dict[str, str]) -> None:
    alone = []
    for adapters in SETS:
        async with opened(files) as engine:
            alone.append(await generate(engine, adapters, max_tokens=12))
    async with opened(files) as engine:
        jobs = [engine.generate(id_prompt(TALK, adapters=adapters, max_tokens=12)) for adapters in SETS]
        together = [await read(job) for job in jobs]
    for one, other in zip(alone, together, strict=True):
        assert_alike(one, other)
    assert all(differ(together[0], other) for other in together[1:])


async def test_kv_is_never_reused_with_another_adapter(files: dict[str, str]) -> None:
    async with opened(files, {"main": CacheInfo(512, 1)}) as engine:
        assert accepted(await generate(engine, LAW, session="a")).cached_tokens == 0
        assert accepted(await generate(engine, NONE, session="a")).cached_tokens == 0
        assert accepted(await generate(engine, NONE, session="a")).cached_tokens == len(TALK) - 1
        assert accepted(await generate(engine, (("law", 0.5),), session="a")).cached_tokens == 0


async def test_the_scale_is_the_product_of_the_requests_and_the_adapters(files: dict[str, str]) -> None:
    async with opened(files) as engine:
        half, nothing = await generate(engine, (("law", 0.5),)), await generate(engine, (("law", 0.0),))
        plain = await generate(engine)
    async with opened({"law": {"path": files["law"], "scale": 0.5}}) as engine:
        own = await generate(engine, LAW)
    assert_alike(own, half)
    assert_alike(nothing, plain)
    assert differ(half, plain)


# --- by their names ---------------------------------------------------------------------------------------------------


async def test_an_unknown_adapter_is_refused_with_the_known_names(files: dict[str, str]) -> None:
    async with opened(files) as engine:
        error = end(await generate(engine, (("judge", 1.0),))).error
        assert end(await generate(engine)).reason == "length"
    assert isinstance(error, InvalidRequest)
    assert error.message == "unknown adapter 'judge'; use one of 'law', 'poet'"
    assert error.param == "lora_adapter"


async def test_a_model_without_adapters_refuses_them() -> None:
    async with opened({}) as engine:
        error = end(await generate(engine, LAW)).error
    assert error is not None
    assert error.message == "unknown adapter 'law'; this model has none"


async def test_adapters_are_loaded_and_unloaded_while_the_engine_runs(files: dict[str, str]) -> None:
    async with opened({}) as engine:
        await engine.control(Control("load_adapter", argument=f"x={files['law']}"))
        law = await generate(engine, (("x", 1.0),), session="a")
        with pytest.raises(Conflict, match="already"):
            await engine.control(Control("load_adapter", argument=f"x={files['poet']}"))
        await engine.control(Control("unload_adapter", argument="x"))
        assert end(await generate(engine, (("x", 1.0),))).error is not None
        await engine.control(Control("load_adapter", argument=f"x={files['poet']}"))
        poet = await generate(engine, (("x", 1.0),), session="a")
    assert accepted(poet).cached_tokens == 0  # the same name, but another file
    assert differ(law, poet)


async def test_an_adapter_in_use_is_not_unloaded(files: dict[str, str]) -> None:
    async with opened(files) as engine:
        job = engine.generate(id_prompt(TALK, adapters=LAW, max_tokens=400))
        await until(job, Tokens)
        with pytest.raises(Conflict, match="in use"):
            await engine.control(Control("unload_adapter", argument="law"))
        job.cancel()
        await read(job)
        await engine.control(Control("unload_adapter", argument="law"))
        assert end(await generate(engine)).reason == "length"


@pytest.mark.parametrize("argument", [None, "", "law", "=x.gguf", "law="])
async def test_an_argument_without_name_or_path_is_refused(argument: str | None) -> None:
    async with opened({}) as engine:
        with pytest.raises(InvalidRequest, match="name=path"):
            await engine.control(Control("load_adapter", argument=argument))


async def test_an_invalid_adapter_file_is_refused_with_the_reason(tmp_path: Path) -> None:
    wide = write_lora(tmp_path / "wide.gguf", width=128, layers=2, seed=1)
    (tmp_path / "bad.gguf").write_bytes(b"not a file of weights")
    async with opened({}) as engine:
        for file in (wide, tmp_path / "bad.gguf"):
            with pytest.raises(InvalidRequest, match=f"'x' in {file} cannot be loaded: (?!llama.cpp gave)"):
                await engine.control(Control("load_adapter", argument=f"x={file}"))
        with pytest.raises(NotFound):
            await engine.control(Control("load_adapter", argument=f"x={tmp_path / 'missing.gguf'}"))
        assert end(await generate(engine)).reason == "length"


async def test_an_invalid_configured_adapter_fails_the_load(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"not a file of weights")
    with pytest.raises(InvalidRequest, match="the adapter 'law'"):
        async with opened({"law": str(tmp_path / "bad.gguf")}):
            pass


def test_an_adapter_is_a_path_or_a_path_and_a_scale() -> None:
    options = Options(path="m.gguf", lora={"a": "a.gguf", "b": {"path": "b.gguf", "scale": 0.3}})  # type: ignore[dict-item]
    assert [(lora.path, lora.scale) for lora in options.lora.values()] == [("a.gguf", 1.0), ("b.gguf", 0.3)]


# --- whose turn it is -------------------------------------------------------------------------------------------------


def test_adapter_sets_take_turns() -> None:
    last, order = "c", []
    for _ in range(6):
        last = next_in_turn(["a", "b", "a", "c"], last)
        order.append(last)
    assert order == ["a", "b", "c", "a", "b", "c"]


@given(st.lists(st.lists(st.sampled_from("abcd"), max_size=3), min_size=5, max_size=30))
def test_no_adapter_set_waits_forever(arrivals: list[list[str]]) -> None:
    jobs, last, waited = ["x"], "a", 0
    for new in arrivals:
        jobs += new
        last = next_in_turn(jobs, last)
        if last == "x":
            return
        jobs = [job for job in jobs if job != last]  # each of theirs is done in one step
        waited += 1
    assert waited <= 5
