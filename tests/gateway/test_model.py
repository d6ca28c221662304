"""Capabilities of a model, from its definition and its engine, and the errors for requests that need more."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from modelyard.core.engine import Capabilities
from modelyard.core.errors import Unsupported
from modelyard.core.events import Failed
from modelyard.core.request import Constraint, Image, Message, Reasoning, Request, Sampling, Text, Tool, ToolResult
from modelyard.engines.llama_cpp.options import Options, model_capabilities
from modelyard.gateway.model import (
    CapabilityCache,
    check_capabilities,
    check_embeddings,
    effective_capabilities,
    ignored_parameters,
    media_kinds,
)
from modelyard.library.gguf import ModelPurpose
from tests.gateway.harness import CALLER, GatewayHarness, make_request, model, read_events

EVERYTHING = Capabilities(
    modalities=("text", "image"), structured=True, lora=True, thinking_modes=("default", "enabled", "disabled")
)
PICTURE = Message("user", (Text("see"), Image("data:image/png;base64,AAAA")))
CONVERSATION = (Message("user", (Text("a"),)), Message("assistant", (Text("b"),)), Message("user", (Text("c"),)))

# code → (missing capability, request that needs it)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "modality_unsupported": ({"modalities": ("text",)}, {"messages": (PICTURE,)}),
    "multi_turn_unsupported": ({"multi_turn": False}, {"messages": CONVERSATION}),
    "thinking_unsupported": (
        {"thinking_modes": ("default",)},
        {"reasoning": Reasoning(enabled=False, strict=True)},
    ),
    "tools_unsupported": ({"tools": False}, {"tools": (Tool("now"),)}),
    "structured_unsupported": ({"structured": False}, {"constraint": Constraint("json_object")}),
    "streaming_unsupported": ({"streaming": False}, {"stream": True}),
    "lora_unsupported": ({"lora": False}, {"lora_adapter": "law"}),
}


def check(can: Capabilities, request: dict[str, Any]) -> None:
    asked = make_request(**request)
    check_capabilities(asked, can, "demo", media=media_kinds(asked))


@pytest.mark.parametrize("code", CASES)
def test_each_missing_capability_has_an_error_code(code: str) -> None:
    cannot, request = CASES[code]
    check(EVERYTHING, request)
    with pytest.raises(Unsupported, match="'demo'") as caught:
        check(msgspec.structs.replace(EVERYTHING, **cannot), request)
    assert caught.value.code == code
    assert caught.value.param is not None or code == "structured_unsupported"


def test_an_optional_thinking_switch_is_not_refused() -> None:
    check(Capabilities(), {"reasoning": Reasoning(enabled=True)})


@pytest.mark.parametrize(
    ("kind", "param"), [("gbnf", "grammar"), ("regex", "regex"), ("lark", "lark"), ("json_schema", None)]
)
def test_a_refused_constraint_names_the_field_of_the_request(kind: Any, param: str | None) -> None:
    with pytest.raises(Unsupported) as caught:
        check(Capabilities(), {"constraint": Constraint(kind, "x")})
    assert caught.value.param == param


# --- definition and engine together -----------------------------------------------------------------------------------


def test_an_engine_that_is_not_loaded_is_assumed_capable() -> None:
    can = effective_capabilities(model())
    assert (can.structured, can.lora, can.streaming) == (True, True, True)
    assert can.modalities == ("text",)
    assert can.thinking_modes == ("default", "enabled", "disabled")


def test_images_need_support_in_the_definition_and_in_the_engine() -> None:
    vision_model = msgspec.structs.replace(model(), modalities=("text", "image"))
    assert effective_capabilities(vision_model, EVERYTHING).modalities == ("text", "image")
    assert effective_capabilities(vision_model, Capabilities()).modalities == ("text",)


def test_a_chat_engine_reports_its_thinking_modes() -> None:
    chat_model = msgspec.structs.replace(model(), text=None, kind="chat")
    assert effective_capabilities(chat_model, Capabilities(thinking_modes=("default", "disabled"))).thinking_modes == (
        "default",
        "disabled",
    )


def test_a_translation_model_has_one_turn_and_no_tools() -> None:
    can = effective_capabilities(msgspec.structs.replace(model(), translates=True), EVERYTHING)
    assert (can.multi_turn, can.tools) == (False, False)


def test_cached_capabilities_follow_the_definition_and_the_engine() -> None:
    cache, first = CapabilityCache(), model()
    before = cache.effective(first, None)
    assert cache.effective(first, None) is before
    assert cache.effective(first, Capabilities()) == effective_capabilities(first, Capabilities())
    changed = msgspec.structs.replace(first, translates=True)
    assert not cache.effective(changed, Capabilities()).tools


# --- during a request -------------------------------------------------------------------------------------------------


async def test_a_request_is_refused_before_it_queues_if_the_engine_is_loaded() -> None:
    async with GatewayHarness() as harness:
        with pytest.raises(Unsupported) as caught:
            await harness.gateway.prepare(make_request(lora_adapter="law"), CALLER)
        assert caught.value.code == "lora_unsupported"


async def test_capabilities_are_checked_again_if_the_engine_was_loaded_later() -> None:
    harness = GatewayHarness()
    prepared = await harness.gateway.prepare(make_request(lora_adapter="law"), CALLER)
    async with harness:
        stream = harness.gateway.start(prepared)
        (last,) = await read_events(stream)
        stream.close()
        assert isinstance(last, Failed)
        assert last.error.code == "lora_unsupported"
        assert (harness.engine.generations, harness.running) == ([], 0)


def test_a_request_has_images_in_messages_and_in_tool_results() -> None:
    result = Message("tool", (ToolResult("c", (Image("data:image/png;base64,AAAA"),)),))
    assert media_kinds(make_request(messages=(PICTURE,)))
    assert media_kinds(make_request(messages=(result,)))
    assert not media_kinds(make_request(messages=CONVERSATION))


def test_only_parameters_that_the_client_set_are_reported_as_ignored() -> None:
    can = Capabilities(ignored=("top_k", "min_p", "beam_size"))
    sampling = Sampling(top_k=5, temperature=1.0, min_p=0.0)
    assert ignored_parameters(Request(model="m", sampling=sampling), can) == ("top_k", "min_p")
    assert ignored_parameters(Request(model="m"), can) == ()


def test_a_budget_for_reasoning_is_ignored_where_the_engine_cannot_end_it() -> None:
    request = Request(model="m", reasoning=Reasoning(budget=5))
    assert ignored_parameters(request, Capabilities()) == ("reasoning_budget",)
    assert ignored_parameters(request, Capabilities(reasoning_budget=True)) == ()


@pytest.mark.parametrize(
    ("can", "advised"),
    [
        (model_capabilities(ModelPurpose(), Options(path="x")), True),
        (model_capabilities(ModelPurpose(has_vectors=False), Options(path="x")), False),  # deepseek4's graph has none
        (model_capabilities(ModelPurpose(task="reranking"), Options(path="x")), False),
        (Capabilities(), False),  # an engine without that setting
    ],
)
def test_a_setting_is_advised_only_where_it_would_add_embeddings(can: Capabilities, advised: bool) -> None:
    with pytest.raises(Unsupported) as refused:
        check_embeddings(can, "chatty")
    assert ("set embeddings = true" in refused.value.message) == advised
    assert "use an embedding model" in refused.value.message
