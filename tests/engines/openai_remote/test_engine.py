"""A remote model over a real socket: its key, its health check, its errors, its counter."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from modelyard.engines.openai_remote.kinds import KINDS

from modelyard.config.engine_options import engine_options
from modelyard.config.load import load_config
from modelyard.core.engine import AvailableMemory, CacheInfo, ChatEngine, EngineSpec, MemoryEstimate
from modelyard.core.errors import Cancelled, InvalidRequest, ModelyardError, Unavailable
from modelyard.core.events import BlockDelta, Event, Failed, Finished, collect_reply
from modelyard.core.request import Message, Request, Text
from modelyard.engines import openai_remote
from modelyard.engines.openai_remote import outgoing
from modelyard.engines.openai_remote.engine import RemoteEngine
from tests.engines.upstream.fake_upstream import Answer, FakeUpstream, chat_stream, error_answer, fake_upstream

REQUEST = Request(model="frontier", messages=(Message("user", (Text("Hello"),)),))
KEY = "MODELYARD_TEST_REMOTE_KEY"


def engine(url: str, **options: Any) -> RemoteEngine:
    chosen = openai_remote.Options(**{"remote_base_url": url, "remote_model": "theirs"} | options)
    made = openai_remote.create(EngineSpec("frontier", chosen, {"frontier": CacheInfo(4096, 2)}))
    assert isinstance(made, RemoteEngine)
    return made


@asynccontextmanager
async def opened(at: FakeUpstream, **options: Any) -> AsyncIterator[RemoteEngine]:
    it = engine(at.url, **options)
    await it.open(lambda *_: None)
    try:
        yield it
    finally:
        await it.close()


async def read(it: RemoteEngine, request: Request = REQUEST) -> list[Event]:
    return [event async for batch in it.chat(request) for event in batch]


POOL = {
    "engine": {
        "models": {
            "frontier-large": {
                "backend": "openai_remote",
                "model_path": None,
                "remote_api_kind": "chat_completions",
                "remote_base_url": "https://api.example.com/v1",
                "remote_api_key_env": "EXAMPLE_API_KEY",
                "remote_model": "provider-model",
                "remote_timeout_s": 120,
                "remote_health_check": "config_only",
                "remote_max_retries": 0,
                "remote_thinking": "disabled",
                "target_inflight": 1,
                "enabled": False,
            }
        }
    }
}


def test_the_whole_definition_of_a_pool_becomes_these_options_and_this_request(tmp_path: Path) -> None:
    (tmp_path / "pool.json").write_text(json.dumps(POOL))
    settings = load_config(tmp_path / "pool.json", env={}).config.models["frontier-large"]
    options = engine_options(settings)
    assert options == openai_remote.Options(
        remote_base_url="https://api.example.com/v1",
        remote_api_key_env="EXAMPLE_API_KEY",
        remote_model="provider-model",
        remote_thinking="disabled",
    )
    assert json.loads(outgoing.body(REQUEST, options, KINDS["chat_completions"])) == {
        "model": "provider-model",
        "messages": [{"role": "user", "content": "Hello"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "thinking": {"type": "disabled"},
    }


async def test_it_is_a_chat_engine_that_holds_nothing_here() -> None:
    it = engine("http://127.0.0.1:1")
    assert isinstance(it, ChatEngine)
    assert openai_remote.REMOTE
    assert it.info.device == "remote"
    assert "top_k" in it.info.capabilities.ignored
    assert "temperature" not in it.info.capabilities.ignored
    spec = EngineSpec("m", None, {})
    assert openai_remote.estimate(spec, AvailableMemory(1)) == MemoryEstimate()
    await it.close()


async def test_an_answer_comes_through_with_its_usage() -> None:
    async with fake_upstream(Answer(body=chat_stream("Hi", " you"))) as up, opened(up) as it:
        reply = collect_reply(await read(it))
    assert reply.text == "Hi you"
    assert (reply.finished.usage.prompt, reply.finished.usage.output) == (3, 2)


@pytest.mark.parametrize(
    ("kind", "headers"),
    [
        ("chat_completions", {"authorization": "Bearer s3cret"}),
        ("responses", {"authorization": "Bearer s3cret"}),
        ("anthropic_messages", {"x-api-key": "s3cret", "anthropic-version": "2023-06-01"}),
    ],
)
async def test_the_key_of_the_environment_is_shown_as_the_api_wants_it(
    kind: str, headers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY, "s3cret")
    options = {"remote_api_kind": kind, "remote_api_key_env": KEY, "remote_headers": {"x-team": "a"}}
    async with fake_upstream(error_answer(500)) as up, opened(up, **options) as it:
        await read(it)
    assert up.asked[0].headers.items() >= (headers | {"x-team": "a"}).items()


async def test_a_key_that_is_not_set_keeps_the_model_from_loading() -> None:
    it = engine("http://127.0.0.1:1", remote_api_key_env="NO_SUCH_VARIABLE_HERE")
    with pytest.raises(InvalidRequest, match="'NO_SUCH_VARIABLE_HERE', which is not set"):
        await it.open(lambda *_: None)
    await it.close()


async def test_without_a_health_check_nothing_is_sent() -> None:
    async with fake_upstream(error_answer(500)) as up, opened(up):
        pass
    assert up.asked == []


async def test_the_list_of_models_is_looked_at_where_asked(caplog: pytest.LogCaptureFixture) -> None:
    listed = Answer(200, [b'{"data": [{"id": "theirs"}]}'], {"content-type": "application/json"})
    async with fake_upstream(listed) as up, opened(up, remote_health_check="models"):
        pass
    assert [(asked.method, asked.path) for asked in up.asked] == [("GET", "/models")]
    assert caplog.records == []
    other = Answer(200, [b'{"data": []}'], {"content-type": "application/json"})
    with caplog.at_level(logging.WARNING):
        async with fake_upstream(other) as up, opened(up, remote_health_check="models"):
            pass
    assert "does not list the model 'theirs'" in caplog.text


@pytest.mark.parametrize("status", [401, 403, 500, 404])
async def test_an_upstream_that_is_not_well_keeps_the_model_from_loading(status: int) -> None:
    async with fake_upstream(error_answer(status)) as up:
        it = engine(up.url, remote_health_check="models")
        with pytest.raises(ModelyardError):
            await it.open(lambda *_: None)
        await it.close()


async def test_a_refused_key_is_ours_to_put_right() -> None:
    async with fake_upstream(error_answer(401, code="invalid_api_key")) as up, opened(up, remote_max_retries=3) as it:
        (last,) = await read(it)
    assert isinstance(last, Failed)
    assert isinstance(last.error, Unavailable)
    assert last.error.code == "upstream_auth_failed"
    assert len(up.asked) == 1


async def test_cancelling_closes_the_upstreams_stream_and_frees_the_place() -> None:
    async with fake_upstream(Answer(body=chat_stream("Hi")[:1], hangs=True)) as up, opened(up) as it:
        generation = it.chat(REQUEST)
        got: list[Event] = []
        while not any(isinstance(event, BlockDelta) for event in got):
            got += await anext(generation)
        assert it.stats().running == 1
        generation.cancel()
        got += [event async for batch in generation for event in batch]
        assert it.stats().running == 0
        async with asyncio.timeout(60):
            await up.gone.wait()
    last = got[-1]
    assert isinstance(last, Failed)
    assert isinstance(last.error, Cancelled)


async def test_closing_ends_what_runs() -> None:
    async with fake_upstream(Answer(body=[], hangs=True)) as up:
        it = engine(up.url)
        await it.open(lambda *_: None)
        running = it.chat(REQUEST)
        await up.hanging.wait()
        await it.close()
        await it.close()
        (last,) = [event async for batch in running for event in batch]
        assert isinstance(last, Failed)
        assert isinstance(last.error, Unavailable)


async def test_an_upstream_without_a_counter_says_nothing() -> None:
    async with fake_upstream(error_answer(404)) as up:
        async with opened(up) as it:
            assert await it.count(REQUEST) is None
        assert up.asked == []
        async with opened(up, remote_api_kind="responses") as it:
            assert await it.count(REQUEST) is None


@pytest.mark.parametrize(
    ("kind", "path"), [("responses", "/responses/input_tokens"), ("anthropic_messages", "/v1/messages/count_tokens")]
)
async def test_the_upstreams_own_counter_is_asked(kind: str, path: str) -> None:
    counted = Answer(200, [b'{"input_tokens": 42}'], {"content-type": "application/json"})
    async with fake_upstream(counted) as up, opened(up, remote_api_kind=kind) as it:
        assert await it.count(REQUEST) == 42
    assert up.asked[0].path == path


async def test_a_counter_that_fails_is_an_error_and_no_zero() -> None:
    async with fake_upstream(error_answer(500)) as up, opened(up, remote_api_kind="responses") as it:
        with pytest.raises(Unavailable, match="cannot count"):
            await it.count(REQUEST)


async def test_an_upstream_that_is_away_is_never_the_death_of_the_engine() -> None:
    async with fake_upstream() as up:
        pass
    it = engine(up.url)
    await it.open(lambda *_: None)
    (last,) = await read(it)
    assert isinstance(last, Failed)
    assert not isinstance(last, Finished)
    assert not it.lost.done()
    await it.close()
