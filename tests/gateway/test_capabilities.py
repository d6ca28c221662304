"""What a model can, and what is said to those who want more, by the definition alone and by the engine that answers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings

from modelyard.core.engine import Capabilities
from modelyard.core.errors import Unsupported
from modelyard.core.events import Failed
from modelyard.core.request import Constraint, Image, Message, Reasoning, Request, Text, Tool
from modelyard.gateway.capabilities import CapabilityCache, capabilities, check, has_images, holds_only_text
from tests.gateway.stage import CALLER, Stage, asked, model, read
from tests.strategies import requests

EVERYTHING = Capabilities(
    modalities=("text", "image"), structured=True, lora=True, thinking_modes=("default", "enabled", "disabled")
)
PICTURE = Message("user", (Text("see"), Image("data:image/png;base64,AAAA")))
TALK = (Message("user", (Text("a"),)), Message("assistant", (Text("b"),)), Message("user", (Text("c"),)))

# code → (what the model cannot, what is asked of it)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "modality_unsupported": ({"modalities": ("text",)}, {"messages": (PICTURE,)}),
    "multi_turn_unsupported": ({"multi_turn": False}, {"messages": TALK}),
    "thinking_unsupported": (
        {"thinking_modes": ("default",)},
        {"reasoning": Reasoning(enabled=False, strict=True)},
    ),
    "tools_unsupported": ({"tools": False}, {"tools": (Tool("now"),)}),
    "structured_unsupported": ({"structured": False}, {"constraint": Constraint("json_object")}),
    "streaming_unsupported": ({"streaming": False}, {"stream": True}),
    "lora_unsupported": ({"lora": False}, {"lora_adapter": "law"}),
}


def held(can: Capabilities, request: dict[str, Any]) -> None:
    check(asked(**request), can, "demo", images="messages" in request and PICTURE in request["messages"])


@pytest.mark.parametrize("code", CASES)
def test_each_capability_is_a_coded_refusal(code: str) -> None:
    cannot, request = CASES[code]
    held(EVERYTHING, request)
    with pytest.raises(Unsupported, match="'demo'") as caught:
        held(msgspec.structs.replace(EVERYTHING, **cannot), request)
    assert caught.value.code == code
    assert caught.value.param is not None or code == "structured_unsupported"


def test_a_thinking_switch_that_is_only_a_wish_is_no_reason_to_refuse() -> None:
    held(Capabilities(), {"reasoning": Reasoning(enabled=True)})


@pytest.mark.parametrize(
    ("kind", "param"), [("gbnf", "grammar"), ("regex", "regex"), ("lark", "lark"), ("json_schema", None)]
)
def test_a_refused_form_is_named_as_the_client_wrote_it(kind: Any, param: str | None) -> None:
    with pytest.raises(Unsupported) as caught:
        held(Capabilities(), {"constraint": Constraint(kind, "x")})
    assert caught.value.param == param


# --- definition and engine together -----------------------------------------------------------------------------------


def test_an_engine_that_is_not_up_is_not_thought_ill_of() -> None:
    can = capabilities(model())
    assert (can.structured, can.lora, can.streaming) == (True, True, True)
    assert can.modalities == ("text",)
    assert can.thinking_modes == ("default", "enabled", "disabled")


def test_images_need_the_definition_and_the_engine() -> None:
    sees = msgspec.structs.replace(model(), modalities=("text", "image"))
    assert capabilities(sees, EVERYTHING).modalities == ("text", "image")
    assert capabilities(sees, Capabilities()).modalities == ("text",)


def test_where_the_engine_renders_it_knows_its_thinking_modes() -> None:
    elsewhere = msgspec.structs.replace(model(), text=None, kind="chat")
    assert capabilities(elsewhere, Capabilities(thinking_modes=("default", "disabled"))).thinking_modes == (
        "default",
        "disabled",
    )


def test_a_translating_model_has_one_turn_and_no_tools() -> None:
    can = capabilities(msgspec.structs.replace(model(), translates=True), EVERYTHING)
    assert (can.multi_turn, can.tools) == (False, False)


def test_abilities_follow_the_definition_and_the_engine() -> None:
    abilities, first = CapabilityCache(), model()
    before = abilities.of(first, None)
    assert abilities.of(first, None) is before
    assert abilities.of(first, Capabilities()) == capabilities(first, Capabilities())
    changed = msgspec.structs.replace(first, translates=True)
    assert not abilities.of(changed, Capabilities()).tools


# --- in the life of a request -----------------------------------------------------------------------------------------


async def test_a_request_is_refused_before_it_queues_where_the_engine_is_up() -> None:
    async with Stage() as stage:
        with pytest.raises(Unsupported) as caught:
            await stage.gateway.prepare(asked(lora_adapter="law"), CALLER)
        assert caught.value.code == "lora_unsupported"


async def test_an_engine_that_came_up_later_is_asked_before_it_is_given_the_job() -> None:
    stage = Stage()
    job = await stage.gateway.prepare(asked(lora_adapter="law"), CALLER)
    async with stage:
        answer = stage.gateway.start(job)
        (last,) = await read(answer)
        answer.close()
        assert isinstance(last, Failed)
        assert last.error.code == "lora_unsupported"
        assert (stage.engine.jobs, stage.running) == ([], 0)


@settings(max_examples=100, deadline=None)
@given(requests(images_in_results=True, references=True))
def test_what_holds_only_text_has_no_images_and_nothing_but_texts(request: Request) -> None:
    kinds = {type(part) for message in request.messages for part in message.parts}
    assert holds_only_text(request) == (kinds <= {Text})
    assert not (holds_only_text(request) and has_images(request))
