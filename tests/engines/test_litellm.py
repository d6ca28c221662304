"""The LiteLLM engine with a fake library that answers the same calls."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

import modelyard_litellm as litellm
from modelyard.config.load import load_config
from modelyard.core.engine import AvailableMemory, CacheInfo, ChatEngine, EngineSpec, MemoryEstimate
from modelyard.core.errors import (
    Cancelled,
    InvalidRequest,
    ModelyardError,
    NotFound,
    RateLimited,
    Timeout,
    Unavailable,
    Unsupported,
)
from modelyard.core.events import BlockDelta, Event, Failed, collect_reply
from modelyard.core.request import Constraint, Image, Message, Reasoning, Request, Sampling, Text, Tool
from modelyard.engines import upstream
from modelyard.plugins import MissingLibrary
from modelyard.protocols import openai_chat
from modelyard.server.model_definition import define_model
from modelyard.telemetry.request_capture import MemoryCaptureSink, current_capture
from modelyard_litellm import LiteLlmEngine, Options, completion_arguments

REQUEST = Request(model="any", messages=(Message("user", (Text("Hello"),)),), max_tokens=9)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "fake_litellm"))
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm as fake_library

    yield fake_library
    del sys.modules["litellm"]


def engine(model: str, **options: Any) -> LiteLlmEngine:
    chosen = litellm.Options(litellm_model=model, **options)
    made = litellm.create(EngineSpec("any", chosen, {"any": CacheInfo(4096)}))
    assert isinstance(made, LiteLlmEngine)
    return made


@asynccontextmanager
async def opened(model: str, **options: Any) -> AsyncIterator[LiteLlmEngine]:
    made = engine(model, **options)
    await made.open(lambda *_: None)
    try:
        yield made
    finally:
        await made.close()


async def read(made: LiteLlmEngine) -> list[Event]:
    return [event async for batch in made.chat(REQUEST) for event in batch]


async def test_answer_arrives_with_its_usage(library: ModuleType) -> None:
    async with opened("says/Hi you") as made:
        assert isinstance(made, ChatEngine)
        reply = collect_reply(await read(made))
        assert await made.count(REQUEST) is None
    assert reply.text == "Hi you"
    assert (reply.finished.usage.prompt, reply.finished.usage.output) == (5, 2)
    assert library.calls == [
        {
            "model": "says/Hi you",
            "messages": [{"role": "user", "content": "Hello"}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 9,
            "timeout": 120.0,
            "drop_params": True,
            "num_retries": 0,
            "max_retries": 0,
        }
    ]
    assert library.closed == ["Hi you"]
    assert (library.telemetry, library.suppress_debug_info) == (False, True)


@pytest.mark.parametrize(("model", "received"), [("says/Hi you", "Hi you"), ("refuses/429", "APIError: no")])
async def test_what_is_sent_and_received_is_captured_without_the_key(
    library: ModuleType, monkeypatch: pytest.MonkeyPatch, model: str, received: str
) -> None:
    monkeypatch.setenv("MODELYARD_TEST_KEY", "s3cret")
    sink = MemoryCaptureSink(1 << 20, enabled=True)
    capture = sink.start("t")
    assert capture is not None
    async with opened(model, litellm_api_key_env="MODELYARD_TEST_KEY") as made:
        token = current_capture.set(capture)
        await read(made)
        current_capture.reset(token)
    capture.close()
    found = sink.find("t")
    assert found is not None
    assert msgspec.json.decode(found.prompt)["messages"] == [{"role": "user", "content": "Hello"}]
    assert library.calls[-1]["api_key"] == "s3cret"
    assert "s3cret" not in found.prompt + found.output
    assert received in found.output


async def test_key_address_and_further_arguments_are_passed(
    library: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODELYARD_TEST_KEY", "s3cret")
    more = {
        "litellm_api_key_env": "MODELYARD_TEST_KEY",
        "litellm_api_base": "http://a.b",
        "litellm_params": {"region": "x"},
    }
    async with opened("says/x", **more) as made:
        await read(made)
    (call,) = library.calls
    assert {name: call[name] for name in ("api_key", "api_base", "region")} == {
        "api_key": "s3cret",
        "api_base": "http://a.b",
        "region": "x",
    }


async def test_missing_key_fails_the_load(library: ModuleType) -> None:
    with pytest.raises(InvalidRequest, match="'NO_SUCH_VARIABLE_HERE', which is not set"):
        await engine("says/x", litellm_api_key_env="NO_SUCH_VARIABLE_HERE").open(lambda *_: None)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, InvalidRequest),
        (401, Unavailable),
        (404, NotFound),
        (408, Timeout),
        (429, RateLimited),
        (503, Unavailable),
    ],
)
async def test_error_of_the_provider_keeps_its_meaning(
    library: ModuleType, status: int, kind: type[ModelyardError]
) -> None:
    async with opened(f"refuses/{status}") as made:
        (last,) = await read(made)
    assert isinstance(last, Failed)
    assert type(last.error) is kind
    assert status != 429 or last.error.retry_after == 3.0
    assert len(library.calls) == 1


@pytest.mark.parametrize(
    ("cause", "kind", "message"),
    [
        ("connection", Unavailable, "the provider of 'any' cannot be reached: Connect call failed ('127.0.0.1', 9)"),
        ("name", Unavailable, "the provider of 'any' cannot be reached: Name or service not known"),
        ("package", Unavailable, "LiteLLM needs the Python package 'mcp' for this request: install it with pip "
         "install 'modelyard[litellm]'"),
        ("bug", Unavailable, "LiteLLM failed with TypeError; the server's log has the details"),
        ("request", InvalidRequest, "litellm.APIError: the model is unknown"),
    ],
)  # fmt: skip
async def test_fault_that_is_not_the_providers_is_told_without_traceback_and_path(
    library: ModuleType, cause: str, kind: type[ModelyardError], message: str
) -> None:
    async with opened(f"fails/{cause}") as made:
        (last,) = await read(made)
    assert isinstance(last, Failed)
    assert (type(last.error), last.error.message) == (kind, message)
    written = openai_chat.write_error(last.error, trace="t")
    assert written.status == (400 if kind is InvalidRequest else 503)
    assert kind is InvalidRequest or written.headers["retry-after"] == "1"


async def test_error_before_the_first_byte_is_retried(library: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "_FIRST_DELAY_S", 0.0)
    async with opened("refuses/503once", litellm_max_retries=1) as made:
        assert collect_reply(await read(made)).text == "503once"
    assert len(library.calls) == 2


async def test_broken_stream_is_not_retried(library: ModuleType) -> None:
    async with opened("breaks/half", litellm_max_retries=5) as made:
        last = (await read(made))[-1]
    assert isinstance(last, Failed)
    assert isinstance(last.error, Unavailable)
    assert len(library.calls) == 1


async def test_cancel_closes_the_stream_of_the_provider(library: ModuleType) -> None:
    async with opened("hangs/half") as made:
        generation = made.chat(REQUEST)
        got: list[Event] = []
        while not any(isinstance(event, BlockDelta) for event in got):
            got += await anext(generation)
        generation.cancel()
        got += [event async for batch in generation for event in batch]
    assert isinstance(got[-1], Failed)
    assert isinstance(got[-1].error, Cancelled)
    assert library.closed == ["half"]


def test_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelyard_litellm.find_spec", lambda _: None)
    with pytest.raises(MissingLibrary, match=r"pip install 'modelyard\[litellm\]'"):
        litellm.verify()
    model = {"backend": "litellm", "litellm_model": "openai/gpt"}
    config = load_config(env={}, overrides={"models": {"any": model}}).config
    made = define_model(config.router().catalog.models["any"])
    assert made.fault is not None
    assert "modelyard[litellm]" in made.fault.message


def test_litellm_is_remote_and_holds_no_weights() -> None:
    assert litellm.ENGINE.remote
    assert not litellm.ENGINE.holds_weights
    assert litellm.ENGINE.estimate(EngineSpec("m", None, {}), AvailableMemory(1)) == MemoryEstimate()


# --- requests ---------------------------------------------------------------------------------------------------------

OPTIONS = Options(litellm_model="bedrock/claude", litellm_timeout_s=5)
PIXEL = "data:image/png;base64,iVBORw0KGgo="


def sent(**fields: Any) -> dict[str, Any]:
    messages = (Message("user", (Text("Look"), Image(PIXEL))),)
    return completion_arguments(Request(model="any", **{"messages": messages} | fields), OPTIONS, None)


def test_images_tools_schemas_and_effort_pass() -> None:
    got = sent(
        tools=(Tool("look", "looks", {"type": "object"}),),
        constraint=Constraint("json_schema", '{"type":"object"}'),
        reasoning=Reasoning(enabled=True, effort="low", budget=7),
    )
    assert got["messages"][0]["content"][1] == {"type": "image_url", "image_url": {"url": PIXEL}}
    assert got["tools"][0]["function"]["name"] == "look"
    assert got["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert got["reasoning_effort"] == "low"
    assert "chat_template_kwargs" not in got


def test_only_common_sampling_fields_are_sent() -> None:
    got = sent(sampling=Sampling(temperature=0.3, top_k=5, min_p=0.1, mirostat=2), session="s", n=4)
    assert (got["temperature"], got["top_k"]) == (0.3, 5)
    assert not got.keys() & {"min_p", "mirostat", "prompt_cache_key", "n"}


@pytest.mark.parametrize("fields", [{"prompts": ("Once",), "messages": ()}, {"constraint": Constraint("regex", "a+")}])
def test_unsupported_requests_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(Unsupported):
        sent(**fields)


def test_a_value_may_be_in_an_environment_variable_as_litellm_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(
        litellm_model="bedrock/nova",
        litellm_api_base="os.environ/NOVA_BASE",
        litellm_params={"aws_region_name": "os.environ/NOVA_REGION", "aws_profile": "os"},
    )
    monkeypatch.setenv("NOVA_BASE", "http://localhost:1")
    spec = EngineSpec("any", options, {"any": CacheInfo(4096)})
    assert [option for option, _ in litellm.faults(spec)] == ["litellm_params"]
    monkeypatch.setenv("NOVA_REGION", "eu-central-1")
    assert not list(litellm.faults(spec))
    sent = completion_arguments(REQUEST, options, None)
    assert (sent["api_base"], sent["aws_region_name"], sent["aws_profile"]) == (
        "http://localhost:1",
        "eu-central-1",
        "os",
    )
